// Expert kernels for bfloat16 rows with AVX512-BF16: products of pairs, sums in float32.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,avx512vnni,fma,prefer-vector-width=512")
#define AVX512_FILE
#define AVX512_BF16_FILE
#define WITH_VBMI 1
#include "experts.h"

#include <immintrin.h>
namespace {
enum { LANES = 16, GROUPS = 4 };
#include "experts_vector.h"

INLINE __m512bh pair_of(const bf16 *p) { return (__m512bh)_mm512_set1_epi32(*(const int __attribute__((may_alias)) *)p); }
INLINE __m512bh load(const uint8_t *p) { return (__m512bh)_mm512_loadu_si512(p); }

// The magnitude of a byte as bfloat16, in two tables of 128 bytes.
struct Table {
  uint8_t low[128], high[128];
  constexpr Table(int format) : low(), high() {
    for (int m = 0; m < 128; m++) {
      int bits = 0;
      if (format == W_FP8) {
        int mantissa = m & 7, exponent = m >> 3;
        if (m == 0x7f) bits = 0x7fc0;
        else if (exponent) bits = (exponent + 120) << 7 | mantissa << 4;
        else if (mantissa >= 4) bits = 120 << 7 | (mantissa - 4) << 5;
        else if (mantissa >= 2) bits = 119 << 7 | (mantissa - 2) << 6;
        else if (mantissa) bits = 118 << 7;
      } else if (m) {
        int exponent = 6;
        while (!(m >> exponent)) exponent--;
        bits = (exponent + 127) << 7 | ((m << (7 - exponent)) & 0x7f);
      }
      low[m] = bits & 0xff, high[m] = bits >> 8;
    }
  }
};
alignas(64) constexpr Table fp8_table(W_FP8), int8_table(W_INT8);

struct Widener {
  __m512i low0, low1, high0, high1;
  INLINE Widener of(int format) {
    const Table &t = format == W_FP8 ? fp8_table : int8_table;
    return {_mm512_load_si512(t.low), _mm512_load_si512(t.low + 64), _mm512_load_si512(t.high), _mm512_load_si512(t.high + 64)};
  }
  // 64 bytes to two registers of bfloat16. The lookup does not look at the top bit, which is the sign.
  inline __attribute__((always_inline)) void operator()(const uint8_t *p, __m512bh *out) const {
    __m512i x = _mm512_loadu_si512(p);
    __m512i low = _mm512_permutex2var_epi8(low0, x, low1), high = _mm512_permutex2var_epi8(high0, x, high1);
    high = _mm512_ternarylogic_epi32(high, x, _mm512_set1_epi8((char)0x80), 0xf8);  // high | (x & 0x80)
    out[0] = (__m512bh)_mm512_unpacklo_epi8(low, high);
    out[1] = (__m512bh)_mm512_unpackhi_epi8(low, high);
  }
};

// acc += a[.][k0..k1) times the weights at p; LINES cache lines from `next` on are brought nearer for each pair.
template <int KIND, int MR, int LINES>
INLINE void pairs(const bf16 *const *a, const uint8_t *p, int64_t k0, int64_t k1, const uint8_t *next, __m512 (&acc)[MR][4]) {
  enum { STEP = 2 * (KIND == BF16 ? 128 : 64) };
  constexpr _mm_hint NEAR = _MM_HINT_T0;
  Widener widener;
  if (KIND != BF16) widener = Widener::of(KIND);
  for (int64_t k = k0; k < k1; k += 2, p += STEP, next += 64 * LINES) {
#pragma GCC unroll 4
    for (int i = 0; i < LINES; i++) _mm_prefetch((const char *)next + 64 * i, NEAR);
    __m512bh b[4];
    if constexpr (KIND == BF16) {
      for (int j = 0; j < 4; j++) b[j] = load(p + 64 * j);
    } else {
      widener(p, b);
      widener(p + 64, b + 2);
    }
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++) {
      __m512bh x = pair_of(a[m] + k);
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) acc[m][j] = _mm512_dpbf16_ps(acc[m][j], b[j], x);
    }
  }
}

template <int KIND, bool SCALED, int MR>
void dot(const void *const *av, const Block &block, float *c) {
  const bf16 *const *a = (const bf16 *const *)av;
  const uint8_t *p = SCALED ? block.panel + PANEL * 4 : block.panel;
  int64_t k = block.k, end = k + block.depth;
  __m512 acc[MR][4];
  bool more = k && !SCALED;
#pragma GCC unroll 8
  for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) acc[m][j] = more ? _mm512_loadu_ps(c + m * PANEL + 16 * j) : _mm512_setzero_ps();
  switch (block.lines) {
    case 0: pairs<KIND, MR, 0>(a, p, k, end, block.ahead, acc); break;
    case 1: pairs<KIND, MR, 1>(a, p, k, end, block.ahead, acc); break;
    case 2: pairs<KIND, MR, 2>(a, p, k, end, block.ahead, acc); break;
    default: pairs<KIND, MR, 4>(a, p, k, end, block.ahead, acc); break;
  }
#pragma GCC unroll 8
  for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      float *to = c + m * PANEL + 16 * j;
      if (SCALED) {
        __m512 scale = _mm512_loadu_ps((const float *)block.panel + 16 * j);
        acc[m][j] = _mm512_fmadd_ps(acc[m][j], scale, k ? _mm512_loadu_ps(to) : _mm512_setzero_ps());
      }
      _mm512_storeu_ps(to, acc[m][j]);
    }
}

template <int FORMAT> void widen_bytes(const uint8_t *block, int64_t depth, uint8_t *out) {
  Widener widener = Widener::of(FORMAT);
  const uint8_t *next = block + BYTE_BLOCK;  // its first half is brought nearer meanwhile
  memcpy(out, block, PANEL * 4);
  block += PANEL * 4, out += PANEL * 4;
  for (int64_t k = 0; k < depth; k += 2, block += 128, out += 256, next += 64) {
    _mm_prefetch((const char *)next, _MM_HINT_T0);
    __m512bh b[4];
    widener(block, b);
    widener(block + 64, b + 2);
    for (int j = 0; j < 4; j++) _mm512_storeu_si512(out + 64 * j, (__m512i)b[j]);
  }
}

// What codes of 4 bits stand for, as bfloat16, twice: a lookup looks at 5 bits.
struct HalfTable {
  uint16_t value[32];
  constexpr HalfTable(int format) : value() {
    const uint16_t e2m1[8] = {0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0};
    const uint16_t whole[9] = {0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100};
    for (int i = 0; i < 32; i++) {
      int code = i % 16, number = code - 8;
      if (format == W_MXFP4) value[i] = (uint16_t)(e2m1[code % 8] | (code >= 8 ? 0x8000 : 0));
      else value[i] = (uint16_t)(number < 0 ? whole[-number] | 0x8000 : whole[number]);
    }
  }
};
alignas(64) constexpr HalfTable mxfp4_values(W_MXFP4), int4_values(W_INT4);

INLINE __m512i half_table(int format) { return _mm512_load_si512((format == W_MXFP4 ? mxfp4_values : int4_values).value); }

#include "whole_avx512.h"

// Scales of 64 columns, once more as what is added to the exponents of both numbers of a pair: of powers of two.
struct HalfScales {
  HalfScale of[4];
  __m512i exponent[4];
  template <int FORMAT> INLINE HalfScales at(const uint8_t *p) {
    HalfScales s;
    for (int j = 0; j < 4; j++) {
      s.of[j] = half_scale_of<FORMAT>(p + 32 * j);
      __m512i more = _mm512_sub_epi32(_mm512_srli_epi32((__m512i)s.of[j].by, 16), _mm512_set1_epi32(127 << 7));  // 0 or a multiple of 1 << 7
      s.exponent[j] = _mm512_or_si512(_mm512_slli_epi32(more, 16), _mm512_and_si512(more, _mm512_set1_epi32(0xffff)));
    }
    return s;
  }
};

// n k (8, or at the end of all fewer) of 64 columns. What is no power of two is multiplied by, and the products rounded.
template <int FORMAT> INLINE void widen_step(const uint8_t *p, int n, const HalfScales &scale, __m512i table, uint8_t *out) {
  const __m512i high = _mm512_set1_epi32((int)0xffff0000), magnitude = _mm512_set1_epi16(0x7fff);
#pragma GCC unroll 4
  for (int q = 0; q < n; q += 2)
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      __m512i w = _mm512_permutexvar_epi16(_mm512_srli_epi32(_mm512_loadu_si512(p + 64 * j), 2 * q), table);
      if (FORMAT == W_MXFP4) {
        w = _mm512_mask_add_epi16(w, _mm512_test_epi16_mask(w, magnitude), w, scale.exponent[j]);
      } else {
        __m512 even = (__m512)_mm512_slli_epi32(w, 16), odd = (__m512)_mm512_and_si512(w, high), by = (__m512)scale.of[j].by;
        even = FORMAT == W_INT4 ? _mm512_mul_ps(even, by) : _mm512_fmadd_ps(even, by, (__m512)scale.of[j].more);
        odd = FORMAT == W_INT4 ? _mm512_mul_ps(odd, by) : _mm512_fmadd_ps(odd, by, (__m512)scale.of[j].more);
        // To the nearest, halfway up: the instruction for it takes several times as long on some CPUs.
        const __m512i half = _mm512_set1_epi32(0x8000);
        __m512i lower = _mm512_srli_epi32(_mm512_add_epi32((__m512i)even, half), 16);
        w = _mm512_mask_mov_epi16(_mm512_add_epi32((__m512i)odd, half), 0x55555555, lower);
      }
      _mm512_storeu_si512(out + 128 * q + 64 * j, w);
    }
}

template <int FORMAT> void widen_pairs(const uint8_t *block, int64_t depth, uint8_t *out) {
  const uint8_t *scales = block, *p = block + half_scales(FORMAT);
  const __m512i table = half_table(FORMAT);
  for (int64_t first = 0; first < depth; first += K_GROUP, scales += PANEL * 2) {
    int64_t n = depth - first < K_GROUP ? depth - first : (int64_t)K_GROUP, i = 0;
    const HalfScales scale = HalfScales::at<FORMAT>(scales);
    for (; i + HALF_STEP <= n; i += HALF_STEP, p += HALF_STEP_BYTES, out += HALF_STEP * 128) {
      for (int line = 0; line < 4; line++) _mm_prefetch((const char *)p + half_scales(FORMAT) + K_BLOCK * PANEL / 2 + 64 * line, _MM_HINT_T0);
      widen_step<FORMAT>(p, HALF_STEP, scale, table, out);
    }
    if (i < n) widen_step<FORMAT>(p, (int)(n - i), scale, table, out);
  }
}

template <bool SCALED, int N> constexpr TileFn wide() { return dot<BF16, SCALED, N>; }
template <int FORMAT, int N> constexpr TileFn narrow() { return dot<FORMAT, true, N>; }
constexpr ExpertOps table = with_few_whole({
    {0, wide<false, 1>(), wide<false, 2>(), wide<false, 3>(), wide<false, 4>(), wide<false, 5>(), wide<false, 6>()},
    {0, wide<true, 1>(), wide<true, 2>(), wide<true, 3>(), wide<true, 4>(), wide<true, 5>(), wide<true, 6>()},
    {NARROW(W_FP8), NARROW(W_INT8)},
    {widen_bytes<W_FP8>, widen_bytes<W_INT8>, widen_pairs<W_MXFP4>, widen_pairs<W_INT4>, widen_pairs<W_INT4_ZERO>},
    nullptr,
    {},
    gated_columns<bf16>,
    weigh_columns<bf16>,
    store_columns<bf16>,
});
constexpr ExpertOps whole_table = with_whole(table);
}  // namespace
const ExpertOps *const experts_avx512_bf16 = &table, *const experts_avx512_whole = &whole_table;
#endif
