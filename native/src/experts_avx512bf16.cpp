// Expert kernels for bfloat16 rows with AVX512-BF16: products of pairs, sums in float32.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,avx512vnni,fma,prefer-vector-width=512")
#define AVX512_FILE
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

// Scales and zero points as float32, by the CPU's own conversion.
template <int FORMAT> INLINE HalfScale half_scale_of(const uint8_t *p) {
  if (FORMAT == W_MXFP4) return half_scale<FORMAT>(p);
  __m512 by = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
  if (FORMAT == W_INT4) return {(vf)by, splat(0.f)};
  return {(vf)by, (vf)_mm512_fnmadd_ps(by, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p + GROUP_SCALES))), _mm512_setzero_ps())};
}

// Of 32 numbers in two registers, every other one in each: the lowest bytes, of each 8 k in the order in which codes of 4 bits lie, or as
// they are.
struct WholeOrder {
  uint8_t of[64];
  constexpr WholeOrder(bool halves) : of() {
    const int within[8] = {0, 4, 1, 5, 2, 6, 3, 7};
    for (int i = 0; i < K_GROUP; i++) {
      int k = halves ? i / 8 * 8 + within[i % 8] : i;
      of[i] = (uint8_t)(k % 2 * 64 + k / 2 * 4);
    }
  }
};
alignas(64) constexpr WholeOrder half_order(true), byte_order(false);

// 32 numbers of a row as whole numbers of 15 bits times a scale, which loses at most 2^-15 of the largest of them: 128 times those in
// `high` and those in `low`, in that order. A group with what is no number has such a scale.
struct WholeGroup {
  int8_t high[K_GROUP], low[K_GROUP];
  float scale;
  int less;  // what they add up to, less than zero by as much

  inline __attribute__((always_inline)) void set(const bf16 *x, int64_t n, const WholeOrder &as) {
    const __mmask32 here = n == K_GROUP ? ~(__mmask32)0 : ((__mmask32)1 << n) - 1;
    const __m512i raw = _mm512_maskz_loadu_epi16(here, x), size = _mm512_andnot_si512(_mm512_set1_epi16((short)0x8000), raw);
    const __m256i of_16 = _mm256_max_epu16(_mm512_castsi512_si256(size), _mm512_extracti64x4_epi64(size, 1));
    const __m128i of_8 = _mm_max_epu16(_mm256_castsi256_si128(of_16), _mm256_extracti128_si256(of_16, 1));
    const uint32_t bits = (uint16_t)~_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(of_8, _mm_set1_epi16(-1))), 0);
    const float most = _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128((int)(bits << 16))));
    const bool numbers = bits < 0x7f80;
    scale = !numbers ? __builtin_nanf("") : most > 1e-30f ? most / 16256 : 0.f;
    const __m512 by = _mm512_set1_ps(most > 1e-30f && numbers ? 16256 / most : 0.f);
    const __m512 part[2] = {(__m512)_mm512_slli_epi32(raw, 16), (__m512)_mm512_and_si512(raw, _mm512_set1_epi32((int)0xffff0000))};  // every other k
    __m512i whole[2], above[2], below[2];
    for (int i = 0; i < 2; i++) {
      whole[i] = _mm512_cvtps_epi32(_mm512_mul_ps(part[i], by));
      above[i] = _mm512_srai_epi32(_mm512_add_epi32(whole[i], _mm512_set1_epi32(64)), 7);
      below[i] = _mm512_sub_epi32(whole[i], _mm512_slli_epi32(above[i], 7));
    }
    const __m512i order = _mm512_load_si512(as.of), total = _mm512_add_epi32(whole[0], whole[1]);
    _mm256_storeu_si256((__m256i *)high, _mm512_castsi512_si256(_mm512_permutex2var_epi8(above[0], order, above[1])));
    _mm256_storeu_si256((__m256i *)low, _mm512_castsi512_si256(_mm512_permutex2var_epi8(below[0], order, below[1])));
    less = -_mm512_reduce_add_epi32(total);
  }
};

static_assert(sizeof(WholeGroup) == WHOLE_BYTES);

void whole_numbers(const void *row, int64_t depth, int64_t format, uint8_t *out) {
  WholeGroup *to = (WholeGroup *)out;
  for (int64_t k = 0; k < depth; k += K_GROUP, to++)
    to->set((const bf16 *)row + k, depth - k < K_GROUP ? depth - k : (int64_t)K_GROUP, format >= W_MXFP4 ? half_order : byte_order);
}

// A sum of whole numbers of 32 k, scaled, and what was added up before. Everything that multiplies whole numbers ends so: how many rows there
// are does not change a bit.
template <int FORMAT> INLINE __m512 add_scaled(__m512i whole, const WholeGroup &row, const HalfScale &scale, __m512 before) {
  const float by = FORMAT == W_MXFP4 ? row.scale / 2 : row.scale;
  const __m512 sum = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(whole), _mm512_set1_ps(by)), (__m512)scale.by, before);
  return FORMAT == W_INT4_ZERO ? _mm512_fnmadd_ps((__m512)scale.more, _mm512_set1_ps(by * (float)row.less), sum) : sum;
}

INLINE __m512i four_of(const int8_t *p) { return _mm512_set1_epi32(*(const int __attribute__((may_alias)) *)p); }

// Codes are multiplied as whole numbers that are not negative, by sums of four products of bytes: what they are larger by, times the sum
// of the row's numbers, is taken off. MXFP4's are twice its numbers.
template <int FORMAT, int MR> void half_dot(const void *const *av, const Block &block, float *c) {
  enum { MORE = FORMAT == W_MXFP4 ? 12 : 8, ABREAST = MR <= 2 ? 4 : 2 };
  const WholeGroup *const *a = (const WholeGroup *const *)av;
  const uint8_t *p = block.panel + half_scales(FORMAT), *next = block.ahead, *scales = block.panel;
  const __m512i nibble = _mm512_set1_epi8(15);
  const __m512i twice = _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
  const int64_t lines = 4 * block.lines;
  for (int64_t first = 0; first < block.depth; first += K_GROUP, scales += PANEL * 2) {
    const int64_t n = block.depth - first < K_GROUP ? block.depth - first : (int64_t)K_GROUP, k = block.k + first;
    const int steps = (int)(n + HALF_STEP - 1) / HALF_STEP;
    const WholeGroup *row[MR];
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++) row[m] = a[m] + k / K_GROUP;
    for (int j = 0; j < 4; j += ABREAST) {
      __m512i high[ABREAST][MR], low[ABREAST][MR];
#pragma GCC unroll 4
      for (int i = 0; i < ABREAST; i++)
#pragma GCC unroll 8
        for (int m = 0; m < MR; m++) high[i][m] = low[i][m] = _mm512_setzero_si512();
      for (int64_t line = 0; line < ABREAST * lines; line++, next += 64) _mm_prefetch((const char *)next, _MM_HINT_T0);
      for (int step = 0; step < steps; step++) {
        __m512i even[ABREAST], odd[ABREAST];
#pragma GCC unroll 4
        for (int i = 0; i < ABREAST; i++) {
          const __m512i codes = _mm512_loadu_si512(p + step * HALF_STEP_BYTES + 64 * (j + i));
          even[i] = _mm512_and_si512(codes, nibble), odd[i] = _mm512_and_si512(_mm512_srli_epi32(codes, 4), nibble);
          if (FORMAT == W_MXFP4) even[i] = _mm512_shuffle_epi8(twice, even[i]), odd[i] = _mm512_shuffle_epi8(twice, odd[i]);
        }
#pragma GCC unroll 8
        for (int m = 0; m < MR; m++) {
          const __m512i x[4] = {four_of(row[m]->high + 8 * step), four_of(row[m]->low + 8 * step), four_of(row[m]->high + 8 * step + 4),
                                four_of(row[m]->low + 8 * step + 4)};
#pragma GCC unroll 4
          for (int i = 0; i < ABREAST; i++) {
            high[i][m] = _mm512_dpbusd_epi32(high[i][m], even[i], x[0]), low[i][m] = _mm512_dpbusd_epi32(low[i][m], even[i], x[1]);
            high[i][m] = _mm512_dpbusd_epi32(high[i][m], odd[i], x[2]), low[i][m] = _mm512_dpbusd_epi32(low[i][m], odd[i], x[3]);
          }
        }
      }
#pragma GCC unroll 4
      for (int i = 0; i < ABREAST; i++) {
        const HalfScale scale = half_scale_of<FORMAT>(scales + 32 * (j + i));
#pragma GCC unroll 8
        for (int m = 0; m < MR; m++) {
          float *to = c + m * PANEL + 16 * (j + i);
          const __m512i whole = _mm512_add_epi32(_mm512_add_epi32(_mm512_slli_epi32(high[i][m], 7), low[i][m]), _mm512_set1_epi32(MORE * row[m]->less));
          _mm512_storeu_ps(to, add_scaled<FORMAT>(whole, *row[m], scale, k ? _mm512_loadu_ps(to) : _mm512_setzero_ps()));
        }
      }
    }
    p += steps * HALF_STEP_BYTES;
  }
}

// 64 bytes of sign and magnitude as whole numbers that are not negative: larger by 128.
INLINE __m512i above_zero(const uint8_t *p) {
  const __m512i x = _mm512_loadu_si512(p);
  return _mm512_mask_sub_epi8(_mm512_xor_si512(x, _mm512_set1_epi8((char)0x80)), _mm512_movepi8_mask(x), _mm512_setzero_si512(), x);
}

// INT8 times rows of whole numbers, by sums of four products of bytes as above: two pairs of k are brought together first.
template <int MR> void byte_dot(const void *const *av, const Block &block, float *c) {
  enum { ABREAST = MR <= 2 ? 4 : 2 };
  const WholeGroup *const *a = (const WholeGroup *const *)av;
  const uint8_t *next = block.ahead;
  const int64_t lines = block.lines * ABREAST / 2;
  for (int j = 0; j < 4; j += ABREAST) {
    for (int64_t first = 0; first < block.depth; first += K_GROUP) {
      const int64_t n = block.depth - first < K_GROUP ? block.depth - first : (int64_t)K_GROUP, at = (block.k + first) / K_GROUP;
      const uint8_t *p = block.panel + PANEL * 4 + first * PANEL + 32 * j;
      __m512i high[ABREAST][MR], low[ABREAST][MR];
#pragma GCC unroll 4
      for (int i = 0; i < ABREAST; i++)
#pragma GCC unroll 4
        for (int m = 0; m < MR; m++) high[i][m] = low[i][m] = _mm512_setzero_si512();
      for (int64_t k = 0; k < n; k += 4, p += 4 * PANEL) {
        for (int64_t line = 0; line < lines; line++, next += 64) _mm_prefetch((const char *)next, _MM_HINT_T0);
        const uint8_t *then = k + 2 < n ? p + 2 * PANEL : p;  // behind the last pair the rows are zero
        __m512i w[ABREAST];
#pragma GCC unroll 2
        for (int i = 0; i < ABREAST; i += 2) {
          const __m512i x = above_zero(p + 32 * i), y = above_zero(then + 32 * i);
          w[i] = _mm512_unpacklo_epi16(x, y), w[i + 1] = _mm512_unpackhi_epi16(x, y);
        }
#pragma GCC unroll 4
        for (int m = 0; m < MR; m++) {
          const __m512i x = four_of(a[m][at].high + k), y = four_of(a[m][at].low + k);
#pragma GCC unroll 4
          for (int i = 0; i < ABREAST; i++) high[i][m] = _mm512_dpbusd_epi32(high[i][m], w[i], x), low[i][m] = _mm512_dpbusd_epi32(low[i][m], w[i], y);
        }
      }
#pragma GCC unroll 4
      for (int i = 0; i < ABREAST; i++) {
        const HalfScale scale = {load((const float *)block.panel + 16 * (j + i)), {}};
#pragma GCC unroll 4
        for (int m = 0; m < MR; m++) {
          float *to = c + m * PANEL + 16 * (j + i);
          const __m512i whole = _mm512_add_epi32(_mm512_add_epi32(_mm512_slli_epi32(high[i][m], 7), low[i][m]), _mm512_set1_epi32(128 * a[m][at].less));
          _mm512_storeu_ps(to, add_scaled<W_INT8>(whole, a[m][at], scale, at ? _mm512_loadu_ps(to) : _mm512_setzero_ps()));
        }
      }
    }
  }
}

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
template <int FORMAT, int N> constexpr TileFn narrow() {
  if constexpr (FORMAT >= W_MXFP4) return half_dot<FORMAT, N>;
  else return dot<FORMAT, true, N>;
}
constexpr ExpertOps table = {
    {0, wide<false, 1>(), wide<false, 2>(), wide<false, 3>(), wide<false, 4>(), wide<false, 5>(), wide<false, 6>()},
    {0, wide<true, 1>(), wide<true, 2>(), wide<true, 3>(), wide<true, 4>(), wide<true, 5>(), wide<true, 6>()},
    {NARROW(W_FP8), NARROW(W_INT8), NARROW(W_MXFP4), NARROW(W_INT4), NARROW(W_INT4_ZERO)},
    {widen_bytes<W_FP8>, widen_bytes<W_INT8>, widen_pairs<W_MXFP4>, widen_pairs<W_INT4>, widen_pairs<W_INT4_ZERO>},
    whole_numbers,
    {0, byte_dot<1>, byte_dot<2>, byte_dot<3>, byte_dot<4>},
    gated_columns<bf16>,
    weigh_columns<bf16>,
    store_columns<bf16>,
};
constexpr ExpertOps whole_table = with_whole(table);
}  // namespace
const ExpertOps *const experts_avx512_bf16 = &table, *const experts_avx512_whole = &whole_table;
#endif
