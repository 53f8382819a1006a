// The threads that share a kernel's work. Pieces are taken one by one by whoever is there.
#pragma once
#include "native.h"

// Calls piece(job, i, worker) once for each i in 0 .. pieces - 1, each worker's in rising order, and returns when all have been done.
// 0 <= worker < threads.
void team_run(int threads, int64_t pieces, void (*piece)(const void *job, int64_t i, int worker), const void *job);

// Calls work(job) once, by this thread. Meanwhile the other threads wait for the pieces that it hands out by team_run.
void team_together(int threads, void (*work)(const void *job), const void *job);

template <class Work> inline void team(int threads, int64_t pieces, const Work &work) {
  team_run(threads, pieces, [](const void *job, int64_t i, int worker) { (*(const Work *)job)(i, worker); }, &work);
}

// Into how many pieces work is cut that can be cut into at most `most`: a few for each thread, so that all end at about the same time.
enum { FEW_PIECES = 4, MANY_PIECES = 16 };
static inline int64_t team_pieces(int threads, int64_t most, int64_t each = FEW_PIECES) {
  int64_t wanted = threads > 1 ? each * threads : 1;
  return wanted < most ? wanted : most;
}
