// Linear layers: outputs shared among threads, ways by the number of rows.
#include "linear.h"

#include "choice.h"
#include "scratch.h"
#include "tape.h"
#include "team.h"

enum { SMALL = 1 << 16 };  // weights below which one thread is faster

namespace {
// How the rows are multiplied, and what a thread works in: what that takes, and the best outputs that it has seen.
struct Work {
  enum Way { FEW, TILES, MANY, SINGLE } way;  // the last: in float32, any number of rows
  int64_t panel_bytes, bytes;
  uint8_t *start;
  const LinearOps *single;
  Work(const LinearCall &call, int64_t more, int threads, bool halves = true) {
    single = vector_isa() == ISA_AVX2 ? &linear_avx2[halves] : vector_isa() == ISA_AVX512 || !halves ? &linear_avx512[halves] : nullptr;
    // What cannot be cut into pairs is left to the ways that read weights as they lie.
    bool pairs = call.inputs % 2 == 0;
    bool fixed = kernel_choice().fixed_order;
    if (single) way = SINGLE;
    else if (has_tiles() && (pairs || !fixed)) way = call.rows <= TILE_ROWS_AT_ONCE ? TILES : pairs ? MANY : FEW;
    else way = call.rows >= MANY_ROWS && pairs && !fixed ? MANY : FEW;
    panel_bytes = way == MANY ? linear_many_rows_bytes(call.rows, call.inputs) : way == TILES ? linear_tile_rows_bytes(call.inputs) : single ? single->bytes(call) : 0;
    bytes = (panel_bytes + more + 63) / 64 * 64;
    start = scratch(bytes * threads);
  }
  uint8_t *of(int thread) const { return start + thread * bytes; }
  void multiply(const LinearCall &call, int64_t first, int64_t last, int thread) const {
    if (way == MANY) linear_many_rows(call, first, last, of(thread));
    else if (way == TILES) linear_tile_rows(call, first, last, of(thread));
    else if (way == SINGLE) single->multiply(call, first, last, of(thread));
    else linear_few_rows(call, first, last);
  }
};

int64_t blocks_of(int64_t outputs) { return (outputs + OUTPUTS_AT_ONCE - 1) / OUTPUTS_AT_ONCE; }

// The first output of a piece.
int64_t first_of(int64_t outputs, int64_t piece, int64_t pieces) {
  int64_t first = blocks_of(outputs) * piece / pieces * OUTPUTS_AT_ONCE;
  return first < outputs ? first : outputs;
}

void multiply(const LinearCall &call, int threads, bool halves) {
  if (call.rows == 0) return;
  if (call.inputs * call.outputs <= SMALL && call.rows < MANY_ROWS) threads = 1;
  Work work(call, 0, threads, halves);
  int64_t pieces = team_pieces(threads, blocks_of(call.outputs));
  team(threads, pieces, [&](int64_t i, int worker) { work.multiply(call, first_of(call.outputs, i, pieces), first_of(call.outputs, i + 1, pieces), worker); });
}
}  // namespace

// y [rows, outputs] = x [rows, inputs] w [outputs, inputs]^T + bias [outputs] (or null), float32. Strides in numbers.
NATIVE_API void linear_f32(const void *x, int64_t x_stride, const void *w, int64_t w_stride, const void *bias, void *y,
                           int64_t y_stride, int64_t rows, int64_t inputs, int64_t outputs, int threads) {
  tape_note(linear_f32, x, x_stride, w, w_stride, bias, y, y_stride, rows, inputs, outputs, threads);
#if defined(__x86_64__)
  LinearCall call = {(const bf16 *)x, (const bf16 *)w, (const bf16 *)bias, (bf16 *)y, rows, inputs, outputs, x_stride, w_stride, y_stride, nullptr, nullptr};
  multiply(call, threads, false);
#endif
}

// The same of bfloat16.
NATIVE_API void linear_bf16(const void *x, int64_t x_stride, const void *w, int64_t w_stride, const void *bias, void *y,
                            int64_t y_stride, int64_t rows, int64_t inputs, int64_t outputs, int threads) {
  tape_note(linear_bf16, x, x_stride, w, w_stride, bias, y, y_stride, rows, inputs, outputs, threads);
#if defined(__x86_64__)
  LinearCall call = {(const bf16 *)x, (const bf16 *)w, (const bf16 *)bias, (bf16 *)y, rows, inputs, outputs, x_stride, w_stride, y_stride, nullptr, nullptr};
  multiply(call, threads, true);
#endif
}

// place[row] = the output that is largest when rounded to bfloat16, the first of equals; int64 [rows].
NATIVE_API void linear_bf16_best(const void *x, int64_t x_stride, const void *w, int64_t w_stride, int64_t *place, int64_t rows,
                                 int64_t inputs, int64_t outputs, int threads) {
  tape_note(linear_bf16_best, x, x_stride, w, w_stride, place, rows, inputs, outputs, threads);
#if defined(__x86_64__)
  LinearCall call = {(const bf16 *)x, (const bf16 *)w, nullptr, nullptr, rows, inputs, outputs, x_stride, w_stride, 0, nullptr, nullptr};
  if (rows == 0) return;
  int64_t best_bytes = (rows * 2 + 7) / 8 * 8;
  Work work(call, best_bytes + rows * 8, threads);
  auto best_of = [&](int worker) { return (int16_t *)(work.of(worker) + work.panel_bytes); };
  auto place_of = [&](int worker) { return (int64_t *)((uint8_t *)best_of(worker) + best_bytes); };
  for (int worker = 0; worker < threads; worker++)
    for (int64_t m = 0; m < rows; m++) best_of(worker)[m] = INT16_MIN, place_of(worker)[m] = 0;
  int64_t pieces = team_pieces(threads, blocks_of(outputs));
  team(threads, pieces, [&](int64_t i, int worker) {
    LinearCall own = call;
    own.best = best_of(worker), own.place = place_of(worker);
    work.multiply(own, first_of(outputs, i, pieces), first_of(outputs, i + 1, pieces), worker);
  });
  for (int64_t m = 0; m < rows; m++) {
    int16_t most = INT16_MIN;
    place[m] = 0;
    for (int worker = 0; worker < threads; worker++) {
      int16_t best = best_of(worker)[m];
      int64_t own = place_of(worker)[m];
      if (best > most || (best == most && own < place[m])) most = best, place[m] = own;
    }
  }
#endif
}
