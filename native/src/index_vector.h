// Index scores in GCC's vector types. Included inside a namespace of one instruction set, after `enum { LANES = ... }` and
// `bytes_at`, which makes words of LANES bytes (the compiler would take them one by one).
#include "vector.h"

enum { PANEL_VECTORS = PANEL / LANES };

static void weighted_relu(const float *c, int64_t rows, const float *weight, float *s) {
  vf sum[PANEL_VECTORS] = {};
  const vf zero = {};
  for (int64_t m = 0; m < rows; m++, c += PANEL) {
    vf w = splat(weight[m]);
#pragma GCC unroll 8
    for (int j = 0; j < PANEL_VECTORS; j++) {
      vf x = load(c + j * LANES);
      sum[j] += w * (x > zero ? x : zero);
    }
  }
  for (int j = 0; j < PANEL_VECTORS; j++) store(s + j * LANES, sum[j]);
}

// What is exact in bfloat16 needs no rounding.
INLINE void store_exact(float *p, vf x) { store(p, x); }
INLINE void store_exact(bf16 *p, vf x) { *(vh *)p = narrow((vi)((vu)x >> 16)); }

// The exponent and the mantissa of e4m3 are those of a float32 that is smaller by 2^120.
template <class X> static void widen(const uint8_t *key, int64_t dim, void *outv) {
  X *out = (X *)outv;
  float scale;
  memcpy(&scale, key + dim, 4);
  const float up = 0x1p120f;  // times the scale it may be too large for a float32
  int64_t i = 0;
  for (; i + LANES <= dim; i += LANES) {
    vi bits = (vi)bytes_at(key + i);
    store_exact(out + i, (vf)(((bits & 0x7f) << 20) | ((bits & 0x80) << 24)) * up * scale);
  }
  for (; i < dim; i++) {
    uint32_t bits = (uint32_t)(key[i] & 0x7f) << 20 | (uint32_t)(key[i] & 0x80) << 24;
    float x;
    memcpy(&x, &bits, 4);
    put(out + i, x * up * scale);
  }
}

template <class X> struct Ops {
  static constexpr IndexOps table = {weighted_relu, widen<X>};
};
