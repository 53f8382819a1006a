// Pieces by OpenMP: its threads are those that torch has in this process.
#include "team.h"

#include <omp.h>

void team_run(int threads, int64_t pieces, void (*piece)(const void *job, int64_t i, int worker), const void *job) {
  if (threads <= 1 || pieces <= 1) {
    for (int64_t i = 0; i < pieces; i++) piece(job, i, 0);
    return;
  }
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (int64_t i = 0; i < pieces; i++) piece(job, i, omp_get_thread_num());
}
