// Attention in GCC's vector types. Included inside a namespace of one instruction set, after `enum { LANES = ... }`.
#include "vector.h"

template <class X, int HEADS, int KEYS>
INLINE void score_tile(const X *q, int64_t q_stride, const uint8_t *const *key, int64_t dim, float scale, float *s, int64_t s_stride) {
  vf acc[HEADS][KEYS] = {};
  int64_t d = 0;
  for (; d + LANES <= dim; d += LANES)
    for (int i = 0; i < KEYS; i++) {
      vf k = load((const X *)key[i] + d);
      for (int g = 0; g < HEADS; g++) acc[g][i] += load(q + g * q_stride + d) * k;
    }
  for (int g = 0; g < HEADS; g++)
    for (int i = 0; i < KEYS; i++) {
      float sum = total(acc[g][i]);
      for (int64_t j = d; j < dim; j++) sum += number(q + g * q_stride + j) * number((const X *)key[i] + j);
      s[g * s_stride + i] = sum * scale;
    }
}

template <class X>
static void scores(const void *qv, int64_t q_stride, int64_t heads, const uint8_t *const *key, int n, int64_t dim, float scale, float *s,
                   int64_t s_stride, const uint8_t *const *) {
  const X *q = (const X *)qv;
  int64_t g = 0;
  for (; g < heads; g += g + 2 <= heads ? 2 : 1) {
    const X *rows = q + g * q_stride;
    float *to = s + g * s_stride;
    int i = 0;
    if (g + 2 <= heads) {
      for (; i + 4 <= n; i += 4) score_tile<X, 2, 4>(rows, q_stride, key + i, dim, scale, to + i, s_stride);
      for (; i < n; i++) score_tile<X, 2, 1>(rows, q_stride, key + i, dim, scale, to + i, s_stride);
    } else {
      for (; i + 4 <= n; i += 4) score_tile<X, 1, 4>(rows, q_stride, key + i, dim, scale, to + i, s_stride);
      for (; i < n; i++) score_tile<X, 1, 1>(rows, q_stride, key + i, dim, scale, to + i, s_stride);
    }
  }
}

// What is behind the scores, to the end of a register, is overwritten; so is the same part of p.
template <class X> static Largest softmax(float *s, int64_t n, void *pv) {
  X *p = (X *)pv;
  const float least = -__builtin_inff();
  int64_t room = (n + LANES - 1) / LANES * LANES;
  for (int64_t i = n; i < room; i++) s[i] = least;
  vf most = splat(least);
  for (int64_t i = 0; i < room; i += LANES) {
    vf x = load(s + i);
    most = x > most ? x : most;
  }
  float largest = least;
  for (int j = 0; j < LANES; j++) largest = most[j] > largest ? most[j] : largest;
  vf sums = {};
  for (int64_t i = 0; i < room; i += LANES) {
    vf x = load(s + i), weight = exp_of(x - largest);
    weight = x == x ? weight : x;
    sums += weight;
    store(p + i, weight);
  }
  if (n % 2) put(p + n, 0.f);
  return {largest, total(sums)};
}

template <class X, int HEADS, int COLUMNS>
INLINE void weigh_tile(const X *p, int64_t p_stride, const uint8_t *const *value, int n, int64_t at, int64_t dim, float *acc) {
  vf sum[HEADS][COLUMNS];
  for (int g = 0; g < HEADS; g++)
    for (int j = 0; j < COLUMNS; j++) sum[g][j] = load(acc + g * dim + at + j * LANES);
  for (int i = 0; i < n; i++) {
    vf v[COLUMNS];
    for (int j = 0; j < COLUMNS; j++) v[j] = load((const X *)value[i] + at + j * LANES);
    for (int g = 0; g < HEADS; g++) {
      vf weight = splat(number(p + g * p_stride + i));
      for (int j = 0; j < COLUMNS; j++) sum[g][j] += weight * v[j];
    }
  }
  for (int g = 0; g < HEADS; g++)
    for (int j = 0; j < COLUMNS; j++) store(acc + g * dim + at + j * LANES, sum[g][j]);
}

template <class X, int HEADS>
INLINE void weigh_heads(const X *p, int64_t p_stride, const uint8_t *const *value, int n, int64_t dim, float *acc) {
  int64_t at = 0;
  for (; at + 4 * LANES <= dim; at += 4 * LANES) weigh_tile<X, HEADS, 4>(p, p_stride, value, n, at, dim, acc);
  for (; at + LANES <= dim; at += LANES) weigh_tile<X, HEADS, 1>(p, p_stride, value, n, at, dim, acc);
  for (; at < dim; at++)
    for (int g = 0; g < HEADS; g++)
      for (int i = 0; i < n; i++) acc[g * dim + at] += number(p + g * p_stride + i) * number((const X *)value[i] + at);
}

template <class X>
static void weigh(const void *pv, int64_t p_stride, int64_t heads, const uint8_t *const *value, int n, int64_t dim, float *acc,
                  const uint8_t *const *) {
  const X *p = (const X *)pv;
  int64_t g = 0;
  for (; g + 2 <= heads; g += 2) weigh_heads<X, 2>(p + g * p_stride, p_stride, value, n, dim, acc + g * dim);
  if (g < heads) weigh_heads<X, 1>(p + g * p_stride, p_stride, value, n, dim, acc + g * dim);
}

template <class X> static void finish(const float *acc, int64_t dim, float factor, void *outv) {
  X *out = (X *)outv;
  int64_t j = 0;
  for (; j + LANES <= dim; j += LANES) store(out + j, load(acc + j) * factor);
  for (; j < dim; j++) put(out + j, acc[j] * factor);
}

template <class X> struct Ops {
  static constexpr AttentionOps table = {scores<X>, softmax<X>, weigh<X>, finish<X>, false};
};
