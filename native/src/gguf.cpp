// Blocks of GGUF's kinds as weights of 4 and 8 bits: what layers/gguf/blocks.py does in torch, to the bit, row after row.
#include "native.h"
#include "tape.h"
#include "quantize.h"
#include "scratch.h"

NATIVE_API void weights_quantize(int x_type, int format, const void *x, int64_t stride, int64_t outputs, int64_t inputs, void *y,
                                 float *scale, int threads);

namespace {

enum Kind { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14 };
enum { GROUP = 32, SUPER = 256 };

struct Size {
  int64_t numbers, bytes;
};
Size size_of(int kind) {
  switch (kind) {
    case Q4_0: return {GROUP, 18};
    case Q4_1: return {GROUP, 20};
    case Q5_0: return {GROUP, 22};
    case Q5_1: return {GROUP, 24};
    case Q8_0: return {GROUP, 34};
    case Q4_K: return {SUPER, 144};
    case Q5_K: return {SUPER, 176};
    default: return {SUPER, 210};
  }
}

float half_at(const uint8_t *p) {
  uint16_t half;
  memcpy(&half, p, 2);
  uint32_t bits = (uint32_t)(half & 0x7fff) << 13, sign = (uint32_t)(half & 0x8000) << 16;
  float y;
  memcpy(&y, &bits, 4);
  y *= 0x1p112f;
  memcpy(&bits, &y, 4);
  bits = ((half & 0x7c00) == 0x7c00 ? bits | 0x7f800000 : bits) | sign;  // infinity and what is no number stay so
  memcpy(&y, &bits, 4);
  return y;
}

// To the nearest float16, ties to even, as a float; beyond the largest it is infinite.
float as_half(float x) {
  float size = __builtin_fabsf(x), y;
  if (!(size >= 0x1p-14f)) {
    y = (size + .5f) - .5f;
  } else {
    uint32_t bits;
    memcpy(&bits, &size, 4);
    bits = (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu;
    memcpy(&y, &bits, 4);
    if (y > 65504.f) y = __builtin_inff();
  }
  return __builtin_copysignf(y, x);
}

// A scale and a least number of 6 bits each for 8 groups.
void k_scales(const uint8_t *block, float *scale, float *least) {
  const uint8_t *q = block + 4;
  float d = half_at(block), dmin = -half_at(block + 2);
  for (int g = 0; g < 4; g++) {
    scale[g] = (float)(q[g] & 63) * d, least[g] = (float)(q[g + 4] & 63) * dmin;
    scale[g + 4] = (float)((q[g + 8] & 15) | (q[g] >> 6) << 4) * d, least[g + 4] = (float)((q[g + 8] >> 4) | (q[g + 4] >> 6) << 4) * dmin;
  }
}

// The lower halves of n bytes are n codes, the higher ones the next n: two that follow each other into one byte.
void pairs(const uint8_t *from, int n, uint8_t *to) {
  for (int i = 0; i < n / 2; i++) {
    to[i] = (uint8_t)((from[2 * i] & 15) | from[2 * i + 1] << 4);
    to[n / 2 + i] = (uint8_t)(from[2 * i] >> 4 | (from[2 * i + 1] & 0xf0));
  }
}

// native/quantize.py zero_points, of one group.
void zero_point(float most_zero, float *scale, float *zero, float least, uint8_t *codes) {
  bool alone = __builtin_fabsf(least) > most_zero * __builtin_fabsf(*scale);
  *scale = as_half(alone ? least : *scale);
  float found = alone ? -9.f : -least / *scale - 8;
  *zero = found != found || found - found != 0 ? 0.f : as_half(found);
  if (alone) memset(codes, 0, GROUP / 2);
}

// A block of 4-bit numbers.
void halves_of(int kind, float most_zero, const uint8_t *block, uint8_t *codes, float *scale, float *zero) {
  if (kind == Q4_K) {
    float least[8];
    k_scales(block, scale, least);
    for (int g = 0; g < 8; g += 2) pairs(block + 16 + 16 * g, 32, codes + 16 * g);
    for (int g = 0; g < 8; g++) zero_point(most_zero, scale + g, zero + g, least[g], codes + 16 * g);
    return;
  }
  *scale = half_at(block);
  pairs(block + (kind == Q4_0 ? 2 : 4), 16, codes);
  if (kind == Q4_1) zero_point(most_zero, scale, zero, half_at(block + 2), codes);
}

// A block of numbers of 5 to 8 bits as floats.
void widen_block(int kind, const uint8_t *block, float *y) {
  if (kind == Q8_0) {
    float d = half_at(block);
    for (int i = 0; i < GROUP; i++) y[i] = (float)(int8_t)block[2 + i] * d;
  } else if (kind == Q5_0 || kind == Q5_1) {
    const uint8_t *at = block + (kind == Q5_0 ? 2 : 4);
    float d = half_at(block), least = kind == Q5_0 ? -16 * d : half_at(block + 2);
    uint32_t fifth;
    memcpy(&fifth, at, 4);
    for (int i = 0; i < 16; i++) {
      y[i] = (float)((at[4 + i] & 15) | (fifth >> i & 1) << 4) * d + least;
      y[16 + i] = (float)(at[4 + i] >> 4 | (fifth >> (16 + i) & 1) << 4) * d + least;
    }
  } else if (kind == Q5_K) {
    float scale[8], least[8];
    k_scales(block, scale, least);
    for (int g = 0; g < 8; g++)
      for (int i = 0; i < 32; i++) {
        int low = g % 2 ? block[48 + g / 2 * 32 + i] >> 4 : block[48 + g / 2 * 32 + i] & 15;
        y[32 * g + i] = (float)(low | (block[16 + i] >> g & 1) << 4) * scale[g] + least[g];
      }
  } else {
    float d = half_at(block + 208);
    for (int part = 0; part < 8; part++)
      for (int i = 0; i < 32; i++) {
        const uint8_t *low = block + part / 4 * 64 + part % 2 * 32, *high = block + 128 + part / 4 * 32;
        int code = (part % 4 < 2 ? low[i] & 15 : low[i] >> 4) | (high[i] >> part % 4 * 2 & 3) << 4;
        float scale = (float)(int8_t)block[192 + part * 2 + i / 16] * d;
        y[32 * part + i] = (float)code * scale + -32 * scale;
      }
  }
}

}  // namespace

// Rows of blocks. Kinds of 4 bits: weight uint8 [outputs, inputs / 2], scale and (but for Q4_0) zero [outputs, inputs / 32]. Others: weight
// int8 [outputs, inputs], scale [outputs, ceil(inputs / 128)].
NATIVE_API void gguf_convert(int kind, const uint8_t *rows, int64_t outputs, int64_t inputs, float most_zero, uint8_t *weight, float *scale,
                             float *zero, int threads) {
  tape_refuse("gguf_convert");
  const Size size = size_of(kind);
  const int64_t blocks = inputs / size.numbers, groups = inputs / GROUP, each = size.numbers / GROUP;
  const bool halves = kind == Q4_0 || kind == Q4_1 || kind == Q4_K;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < outputs; row++) {
    const uint8_t *from = rows + row * blocks * size.bytes;
    if (halves) {
      for (int64_t b = 0; b < blocks; b++) {
        int64_t g = row * groups + b * each;
        halves_of(kind, most_zero, from + b * size.bytes, weight + g * (GROUP / 2), scale + g, zero + g);
      }
      continue;
    }
    float *wide = (float *)scratch(inputs * sizeof(float));
    for (int64_t b = 0; b < blocks; b++) widen_block(kind, from + b * size.bytes, wide + b * size.numbers);
    int64_t scales = (inputs + QUANTIZE_BLOCK - 1) / QUANTIZE_BLOCK;
    weights_quantize(0, QUANTIZE_INT8, wide, inputs, 1, inputs, weight + row * inputs, scale + row * scales, 1);
  }
}
