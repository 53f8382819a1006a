// Pieces by OpenMP: its threads are those that torch has in this process.
#include "team.h"

#include <omp.h>
#include <sched.h>

#include <atomic>

namespace {

// Threads that stay in one parallel region while one of them calls kernel after kernel. Handing out work then takes the time in which a
// cache line travels, and a thread that the system has put to sleep between two kernels is not waited for: the others take its pieces.
struct Crew {
  int threads;
  std::atomic<bool> over{false};
  alignas(64) std::atomic<uint64_t> left{0};  // number of the work << 32 | pieces that nobody has taken
  alignas(64) std::atomic<int64_t> done{0};   // pieces of this work
  void (*piece)(const void *job, int64_t i, int worker);
  const void *job;
  int64_t pieces;

  // Takes pieces until there are none. What the work is may be read only by whoever has one of its pieces: before they are all done
  // no other work is handed out.
  void take(int worker) {
    uint64_t now = left.load(std::memory_order_acquire);
    while (uint32_t count = (uint32_t)now) {
      if (!left.compare_exchange_weak(now, now - 1, std::memory_order_acq_rel)) continue;
      piece(job, pieces - count, worker);
      done.fetch_add(1, std::memory_order_release);
      now = left.load(std::memory_order_acquire);
    }
  }

  void run(int64_t all, void (*what)(const void *, int64_t, int), const void *with) {
    piece = what, job = with, pieces = all;
    done.store(0, std::memory_order_relaxed);
    uint64_t number = (left.load(std::memory_order_relaxed) >> 32) + 1;
    left.store(number << 32 | (uint64_t)all, std::memory_order_release);
    take(0);
    for (int turns = 0; done.load(std::memory_order_acquire) < all;) pause(turns);
  }

  void serve(int worker) {
    for (int turns = 0; !over.load(std::memory_order_acquire);) {
      if (!(uint32_t)left.load(std::memory_order_acquire)) {
        pause(turns);
        continue;
      }
      take(worker);
      turns = 0;
    }
  }

  // A thread that has waited for long lets others run on its core, perhaps the one that it waits for.
  static void pause(int &turns) {
    enum { LONG = 4096 };
    if (++turns > LONG) {
      sched_yield();
      return;
    }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
};

thread_local Crew *crew = nullptr;  // of the thread that calls the kernels

}  // namespace

void team_run(int threads, int64_t pieces, void (*piece)(const void *job, int64_t i, int worker), const void *job) {
  if (threads <= 1 || pieces <= 1) {
    for (int64_t i = 0; i < pieces; i++) piece(job, i, 0);
    return;
  }
  if (crew && threads == crew->threads && pieces <= UINT32_MAX) {
    crew->run(pieces, piece, job);
    return;
  }
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (int64_t i = 0; i < pieces; i++) piece(job, i, omp_get_thread_num());
}

void team_together(int threads, void (*work)(const void *job), const void *job) {
  if (threads <= 1 || crew) {
    work(job);
    return;
  }
  Crew own;
  own.threads = threads;
#pragma omp parallel num_threads(threads)
  {
    if (omp_get_num_threads() != threads) {  // fewer than asked for: nobody may be counted on
      if (omp_get_thread_num() == 0) work(job);
    } else if (omp_get_thread_num() == 0) {
      crew = &own;
      work(job);
      crew = nullptr;
      own.over.store(true, std::memory_order_release);
    } else {
      own.serve(omp_get_thread_num());
    }
  }
}
