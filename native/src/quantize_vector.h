// The operations of quantize.h, whatever the instruction set. Included inside a namespace of one, after `enum { LANES = ... }`.
#include "vector.h"

typedef uint8_t vb __attribute__((vector_size(LANES), aligned(1), may_alias));

// By way of 16 bits: in one step the compiler takes number by number.
INLINE vb bytes_of(vi x) { return __builtin_convertvector(__builtin_convertvector(x, vh), vb); }

// To the nearest whole number, ties to even: its low byte is in the low byte of the sum.
INLINE vi whole(vf x) { return (vi)(x + splat(12582912.f)) & 0xff; }

// As torch does: nearest, ties to even; what is below the smallest normal number is added to a number whose last bit is theirs.
INLINE vi e4m3(vf x) {
  vi bits = (vi)x, sign = bits & (int32_t)0x80000000;
  bits ^= sign;
  vi small = (vi)((vf)bits + splat(16384.f)) - 0x46800000;
  vi normal = (bits + (int32_t)0xc407ffff + ((bits >> 20) & 1)) >> 20;
  vi y = bits < (121 << 23) ? small : normal;
  y = bits >= (1087 << 20) ? (vi)splat(0.f) + 0x7f : y;
  return (y | ((sign >> 24) & 0x80)) & 0xff;
}

// ---- 4 bits ----

// As float16 and back; x is finite. Below its normal numbers it has multiples of 2^-24.
INLINE float half_rounded(float x) {
  float size = __builtin_fabsf(x), y;
  if (size < 0x1p-14f) {
    y = (size + .5f) - .5f;
  } else {
    uint32_t bits;
    memcpy(&bits, &size, 4);
    bits = (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu;
    memcpy(&y, &bits, 4);
    y = y > 65504.f ? 65504.f : y;
  }
  return x < 0 ? -y : y;
}
INLINE uint16_t half_bits(float x) {  // of a number that half_rounded gave
  float size = __builtin_fabsf(x);
  uint32_t bits;
  memcpy(&bits, &size, 4);
  uint32_t y = size < 0x1p-14f ? (uint32_t)(size * 0x1p24f) : (bits >> 13) - (112 << 10);
  return (uint16_t)(y | (x < 0 ? 0x8000 : 0));
}

enum { HALF_PARTS = HALF_INPUTS / LANES };

// Codes of 32 numbers with this scale, and what they lose, squared.
template <bool MXFP4> INLINE float halves_of(const vf *x, float scale, vi *code) {
  vf lost = {};
  for (int i = 0; i < HALF_PARTS; i++) {
    vf exact = scale == 0 ? splat(0.f) : x[i] / scale, back;
    if (MXFP4) {
      vf size = (vf)((vi)exact & 0x7fffffff);
      // A comparison that is true is -1.
      vi place = -((size > .25f) + (size > .75f) + (size > 1.25f) + (size > 1.75f) + (size > 2.5f) + (size > 3.5f) + (size > 5.f));
      vi twice = place < 4 ? place : place < 6 ? 2 * place - 4 : 4 * place - 16;
      back = __builtin_convertvector(twice, vf) * .5f;
      back = exact < 0.f ? -back : back;
      code[i] = place | (exact < 0.f & 8);
    } else {
      exact = exact > 7.f ? splat(7.f) : exact;
      exact = exact < -8.f ? splat(-8.f) : exact;
      const vf shift = splat(12582912.f);  // adding it rounds to a whole number, ties to even
      back = exact + shift - shift;
      code[i] = __builtin_convertvector(back, vi) + 8;
    }
    vf off = back * scale - x[i];
    lost += off * off;
  }
  return total(lost);
}

template <bool MXFP4> INLINE float best_halves(const vf *x, const float *scale, int n, uint8_t *codes) {
  float least = 0, best = 0;
  vi code[HALF_PARTS], kept[HALF_PARTS] = {};
  for (int i = 0; i < n; i++) {
    float lost = halves_of<MXFP4>(x, scale[i], code);
    if (i && !(lost < least)) continue;
    least = lost, best = scale[i];
    for (int j = 0; j < HALF_PARTS; j++) kept[j] = code[j];
  }
  const int32_t *one = (const int32_t *)kept;
  for (int i = 0; i < HALF_INPUTS / 2; i++) codes[i] = (uint8_t)(one[2 * i] | one[2 * i + 1] << 4);
  return best;
}

template <class T> struct Quantize {
  static float largest(const void *at, int64_t n) {
    const T *x = (const T *)at;
    vf most = {};
    int64_t k = 0;
    for (; k + LANES <= n; k += LANES) {
      vf size = (vf)((vi)load(x + k) & 0x7fffffff);
      most = size > most ? size : most;
    }
    float part[LANES];
    *(vf *)part = most;
    for (int half = LANES / 2; half; half /= 2)
      for (int i = 0; i < half; i++) part[i] = part[i + half] > part[i] ? part[i + half] : part[i];
    float best = part[0];
    for (; k < n; k++) {
      float size = __builtin_fabsf(number(x + k));
      best = size > best ? size : best;
    }
    return best;
  }

  template <class To> INLINE void each(const void *at, float scale, int64_t n, uint8_t *y, const To &to) {
    const T *x = (const T *)at;
    int64_t k = 0;
    for (; k + LANES <= n; k += LANES) *(vb *)(y + k) = bytes_of(to(load(x + k) / scale));
    for (; k < n; k++) y[k] = (uint8_t)to(splat(number(x + k) / scale))[0];
  }
  static void to_int8(const void *x, float scale, int64_t n, uint8_t *y) {
    each(x, scale, n, y, [](vf v) __attribute__((always_inline)) { return whole(v); });
  }
  static void to_fp8(const void *x, float scale, int64_t n, uint8_t *y) {
    each(x, scale, n, y, [](vf v) __attribute__((always_inline)) { return e4m3(v); });
  }

  INLINE void read_group(const void *at, int64_t n, vf *x) {
    float room[HALF_INPUTS] = {};
    for (int64_t i = 0; i < n; i++) room[i] = number((const T *)at + i);
    for (int i = 0; i < HALF_PARTS; i++) x[i] = load(room + LANES * i);
  }
  // The number of largest size, the first of equals.
  INLINE float outermost(const vf *x) {
    const float *one = (const float *)x;
    float found = 0;
    for (int i = 0; i < HALF_INPUTS; i++) found = __builtin_fabsf(one[i]) > __builtin_fabsf(found) ? one[i] : found;
    return found;
  }
  static uint16_t to_int4(const void *at, int64_t n, uint8_t *codes) {
    vf x[HALF_PARTS];
    read_group(at, n, x);
    float most = outermost(x), scale[6];
    for (int i = 0; i < 6; i++) {
      const float part[3] = {1.f, .93f, .86f};
      scale[i] = half_rounded((i < 3 ? most / -8 : __builtin_fabsf(most) / 7) * part[i % 3]);
    }
    return half_bits(best_halves<false>(x, scale, 6, codes));
  }
  static uint16_t to_mxfp4(const void *at, int64_t n, uint8_t *codes) {
    vf x[HALF_PARTS];
    read_group(at, n, x);
    float least = __builtin_fabsf(outermost(x)) / 6;
    least = least < 0x1p-126f ? 0x1p-126f : least;
    uint32_t bits;
    memcpy(&bits, &least, 4);
    bits = (bits + 0x7fffff) & 0x7f800000;  // up to a power of two
    memcpy(&least, &bits, 4);
    const float scale[2] = {least, least / 2};
    float best = best_halves<true>(x, scale, 2, codes);
    memcpy(&bits, &best, 4);
    return (uint16_t)(bits >> 16);
  }
  static constexpr QuantizeOps table = {largest, to_int8, to_fp8, to_int4, to_mxfp4};
};
