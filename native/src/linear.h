// y = x w^T + b for few rows of bfloat16, weights as they lie: [outputs, inputs], rows of any distance.
#pragma once
#include "native.h"

struct LinearCall {
  const bf16 *x, *w, *bias;  // bias: or null
  bf16 *y;
  int64_t rows, inputs, outputs, x_stride, w_stride, y_stride;
  int16_t *best;   // or, without y: for every row the largest output so far, rounded, as a whole number in the order of the floats
  int64_t *place;  // which it is
};

// Outputs first to last (first a multiple of OUTPUTS_AT_ONCE) of all rows.
enum { OUTPUTS_AT_ONCE = 64, MANY_ROWS = 24 };
void linear_few_rows(const LinearCall &call, int64_t first, int64_t last);
// The same, weights packed as they are needed into `panel`, of OUTPUTS_AT_ONCE * inputs numbers. inputs is even.
void linear_many_rows(const LinearCall &call, int64_t first, int64_t last, uint8_t *panel);
