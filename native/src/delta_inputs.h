// What the gated delta rule takes of a layer's projections: functions of vectors, decays, the short convolution. Included by delta_vector.h.
#include "vector.h"

// 1 / x of numbers whose inverse is not denormal; else 0. A division takes as long as the arithmetic around it.
INLINE vf inverse_of(vf x) {
#ifdef AVX512_FILE  // right in 14 bits; then in all but the last one or two
  typedef float plain __attribute__((vector_size(64)));
  vf y = (vf)__builtin_ia32_rcp14ps512_mask((plain)x, (plain){}, 0xffff);
  return y + y * (1.f - x * y);
#else
  return 1.f / x;
#endif
}
INLINE vf sigmoid_of(vf x) { return inverse_of(1.f + exp_of(-x)); }
INLINE vf log_of(vf x) {  // x is at least 1
  vi bits = (vi)x, power = ((bits - 0x3f3504f3) >> 23);
  vf m = (vf)(bits - (power << 23)), s = (m - 1.f) * inverse_of(m + 1.f), z = s * s;
  vf p = splat(2.f / 9);
  p = p * z + 2.f / 7;
  p = p * z + 2.f / 5;
  p = p * z + 2.f / 3;
  p = p * z + 2.f;
  return p * s + __builtin_convertvector(power, vf) * 0.693147181f;
}
INLINE vf decay_of(vf x, float rate, float lower_bound) {
  if (lower_bound) return exp_of(lower_bound * sigmoid_of(rate * x));
  vf e = exp_of(x), sum = 1.f + e, soft = log_of(sum) + (e - (sum - 1.f)) * inverse_of(sum);  // with the bits of e that the sum has lost
  return exp_of(-rate * (x > 20.f ? x : soft));
}

// A row's last numbers, of which there are fewer than a register has.
template <class X> INLINE vf some(const X *p, int64_t count) {
  X part[LANES] = {};
  memcpy(part, p, count * sizeof(X));
  return load(part);
}

// Of n tokens, y = silu of a stretch of channels' weighted inputs; zeros behind it. row: of the tokens, behind those before them that the
// first one needs. With a TAPS that is not 0, the last inputs stay in registers.
template <int TAPS, class X>
static void convolve(const X *const *row, const float *conv, int64_t stride, int64_t taps, int64_t n, int64_t numbers, float *y, int64_t y_stride) {
  for (int64_t i = 0; i < numbers; i += LANES) {
    int64_t left = numbers - i;
    auto at = [&](const auto *p) { return __builtin_expect(left >= LANES, 1) ? load(p + i) : some(p + i, left); };
    vf last[TAPS + 1], weight[TAPS + 1];
    for (int w = 0; w < TAPS; w++) weight[w] = at(conv + w * stride);
    for (int w = 0; w + 1 < TAPS; w++) last[w] = at(row[w]);
    for (int64_t t = 0; t < n; t++) {
      vf sum = {};
      if (TAPS) {
        last[TAPS - 1] = at(row[t + TAPS - 1]);
        for (int w = 0; w < TAPS; w++) sum += last[w] * weight[w], last[w] = last[w + 1];
      } else
        for (int64_t w = 0; w < taps; w++) sum += at(row[t + w]) * at(conv + w * stride);
      store(y + t * y_stride + i, sum * sigmoid_of(sum));
    }
  }
}

INLINE float dot(const float *a, const float *b, int64_t n) {
  vf sum = {};
  for (int64_t i = 0; i < n; i += LANES) sum += load(a + i) * load(b + i);
  return total(sum);
}

INLINE void scale(float *x, int64_t n, float factor) {
  for (int64_t i = 0; i < n; i += LANES) store(x + i, load(x + i) * factor);
}
