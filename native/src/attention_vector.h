// Attention in GCC's vector types. Included inside a namespace of one instruction set, after `enum { LANES = ... }`.
#include "vector.h"

// A register's worth of numbers of keys and queries alike: of 8 lanes and bfloat16 every other one of 16, so that they are read and taken
// apart once.
template <int HALF> INLINE vf half_of(const float *p) { return load(p + HALF * LANES); }
template <int HALF> INLINE vf half_of(const bf16 *p) {
  if (LANES == 16) return load(p);
  const vi bits = *(const vi *)p;
  return (vf)(HALF ? bits & (int32_t)0xffff0000 : bits << 16);
}

template <int HALF, class X, int HEADS, int KEYS>
INLINE void add_scores(const X *q, int64_t q_stride, const uint8_t *const *key, int64_t d, vf (&sum)[LANES]) {
  vf k[KEYS];
#pragma GCC unroll 16
  for (int i = 0; i < KEYS; i++) k[i] = half_of<HALF>((const X *)key[i] + d);
#pragma GCC unroll 4
  for (int g = 0; g < HEADS; g++) {
    const vf x = half_of<HALF>(q + g * q_stride + d);
#pragma GCC unroll 16
    for (int i = 0; i < KEYS; i++) sum[g * KEYS + i] += x * k[i];
  }
}

// Scores of some heads and n keys, as many at a time as a register has lanes: a query's numbers are added up in one order, whatever the number
// of heads and keys beside it. key: padded to a multiple of that.
template <class X, int HEADS> static void score_heads(const X *q, int64_t q_stride, const uint8_t *const *key, int n, int64_t dim, float scale, float *s, int64_t s_stride,
                                                        const uint8_t *const *next) {
  constexpr int KEYS = LANES / HEADS, AT_ONCE = 16;
  for (int first = 0; first < n; first += KEYS) {
    vf sum[LANES];
#pragma GCC unroll 16
    for (int at = 0; at < LANES; at++) sum[at] = splat(0.f);
    int64_t d = 0;
    for (; d + AT_ONCE <= dim; d += AT_ONCE) {
      if (next && d * sizeof(X) % 64 == 0)
        for (int i = 0; i < KEYS; i++) __builtin_prefetch(next[first + i] + d * sizeof(X), 0, 2);
      add_scores<0, X, HEADS, KEYS>(q, q_stride, key + first, d, sum);
      if (LANES < AT_ONCE) add_scores<1, X, HEADS, KEYS>(q, q_stride, key + first, d, sum);
    }
    float all[LANES];
    store(all, totals(sum) * scale);
    if (__builtin_expect(d < dim, 0))
      for (int at = 0; at < LANES; at++) {
        float more = 0;
        for (int64_t j = d; j < dim; j++) more += number(q + at / KEYS * q_stride + j) * number((const X *)key[first + at % KEYS] + j);
        all[at] += more * scale;
      }
    const int count = n - first < KEYS ? n - first : (int)KEYS;
#pragma GCC unroll 4
    for (int g = 0; g < HEADS; g++) {
      if (__builtin_expect(count == KEYS, 1)) memcpy(s + g * s_stride + first, all + g * KEYS, 4 * KEYS);
      else memcpy(s + g * s_stride + first, all + g * KEYS, 4 * count);
    }
  }
}

template <class X>
static void scores(const void *qv, int64_t q_stride, int64_t heads, const uint8_t *const *key, int n, int64_t dim, float scale, float *s, int64_t s_stride,
                   const uint8_t *const *next) {
  const X *q = (const X *)qv;
  const uint8_t *padded[KEY_TILE];
  for (int i = 0; i < KEY_TILE; i++) padded[i] = key[i < n ? i : n - 1];
  int64_t g = 0;
  for (; g + 4 <= heads; g += 4, next = nullptr) score_heads<X, 4>(q + g * q_stride, q_stride, padded, n, dim, scale, s + g * s_stride, s_stride, next);
  for (; g + 2 <= heads; g += 2, next = nullptr) score_heads<X, 2>(q + g * q_stride, q_stride, padded, n, dim, scale, s + g * s_stride, s_stride, next);
  if (g < heads) score_heads<X, 1>(q + g * q_stride, q_stride, padded, n, dim, scale, s + g * s_stride, s_stride, next);
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
INLINE void weigh_tile(const X *p, int64_t p_stride, const uint8_t *const *value, int n, int64_t at, int64_t dim, float *acc, const uint8_t *const *next) {
  enum { BYTES = COLUMNS * LANES * sizeof(X) };
  vf sum[HEADS][COLUMNS];
  for (int g = 0; g < HEADS; g++)
    for (int j = 0; j < COLUMNS; j++) sum[g][j] = load(acc + g * dim + at + j * LANES);
  for (int i = 0; i < n; i++) {
    for (int byte = 0; next && byte < BYTES; byte += 64) __builtin_prefetch(next[i] + at * sizeof(X) + byte, 0, 3);
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
INLINE void weigh_heads(const X *p, int64_t p_stride, const uint8_t *const *value, int n, int64_t dim, float *acc, const uint8_t *const *next) {
  int64_t at = 0;
  for (; at + 4 * LANES <= dim; at += 4 * LANES) weigh_tile<X, HEADS, 4>(p, p_stride, value, n, at, dim, acc, next);
  for (; at + LANES <= dim; at += LANES) weigh_tile<X, HEADS, 1>(p, p_stride, value, n, at, dim, acc, next);
  for (; at < dim; at++)
    for (int g = 0; g < HEADS; g++)
      for (int i = 0; i < n; i++) acc[g * dim + at] += number(p + g * p_stride + i) * number((const X *)value[i] + at);
}

template <class X>
static void weigh(const void *pv, int64_t p_stride, int64_t heads, const uint8_t *const *value, int n, int64_t dim, float *acc,
                  const uint8_t *const *next) {
  const X *p = (const X *)pv;
  int64_t g = 0;
  for (; g + 2 <= heads; g += 2, next = nullptr) weigh_heads<X, 2>(p + g * p_stride, p_stride, value, n, dim, acc + g * dim, next);
  if (g < heads) weigh_heads<X, 1>(p + g * p_stride, p_stride, value, n, dim, acc + g * dim, next);
}

template <class X> static void finish(const float *acc, int64_t dim, float factor, void *outv) {
  X *out = (X *)outv;
  int64_t j = 0;
  for (; j + LANES <= dim; j += LANES) store(out + j, load(acc + j) * factor);
  for (; j < dim; j++) put(out + j, acc[j] * factor);
}

template <class X> struct Ops {
  static constexpr AttentionOps table = {scores<X>, softmax<X>, weigh<X>, finish<X>, 8, 4};
};
