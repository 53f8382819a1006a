// Linear layers whose weights are packed, of 8 bits or bfloat16: panels of 64 outputs as in experts.h, shared among threads.
#include "experts.h"

#include <string.h>

#include "scratch.h"
#include "tape.h"
#include "team.h"

enum { SMALL = 1 << 16 };  // weights below which one thread is faster

namespace {

struct PackedCall {
  Multiplier by;
  const uint8_t *packed, *x, *bias;
  uint8_t *y;
  int64_t x_stride, y_stride, rows, inputs, outputs, panel_bytes, wide_bytes;

  void add_bias(float *c, int64_t rows_here, int64_t first, int columns) const {
    for (int64_t m = 0; m < rows_here; m++)
      for (int j = 0; j < columns; j++) {
        uint32_t bits = by.x_type == X_F32 ? ((const uint32_t *)bias)[first + j] : (uint32_t)((const bf16 *)bias)[first + j] << 16;
        float value;
        memcpy(&value, &bits, 4);
        c[m * PANEL + j] += value;
      }
  }

  void panel(int64_t n, const uint8_t *next, uint8_t *wide) const {
    int columns = (int)(outputs - n * PANEL < PANEL ? outputs - n * PANEL : PANEL);
    by.panel(packed + n * panel_bytes, inputs, next, wide, 0, rows,
             [&](int64_t row) { return x + row * x_stride * by.item(); },
             [&](float *c, int64_t first, int count) {
               void *to[MAX_BAND];
               for (int64_t i = 0; i < count; i++) to[i] = y + ((first + i) * y_stride + n * PANEL) * by.item();
               if (bias) add_bias(c, count, n * PANEL, columns);
               by.ops->store(c, PANEL, count, to, columns);
             });
  }
};

}  // namespace

// y [rows, outputs] = x [rows, inputs] w^T + bias (or null), all of x's type. packed: from linear_packed_fill. Strides in numbers.
NATIVE_API void linear_packed(int64_t x_type, int64_t format, const uint8_t *packed, const void *x, int64_t x_stride, const void *bias,
                              void *y, int64_t y_stride, int64_t rows, int64_t inputs, int64_t outputs, int threads) {
  tape_note(linear_packed, x_type, format, packed, x, x_stride, bias, y, y_stride, rows, inputs, outputs, threads);
  if (rows == 0) return;
  int64_t panels = (outputs + PANEL - 1) / PANEL;
  Multiplier by = {experts_ops(x_type), x_type, format};
  PackedCall call = {by, packed, (const uint8_t *)x, (const uint8_t *)bias, (uint8_t *)y, x_stride, y_stride,
                     rows, inputs, outputs, by.panel_bytes(inputs), by.wide_bytes()};
  if (inputs * outputs <= SMALL && rows < FEW_ROWS) threads = 1;
  uint8_t *wide = scratch(threads * call.wide_bytes);
  int64_t pieces = team_pieces(threads, panels);
  team(threads, pieces, [&](int64_t piece, int worker) {
    for (int64_t n = panels * piece / pieces, end = panels * (piece + 1) / pieces; n < end; n++)
      call.panel(n, n + 1 < end ? packed + (n + 1) * call.panel_bytes : packed + n * call.panel_bytes, wide + worker * call.wide_bytes);
  });
}
