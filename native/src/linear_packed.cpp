// Linear layers with weights of 8 bits: panels of 64 outputs as in experts.h, shared among threads.
#include "experts.h"

#include <omp.h>
#include <string.h>

#include "scratch.h"

enum { SMALL = 1 << 16 };  // weights below which one thread is faster

namespace {

struct PackedCall {
  const ExpertOps *ops;
  int64_t x_type, format;
  const uint8_t *packed, *x, *bias;
  uint8_t *y;
  int64_t x_stride, y_stride, rows, inputs, outputs, panel_bytes, wide_bytes;

  int64_t item() const { return x_type == X_F32 ? 4 : 2; }

  void add_bias(float *c, int64_t rows_here, int64_t first, int columns) const {
    for (int64_t m = 0; m < rows_here; m++)
      for (int j = 0; j < columns; j++) {
        uint32_t bits = x_type == X_F32 ? ((const uint32_t *)bias)[first + j] : (uint32_t)((const bf16 *)bias)[first + j] << 16;
        float value;
        memcpy(&value, &bits, 4);
        c[m * PANEL + j] += value;
      }
  }

  void panel(int64_t n, const uint8_t *next, uint8_t *wide) const {
    alignas(64) float c[MAX_ROWS * PANEL];
    const void *a[MAX_ROWS];
    void *to[MAX_ROWS];
    const uint8_t *p = packed + n * panel_bytes;
    bool few = rows <= 3 * MAX_NARROW_ROWS;
    const TileFn *tiles = few ? ops->narrow[format - W_FP8] : ops->scaled;
    int64_t most = few ? (int64_t)MAX_NARROW_ROWS : (int64_t)MAX_ROWS;
    if (!few) ops->widen[format - W_FP8](p, inputs, wide), p = wide;
    int columns = (int)(outputs - n * PANEL < PANEL ? outputs - n * PANEL : PANEL);
    Ahead ahead = {few ? next : nullptr, nullptr, 0, few && next};
    for (int64_t m = 0; m < rows;) {
      int64_t left = rows - m, count = left <= most ? left : left < 2 * most ? (left + 1) / 2 : most;
      for (int64_t i = 0; i < count; i++) {
        a[i] = x + (m + i) * x_stride * item();
        to[i] = y + ((m + i) * y_stride + n * PANEL) * item();
      }
      tiles[count](a, p, inputs, c, ahead);
      ahead.own = false, ahead.next = nullptr;
      if (bias) add_bias(c, count, n * PANEL, columns);
      ops->store(c, PANEL, (int)count, to, columns);
      m += count;
    }
  }
};

}  // namespace

// y [rows, outputs] = x [rows, inputs] w^T + bias (or null), all of x's type. packed: from linear_packed_fill. Strides in numbers.
NATIVE_API void linear_packed(int64_t x_type, int64_t format, const uint8_t *packed, const void *x, int64_t x_stride, const void *bias,
                              void *y, int64_t y_stride, int64_t rows, int64_t inputs, int64_t outputs, int threads) {
  if (rows == 0) return;
  int64_t blocks = (inputs + K_BLOCK - 1) / K_BLOCK, panels = (outputs + PANEL - 1) / PANEL;
  PackedCall call = {experts_ops(x_type), x_type, format, packed, (const uint8_t *)x, (const uint8_t *)bias, (uint8_t *)y, x_stride, y_stride,
                     rows, inputs, outputs, blocks * PANEL * 4 + inputs * PANEL, 0};
  call.wide_bytes = (blocks * PANEL * 4 + inputs * PANEL * call.item() + 63) / 64 * 64;
  if (inputs * outputs <= SMALL && rows < MAX_ROWS) threads = 1;
  uint8_t *wide = scratch(threads * call.wide_bytes);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t thread = 0; thread < threads; thread++)
    for (int64_t n = panels * thread / threads, end = panels * (thread + 1) / threads; n < end; n++)
      call.panel(n, n + 1 < end ? packed + (n + 1) * call.panel_bytes : packed + n * call.panel_bytes, wide + thread * call.wide_bytes);
}
