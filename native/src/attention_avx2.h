// Scores, and sums of values of bfloat16, for 16 registers: eight sums at a time, and 16 numbers of bfloat16 read and taken apart once. Included
// by attention_avx2.cpp inside its namespace, after attention_vector.h. A query's numbers are added up in one order, whatever the number of
// heads and keys beside it.

// Half of 16 numbers, the same ones of keys and queries: of bfloat16 every other one, so that they are read and taken apart once.
template <int HALF> INLINE vf half_of(const float *p) { return load(p + HALF * LANES); }
template <int HALF> INLINE vf half_of(const bf16 *p) {
  const vi bits = *(const vi *)p;
  return (vf)(HALF ? bits & (int32_t)0xffff0000 : bits << 16);
}

template <int HALF, class X, int HEADS, int KEYS>
INLINE void add_scores(const X *q, int64_t q_stride, const uint8_t *const *key, int64_t d, vf (&sum)[LANES]) {
  vf k[KEYS];
#pragma GCC unroll 8
  for (int i = 0; i < KEYS; i++) k[i] = half_of<HALF>((const X *)key[i] + d);
#pragma GCC unroll 4
  for (int g = 0; g < HEADS; g++) {
    const vf x = half_of<HALF>(q + g * q_stride + d);
#pragma GCC unroll 8
    for (int i = 0; i < KEYS; i++) sum[g * KEYS + i] += x * k[i];
  }
}

// The totals of 8 registers, each in its lane: neighbours are added, until one register is left.
INLINE __m256 neighbours(__m256 a, __m256 b) { return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd)); }
INLINE vf totals_of_8(const vf (&x)[LANES]) {
  const __m256 a = neighbours((__m256)x[0], (__m256)x[1]), b = neighbours((__m256)x[2], (__m256)x[3]);
  const __m256 c = neighbours((__m256)x[4], (__m256)x[5]), d = neighbours((__m256)x[6], (__m256)x[7]);
  const __m256 first = neighbours(a, b), second = neighbours(c, d);
  return (vf)_mm256_add_ps(_mm256_permute2f128_ps(first, second, 0x20), _mm256_permute2f128_ps(first, second, 0x31));
}

// Scores of some heads and n keys, as many at a time as make 8 sums. key: padded to a multiple of that.
template <class X, int HEADS> static void score_heads(const X *q, int64_t q_stride, const uint8_t *const *key, int n, int64_t dim, float scale, float *s, int64_t s_stride,
                                                        const uint8_t *const *next) {
  enum { KEYS = LANES / HEADS };
  for (int first = 0; first < n; first += KEYS) {
    vf sum[LANES];
#pragma GCC unroll 8
    for (int at = 0; at < LANES; at++) sum[at] = splat(0.f);
    int64_t d = 0;
    for (; d + 2 * LANES <= dim; d += 2 * LANES) {
      if (next && d * sizeof(X) % 64 == 0)
        for (int i = 0; i < KEYS; i++) __builtin_prefetch(next[first + i] + d * sizeof(X), 0, 2);
      add_scores<0, X, HEADS, KEYS>(q, q_stride, key + first, d, sum);
      add_scores<1, X, HEADS, KEYS>(q, q_stride, key + first, d, sum);
    }
    float all[LANES];
    store(all, totals_of_8(sum) * scale);
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
static void scores_of_8(const void *qv, int64_t q_stride, int64_t heads, const uint8_t *const *key, int n, int64_t dim, float scale, float *s, int64_t s_stride,
                        const uint8_t *const *next) {
  const X *q = (const X *)qv;
  const uint8_t *padded[KEY_TILE];
  for (int i = 0; i < KEY_TILE; i++) padded[i] = key[i < n ? i : n - 1];
  int64_t g = 0;
  for (; g + 4 <= heads; g += 4, next = nullptr) score_heads<X, 4>(q + g * q_stride, q_stride, padded, n, dim, scale, s + g * s_stride, s_stride, next);
  for (; g + 2 <= heads; g += 2, next = nullptr) score_heads<X, 2>(q + g * q_stride, q_stride, padded, n, dim, scale, s + g * s_stride, s_stride, next);
  if (g < heads) score_heads<X, 1>(q + g * q_stride, q_stride, padded, n, dim, scale, s + g * s_stride, s_stride, next);
}

// acc [16] += numbers, every other one in each register.
INLINE void add_halves(vf even, vf odd, float *acc) {
  const __m256 low = _mm256_unpacklo_ps((__m256)even, (__m256)odd), high = _mm256_unpackhi_ps((__m256)even, (__m256)odd);
  store(acc, load(acc) + (vf)_mm256_permute2f128_ps(low, high, 0x20));
  store(acc + LANES, load(acc + LANES) + (vf)_mm256_permute2f128_ps(low, high, 0x31));
}

// acc += weights [HEADS][KEY_TILE] times 16 * TIMES columns of n values, whose sum is added up by itself.
template <int HEADS, int TIMES>
INLINE void add_values(const float (*weight)[KEY_TILE], const uint8_t *const *value, int n, int64_t at, int64_t dim, float *acc, const uint8_t *const *next) {
  vf sum[HEADS][2 * TIMES];
#pragma GCC unroll 4
  for (int g = 0; g < HEADS; g++)
#pragma GCC unroll 8
    for (int j = 0; j < 2 * TIMES; j++) sum[g][j] = splat(0.f);
  for (int i = 0; i < n; i++) {
    const bf16 *from = (const bf16 *)value[i] + at;
    if (next && (TIMES > 1 || at % 32 == 0))
#pragma GCC unroll 2
      for (int line = 0; line < (TIMES + 1) / 2; line++) __builtin_prefetch(next[i] + 2 * at + 64 * line, 0, 2);
    vf v[2 * TIMES];
#pragma GCC unroll 4
    for (int j = 0; j < TIMES; j++) v[2 * j] = half_of<0>(from + 2 * LANES * j), v[2 * j + 1] = half_of<1>(from + 2 * LANES * j);
#pragma GCC unroll 4
    for (int g = 0; g < HEADS; g++) {
      const vf w = splat(weight[g][i]);
#pragma GCC unroll 8
      for (int j = 0; j < 2 * TIMES; j++) sum[g][j] += w * v[j];
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < HEADS; g++)
#pragma GCC unroll 4
    for (int j = 0; j < TIMES; j++) add_halves(sum[g][2 * j], sum[g][2 * j + 1], acc + g * dim + at + 2 * LANES * j);
}

template <int HEADS> static void value_heads(const bf16 *p, int64_t p_stride, const uint8_t *const *value, int n, int64_t dim, float *acc,
                                            const uint8_t *const *next) {
  enum { TIMES = 4 / HEADS, COLUMNS = TIMES * 2 * LANES };
  float weight[HEADS][KEY_TILE];
  for (int g = 0; g < HEADS; g++) {
    if (n == KEY_TILE)
      for (int i = 0; i < KEY_TILE; i += LANES) store(weight[g] + i, load(p + g * p_stride + i));
    else
      for (int i = 0; i < n; i++) weight[g][i] = number(p + g * p_stride + i);
  }
  int64_t at = 0;
  for (; at + COLUMNS <= dim; at += COLUMNS) add_values<HEADS, TIMES>(weight, value, n, at, dim, acc, next);
  for (; at + 2 * LANES <= dim; at += 2 * LANES) add_values<HEADS, 1>(weight, value, n, at, dim, acc, next);
  for (; at < dim; at++)
    for (int g = 0; g < HEADS; g++)
      for (int i = 0; i < n; i++) acc[g * dim + at] += weight[g][i] * number((const bf16 *)value[i] + at);
}

static void weigh_halves(const void *pv, int64_t p_stride, int64_t heads, const uint8_t *const *value, int n, int64_t dim, float *acc,
                         const uint8_t *const *next) {
  const bf16 *p = (const bf16 *)pv;
  int64_t g = 0;
  for (; g + 4 <= heads; g += 4, next = nullptr) value_heads<4>(p + g * p_stride, p_stride, value, n, dim, acc + g * dim, next);
  for (; g + 2 <= heads; g += 2, next = nullptr) value_heads<2>(p + g * p_stride, p_stride, value, n, dim, acc + g * dim, next);
  if (g < heads) value_heads<1>(p + g * p_stride, p_stride, value, n, dim, acc + g * dim, next);
}
