// Attention kernels for bfloat16 with AVX512-BF16: products of pairs, sums in float32.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,fma,prefer-vector-width=512")
#define AVX512_FILE
#define AVX512_BF16_FILE
#include "attention.h"

#include <immintrin.h>
namespace {
enum { LANES = 16 };
#include "attention_vector.h"
#include "pairs_avx512bf16.h"

// Pairs lie along the numbers of a key.
template <int HEADS>
INLINE void score_pairs(const bf16 *q, int64_t q_stride, const uint8_t *const *key, int n, int64_t dim, float scale, float *s, int64_t s_stride,
                        const uint8_t *const *next) {
  enum { KEYS = 16 / HEADS };
  for (int first = 0; first < n; first += KEYS) {
    int keys = n - first < KEYS ? n - first : KEYS;
    const bf16 *k[KEYS];
    for (int i = 0; i < KEYS; i++) k[i] = (const bf16 *)key[first + (i < keys ? i : keys - 1)];
    __m512 acc[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) acc[i] = _mm512_setzero_ps();
    int64_t d = 0;
    for (; d + 32 <= dim; d += 32) {
      if (next)
#pragma GCC unroll 16
        for (int i = 0; i < KEYS; i++) __builtin_prefetch((const bf16 *)next[first + i] + d, 0, 3);
      __m512bh x[HEADS];
#pragma GCC unroll 4
      for (int g = 0; g < HEADS; g++) x[g] = (__m512bh)_mm512_loadu_si512(q + g * q_stride + d);
#pragma GCC unroll 16
      for (int i = 0; i < KEYS; i++) {
        __m512bh y = (__m512bh)_mm512_loadu_si512(k[i] + d);
#pragma GCC unroll 4
        for (int g = 0; g < HEADS; g++) acc[g * KEYS + i] = _mm512_dpbf16_ps(acc[g * KEYS + i], x[g], y);
      }
    }
    if (d < dim)
#pragma GCC unroll 16
      for (int i = 0; i < KEYS; i++) {
        __m512bh y = some_pairs(k[i] + d, dim - d);
#pragma GCC unroll 4
        for (int g = 0; g < HEADS; g++)
          acc[g * KEYS + i] = _mm512_dpbf16_ps(acc[g * KEYS + i], some_pairs(q + g * q_stride + d, dim - d), y);
      }
    alignas(64) float sums[16];
    _mm512_store_ps(sums, sum_each(acc) * _mm512_set1_ps(scale));
    for (int g = 0; g < HEADS; g++) memcpy(s + g * s_stride + first, sums + g * KEYS, 4 * keys);
  }
}

void pair_scores(const void *qv, int64_t q_stride, int64_t heads, const uint8_t *const *key, int n, int64_t dim, float scale, float *s,
                 int64_t s_stride, const uint8_t *const *next) {
  const bf16 *q = (const bf16 *)qv;
  for (; heads >= 4; heads -= 4, q += 4 * q_stride, s += 4 * s_stride, next = nullptr) score_pairs<4>(q, q_stride, key, n, dim, scale, s, s_stride, next);
  for (; heads >= 2; heads -= 2, q += 2 * q_stride, s += 2 * s_stride, next = nullptr) score_pairs<2>(q, q_stride, key, n, dim, scale, s, s_stride, next);
  if (heads) score_pairs<1>(q, q_stride, key, n, dim, scale, s, s_stride, next);
}

// Where the columns of two values lie when they are pairs (first, second).
struct Order {
  uint16_t index[64];
  constexpr Order() : index() {
    for (int i = 0; i < 32; i++) index[2 * i] = (uint16_t)i, index[2 * i + 1] = (uint16_t)(i + 32);
  }
};
alignas(64) constexpr Order order;

// Pairs lie along the keys. columns: 64, or fewer at the end of a value.
template <int HEADS, bool WHOLE>
INLINE void weigh_pairs(const bf16 *p, int64_t p_stride, const uint8_t *const *value, int n, int64_t at, int64_t columns, int64_t dim,
                        float *acc, const uint8_t *const *next) {
  const __m512i low = _mm512_load_si512(order.index), high = _mm512_load_si512(order.index + 32);
  __m512 sum[HEADS][4];
  __mmask16 mask[4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    int64_t left = columns - 16 * j;
    mask[j] = (__mmask16)(left >= 16 ? 0xffff : left <= 0 ? 0 : (1 << left) - 1);
#pragma GCC unroll 4
    for (int g = 0; g < HEADS; g++) sum[g][j] = _mm512_maskz_loadu_ps(WHOLE ? 0xffff : mask[j], acc + g * dim + at + 16 * j);
  }
  for (int i = 0; i < n; i += 2) {
    if (next)
#pragma GCC unroll 4
      for (int line = 0; line < 4; line++) __builtin_prefetch((const bf16 *)next[i + line % 2] + at + line / 2 * 32, 0, 3);
    const bf16 *one = (const bf16 *)value[i] + at, *two = i + 1 < n ? (const bf16 *)value[i + 1] + at : nullptr;
    __m512bh v[4];
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      __m512i a = (__m512i)some_pairs(one + 32 * j, WHOLE ? 32 : columns - 32 * j), b = _mm512_setzero_si512();
      if (two) b = (__m512i)some_pairs(two + 32 * j, WHOLE ? 32 : columns - 32 * j);
      v[2 * j] = (__m512bh)_mm512_permutex2var_epi16(a, low, b);
      v[2 * j + 1] = (__m512bh)_mm512_permutex2var_epi16(a, high, b);
    }
#pragma GCC unroll 4
    for (int g = 0; g < HEADS; g++) {
      __m512bh weight = (__m512bh)_mm512_set1_epi32(*(const int __attribute__((may_alias, aligned(2))) *)(p + g * p_stride + i));
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) sum[g][j] = _mm512_dpbf16_ps(sum[g][j], v[j], weight);
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++)
#pragma GCC unroll 4
    for (int g = 0; g < HEADS; g++) _mm512_mask_storeu_ps(acc + g * dim + at + 16 * j, WHOLE ? 0xffff : mask[j], sum[g][j]);
}

template <int HEADS>
INLINE void weigh_columns(const bf16 *p, int64_t p_stride, const uint8_t *const *value, int n, int64_t dim, float *acc, const uint8_t *const *next) {
  int64_t at = 0;
  for (; at + 64 <= dim; at += 64) weigh_pairs<HEADS, true>(p, p_stride, value, n, at, 64, dim, acc, next);
  if (at < dim) weigh_pairs<HEADS, false>(p, p_stride, value, n, at, dim - at, dim, acc, nullptr);
}

void pair_weigh(const void *pv, int64_t p_stride, int64_t heads, const uint8_t *const *value, int n, int64_t dim, float *acc, const uint8_t *const *next) {
  const bf16 *p = (const bf16 *)pv;
  for (; heads >= 4; heads -= 4, p += 4 * p_stride, acc += 4 * dim, next = nullptr) weigh_columns<4>(p, p_stride, value, n, dim, acc, next);
  for (; heads >= 2; heads -= 2, p += 2 * p_stride, acc += 2 * dim, next = nullptr) weigh_columns<2>(p, p_stride, value, n, dim, acc, next);
  if (heads) weigh_columns<1>(p, p_stride, value, n, dim, acc, next);
}

constexpr AttentionOps table = {pair_scores, softmax<bf16>, pair_weigh, finish<bf16>, 8, 4};
}  // namespace
const AttentionOps *const attention_avx512_bf16 = &table;
#endif
