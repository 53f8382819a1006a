// Linear layers: outputs shared among threads, ways by the number of rows.
#include "linear.h"

#include <omp.h>

#include "scratch.h"

enum { SMALL = 1 << 16 };  // weights below which one thread is faster

namespace {
// What a thread works in: a panel, and the best outputs that it has seen.
struct Work {
  bool many;
  int64_t panel_bytes, bytes;
  uint8_t *start;
  Work(const LinearCall &call, int64_t more, int threads) {
    many = call.rows >= MANY_ROWS && call.inputs % 2 == 0;
    panel_bytes = many ? OUTPUTS_AT_ONCE * call.inputs * (int64_t)sizeof(bf16) : 0;
    bytes = (panel_bytes + more + 63) / 64 * 64;
    start = scratch(bytes * threads);
  }
  uint8_t *of(int thread) const { return start + thread * bytes; }
  void multiply(const LinearCall &call, int64_t first, int64_t last, int thread) const {
    if (many) linear_many_rows(call, first, last, of(thread));
    else linear_few_rows(call, first, last);
  }
};

// The outputs of a thread.
int64_t first_of(int64_t outputs, int64_t thread, int64_t threads) {
  int64_t blocks = (outputs + OUTPUTS_AT_ONCE - 1) / OUTPUTS_AT_ONCE, first = blocks * thread / threads * OUTPUTS_AT_ONCE;
  return first < outputs ? first : outputs;
}
}  // namespace

// y [rows, outputs] = x [rows, inputs] w [outputs, inputs]^T + bias [outputs] (or null), bfloat16. Strides in numbers.
NATIVE_API void linear_bf16(const void *x, int64_t x_stride, const void *w, int64_t w_stride, const void *bias, void *y,
                            int64_t y_stride, int64_t rows, int64_t inputs, int64_t outputs, int threads) {
#if defined(__x86_64__)
  LinearCall call = {(const bf16 *)x, (const bf16 *)w, (const bf16 *)bias, (bf16 *)y, rows, inputs, outputs, x_stride, w_stride, y_stride, nullptr, nullptr};
  if (rows == 0) return;
  if (inputs * outputs <= SMALL && rows < MANY_ROWS) threads = 1;
  Work work(call, 0, threads);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t thread = 0; thread < threads; thread++)
    work.multiply(call, first_of(outputs, thread, threads), first_of(outputs, thread + 1, threads), omp_get_thread_num());
#endif
}

// place[row] = the output that is largest when rounded to bfloat16, the first of equals; int64 [rows].
NATIVE_API void linear_bf16_best(const void *x, int64_t x_stride, const void *w, int64_t w_stride, int64_t *place, int64_t rows,
                                 int64_t inputs, int64_t outputs, int threads) {
#if defined(__x86_64__)
  LinearCall call = {(const bf16 *)x, (const bf16 *)w, nullptr, nullptr, rows, inputs, outputs, x_stride, w_stride, 0, nullptr, nullptr};
  if (rows == 0) return;
  int64_t best_bytes = (rows * 2 + 7) / 8 * 8;
  Work work(call, best_bytes + rows * 8, threads);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t thread = 0; thread < threads; thread++) {
    LinearCall own = call;
    own.best = (int16_t *)(work.of((int)thread) + work.panel_bytes), own.place = (int64_t *)((uint8_t *)own.best + best_bytes);
    for (int64_t m = 0; m < rows; m++) own.best[m] = INT16_MIN, own.place[m] = 0;
    work.multiply(own, first_of(outputs, thread, threads), first_of(outputs, thread + 1, threads), (int)thread);
  }
  for (int64_t m = 0; m < rows; m++) {
    int16_t most = INT16_MIN;
    place[m] = 0;
    for (int thread = 0; thread < threads; thread++) {
      const uint8_t *own = work.of(thread) + work.panel_bytes;
      int16_t best = ((const int16_t *)own)[m];
      if (best > most) most = best, place[m] = ((const int64_t *)(own + best_bytes))[m];
    }
  }
#endif
}
