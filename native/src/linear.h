// y = x w^T + b, weights as they lie: [outputs, inputs], rows of any distance.
#pragma once
#include "native.h"

struct LinearCall {
  const bf16 *x, *w, *bias;  // bias: or null; for LinearOps of float32 all are of that
  bf16 *y;
  int64_t rows, inputs, outputs, x_stride, w_stride, y_stride;
  int16_t *best;   // or, without y: for every row the largest output so far, rounded, as a whole number in the order of the floats
  int64_t *place;  // which it is
};

// Outputs first to last (first a multiple of OUTPUTS_AT_ONCE) of all rows.
enum { OUTPUTS_AT_ONCE = 64, MANY_ROWS = 24 };
void linear_few_rows(const LinearCall &call, int64_t first, int64_t last);
// The same, weights packed as they are needed into `work`, of linear_many_rows_bytes. inputs is even.
void linear_many_rows(const LinearCall &call, int64_t first, int64_t last, uint8_t *work);
int64_t linear_many_rows_bytes(int64_t rows, int64_t inputs);
// The same for up to TILE_ROWS_AT_ONCE rows on matrix tiles, weights as they lie; work: of linear_tile_rows_bytes. Sums are added up in
// the same order as those of linear_many_rows on matrix tiles: a row does not depend on how many others there are.
enum { TILE_ROWS_AT_ONCE = 16 };
void linear_tile_rows(const LinearCall &call, int64_t first, int64_t last, uint8_t *work);
int64_t linear_tile_rows_bytes(int64_t inputs);

// The same for any number of rows, with products in float32. work: of `bytes`.
struct LinearOps {
  void (*multiply)(const LinearCall &call, int64_t first, int64_t last, uint8_t *work);
  int64_t (*bytes)(const LinearCall &call);
};
extern const LinearOps linear_avx2[2], linear_avx512[2];  // of float32, of bfloat16

// Outputs first to first + n of a row, rounded: the largest so far.
static inline void note_best(const LinearCall &call, int64_t row, const bf16 *y, int n, int64_t first) {
  for (int j = 0; j < n; j++) {
    int16_t x = (int16_t)y[j];
    x = x == INT16_MIN ? 0 : (int16_t)(x ^ (x >> 15 & 0x7fff));  // both zeros are 0
    if (x > call.best[row]) call.best[row] = x, call.place[row] = first + j;
  }
}
