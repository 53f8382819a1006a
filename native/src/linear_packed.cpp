// Linear layers whose weights are packed, of 8 or 4 bits or bfloat16: panels of 64 outputs as in experts.h, shared among threads.
#include "experts.h"

#include <string.h>

#include "choice.h"
#include "scratch.h"
#include "tape.h"
#include "team.h"

enum { SMALL = 1 << 16 };       // weights below which one thread is faster
enum { SMALL_ROWS = 1 << 13, PART = 512 };  // numbers of rows below which it is faster, and of one that a thread makes whole at a time

namespace {

struct PackedCall {
  Multiplier by;
  const uint8_t *packed, *bias;
  uint8_t *y;
  RowsAt x;
  int64_t y_stride, rows, inputs, outputs, panel_bytes;

  void add_bias(float *c, int64_t rows_here, int64_t first, int columns) const {
    for (int64_t m = 0; m < rows_here; m++)
      for (int j = 0; j < columns; j++) {
        uint32_t bits = by.x_type == X_F32 ? ((const uint32_t *)bias)[first + j] : (uint32_t)((const bf16 *)bias)[first + j] << 16;
        float value;
        memcpy(&value, &bits, 4);
        c[m * PANEL + j] += value;
      }
  }

  // Panels low to high.
  void multiply(int64_t low, int64_t high, uint8_t *work) const {
    auto panel_at = [&](int64_t n) { return n < high ? packed + n * panel_bytes : nullptr; };
    by.panels(x, 0, rows, inputs, low, high, panel_at, work, [&](int64_t n, float *c, int64_t first, int count) {
      int columns = (int)(outputs - n * PANEL < PANEL ? outputs - n * PANEL : PANEL);
      void *to[MAX_BAND];
      for (int64_t i = 0; i < count; i++) to[i] = y + ((first + i) * y_stride + n * PANEL) * by.item();
      if (bias) add_bias(c, count, n * PANEL, columns);
      by.ops->store(c, PANEL, count, to, columns);
    });
    if (by.bands) by.bands->release();
  }
};

}  // namespace

RowsAt whole_rows(const ExpertOps *ops, const RowsAt &a, int64_t rows, int64_t depth, int64_t format, uint8_t *to, int threads) {
  const int64_t stride = Multiplier::whole_stride(depth), parts = (depth + PART - 1) / PART;
  const int64_t pieces = rows * depth <= SMALL_ROWS ? 1 : team_pieces(threads, rows * parts), item = 2;
  team(threads, pieces, [&](int64_t piece, int) {
    for (int64_t i = rows * parts * piece / pieces; i < rows * parts * (piece + 1) / pieces; i++) {
      const int64_t m = i / parts, k = i % parts * PART, here = depth - k < PART ? depth - k : (int64_t)PART;
      ops->whole(a[m] + k * item, here, format, to + m * stride + k / K_GROUP * WHOLE_BYTES);
    }
  });
  return {to, stride, nullptr, true, true};
}

// y [rows, outputs] = x [rows, inputs] w^T + bias (or null), all of x's type. packed: from linear_packed_fill. Strides in numbers.
NATIVE_API void linear_packed(int64_t x_type, int64_t format, const uint8_t *packed, const void *x, int64_t x_stride, const void *bias,
                              void *y, int64_t y_stride, int64_t rows, int64_t inputs, int64_t outputs, int threads) {
  tape_note(linear_packed, x_type, format, packed, x, x_stride, bias, y, y_stride, rows, inputs, outputs, threads);
  if (rows == 0) return;
  int64_t panels = (outputs + PANEL - 1) / PANEL;
  Multiplier by = {experts_ops(x_type), experts_bands(x_type), x_type, format, narrow_rows_of(x_type, format)};
  PackedCall call = {by, packed, (const uint8_t *)bias, (uint8_t *)y, {(const uint8_t *)x, x_stride * by.item(), nullptr, false, false},
                     y_stride, rows, inputs, outputs, by.panel_bytes(inputs)};
  if (inputs * outputs <= SMALL && rows < FEW_ROWS) threads = 1;
  int64_t work_bytes = by.work_bytes(inputs, rows);
  work_bytes = (work_bytes + 63) / 64 * 64;
  const bool whole = by.whole(rows);  // then once for all pieces
  uint8_t *work = scratch(threads * work_bytes + (whole ? rows * by.whole_stride(inputs) : 0));
  if (whole) call.x = whole_rows(by.ops, call.x, rows, inputs, format, work + threads * work_bytes, threads);
  int64_t pieces = team_pieces(threads, panels);
  team(threads, pieces, [&](int64_t piece, int worker) {
    call.multiply(panels * piece / pieces, panels * (piece + 1) / pieces, work + worker * work_bytes);
  });
}
