// Weights as numbers of 8 or 4 bits with scales: what moe_kernels/matrix.py does in torch, to the bit (4 bits: but for
// scales that are equally good), in passes over rows that stay in
// the cache.
#pragma once
#include <utility>

#include "native.h"

enum { QUANTIZE_BLOCK = 128 };  // inputs that share a scale
enum { HALF_INPUTS = 32 };       // of 4-bit numbers
enum QuantizeFormat { QUANTIZE_FP8 = 1, QUANTIZE_INT8 = 2 };

struct QuantizeOps {
  // The largest absolute value of n numbers.
  float (*largest)(const void *x, int64_t n);
  // n numbers times the inverse of the scale, as int8 and as e4m3.
  void (*to_int8)(const void *x, float inverse, int64_t n, uint8_t *y);
  void (*to_fp8)(const void *x, float inverse, int64_t n, uint8_t *y);
  // n numbers as codes of 4 bits, two in a byte, those behind the last as zeros up to a multiple of 32; and the scale of each 32:
  // float16, or bfloat16.
  void (*to_int4)(const void *x, int64_t n, uint8_t *codes, uint16_t *scale);
  void (*to_mxfp4)(const void *x, int64_t n, uint8_t *codes, uint16_t *scale);
};

extern const QuantizeOps *const quantize_avx2[2], *const quantize_avx512[2];  // by type: float32, bfloat16
