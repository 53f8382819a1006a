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
  static constexpr QuantizeOps table = {largest, to_int8, to_fp8};
};
