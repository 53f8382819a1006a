// Weights as numbers of 8 bits with scales: what moe_kernels/matrix.py does in torch, to the bit, in two passes over rows that stay in
// the cache.
#pragma once
#include "native.h"

enum { QUANTIZE_BLOCK = 128 };  // inputs that share a scale
enum QuantizeFormat { QUANTIZE_FP8 = 1, QUANTIZE_INT8 = 2 };

struct QuantizeOps {
  // The largest absolute value of n numbers.
  float (*largest)(const void *x, int64_t n);
  // n numbers divided by the scale, as int8 and as e4m3.
  void (*to_int8)(const void *x, float scale, int64_t n, uint8_t *y);
  void (*to_fp8)(const void *x, float scale, int64_t n, uint8_t *y);
};

extern const QuantizeOps *const quantize_avx2[2], *const quantize_avx512[2];  // by type: float32, bfloat16
