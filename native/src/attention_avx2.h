// Sums of values of bfloat16, for 16 registers: 16 numbers of bfloat16 read and taken apart once. Included by attention_avx2.cpp inside its
// namespace, after attention_vector.h.

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
