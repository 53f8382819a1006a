// Rows of bfloat16 as whole numbers of two bytes, times weights of 8 and 4 bits: an instruction of AVX512-VNNI has 64 products of bytes, so 32
// of such numbers, where one of float32 has 16. Few rows are multiplied by weights that are taken apart in registers, many by weights
// that are taken apart once for all of them, with the same sums bit by bit. Included by experts_avx512bf16.cpp and experts_avx512vnni.cpp inside
// their namespaces, after experts_vector.h. WITH_VBMI: bytes of two registers are looked up by one instruction.

// Scales and zero points as float32, by the CPU's own conversion.
template <int FORMAT> INLINE HalfScale half_scale_of(const uint8_t *p) {
  if (FORMAT == W_MXFP4) return half_scale<FORMAT>(p);
  __m512 by = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
  if (FORMAT == W_INT4) return {(vf)by, splat(0.f)};
  return {(vf)by, (vf)_mm512_fnmadd_ps(by, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p + GROUP_SCALES))), _mm512_setzero_ps())};
}

// The order in which a row's numbers lie as bytes, of each 8 k: that in which codes of 4 bits lie, or as they are.
struct WholeOrder {
  uint8_t of[64];
  constexpr WholeOrder(bool halves) : of() {
    const int within[8] = {0, 4, 1, 5, 2, 6, 3, 7};
    for (int i = 0; i < K_GROUP; i++) {
      int k = halves ? i / 8 * 8 + within[i % 8] : i;
      of[i] = (uint8_t)(WITH_VBMI ? k % 2 * 64 + k / 2 * 4 : k % 16);
    }
  }
};
alignas(64) constexpr WholeOrder half_order(true), byte_order(false);

// The lowest bytes of 32 numbers, of which every other one is in each register.
INLINE __m256i lowest_bytes(const __m512i *of, const WholeOrder &as) {
#if WITH_VBMI
  return _mm512_castsi512_si256(_mm512_permutex2var_epi8(of[0], _mm512_load_si512(as.of), of[1]));
#else
  const __m128i even = _mm512_cvtepi32_epi8(of[0]), odd = _mm512_cvtepi32_epi8(of[1]);
  const __m256i all = _mm256_set_m128i(_mm_unpackhi_epi8(even, odd), _mm_unpacklo_epi8(even, odd));
  return _mm256_shuffle_epi8(all, _mm256_load_si256((const __m256i *)as.of));
#endif
}

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
    _mm256_storeu_si256((__m256i *)high, lowest_bytes(above, as));
    _mm256_storeu_si256((__m256i *)low, lowest_bytes(below, as));
    less = -_mm512_reduce_add_epi32(_mm512_add_epi32(whole[0], whole[1]));
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

// Products of 8 k of the rows and as many codes of ABREAST groups of 16 columns at p.
template <int FORMAT, int MR, int ABREAST>
INLINE void code_products(const uint8_t *p, const WholeGroup *const (&row)[MR], int step, __m512i (&high)[ABREAST][MR], __m512i (&low)[ABREAST][MR]) {
  const __m512i nibble = _mm512_set1_epi8(15);
  const __m512i twice = _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
  __m512i even[ABREAST], odd[ABREAST];
#pragma GCC unroll 4
  for (int i = 0; i < ABREAST; i++) {
    const __m512i codes = _mm512_loadu_si512(p + step * HALF_STEP_BYTES + 64 * i);
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

// Codes are multiplied as whole numbers that are not negative, by sums of four products of bytes: what they are larger by, times the sum
// of the row's numbers, is taken off. MXFP4's are twice its numbers.
template <int FORMAT, int MR> void half_dot(const void *const *av, const Block &block, float *c) {
  enum { MORE = FORMAT == W_MXFP4 ? 12 : 8, ABREAST = MR <= 2 ? 4 : 2, ALL_STEPS = K_GROUP / HALF_STEP };
  const WholeGroup *const *a = (const WholeGroup *const *)av;
  const uint8_t *p = block.panel + half_scales(FORMAT), *next = block.ahead, *scales = block.panel;
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
        for (int m = 0; m < MR; m++) high[i][m] = _mm512_setzero_si512(), low[i][m] = _mm512_set1_epi32(MORE * row[m]->less);
      for (int64_t line = 0; line < ABREAST * lines; line++, next += 64) _mm_prefetch((const char *)next, _MM_HINT_T0);
      if (steps == ALL_STEPS)
#pragma GCC unroll 4
        for (int step = 0; step < ALL_STEPS; step++) code_products<FORMAT, MR, ABREAST>(p + 64 * j, row, step, high, low);
      else
        for (int step = 0; step < steps; step++) code_products<FORMAT, MR, ABREAST>(p + 64 * j, row, step, high, low);
#pragma GCC unroll 4
      for (int i = 0; i < ABREAST; i++) {
        const HalfScale scale = half_scale_of<FORMAT>(scales + 32 * (j + i));
#pragma GCC unroll 8
        for (int m = 0; m < MR; m++) {
          float *to = c + m * PANEL + 16 * (j + i);
          const __m512i whole = _mm512_add_epi32(_mm512_slli_epi32(high[i][m], 7), low[i][m]);
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
        for (int64_t line = 0; line < lines; line++, next += 64) _mm_prefetch((const char *)next, _MM_HINT_T1), _mm_prefetch((const char *)p + NEAR_AHEAD + 64 * line, _MM_HINT_T0);
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

// ---- any number of rows. Weights are QuadBlocks of bytes that are 128 larger; those of 4 bits 16 times as large ----

void widen_quads(const uint8_t *block, int64_t depth, uint8_t *out) {
  QuadBlock *to = (QuadBlock *)out;
  for (int64_t group = 0; group * K_GROUP < depth; group++) memcpy(to->by[group], block, PANEL * 4);
  block += PANEL * 4;
  for (int64_t k = 0; k < depth; k += 4, block += 4 * PANEL) {
    const uint8_t *then = k + 2 < depth ? block + 2 * PANEL : block;  // behind the last pair the rows are zero
    for (int i = 0; i < 4; i += 2) {
      const __m512i x = above_zero(block + 32 * i), y = above_zero(then + 32 * i);
      _mm512_storeu_si512(to->quads[i][k / 4], _mm512_unpacklo_epi16(x, y));
      _mm512_storeu_si512(to->quads[i + 1][k / 4], _mm512_unpackhi_epi16(x, y));
    }
  }
}

template <int FORMAT> void widen_codes(const uint8_t *block, int64_t depth, uint8_t *out) {
  QuadBlock *to = (QuadBlock *)out;
  const uint8_t *p = block + half_scales(FORMAT);
  for (int64_t first = 0; first < depth; first += K_GROUP, block += PANEL * 2)
    for (int j = 0; j < 4; j++) {
      const HalfScale scale = half_scale_of<FORMAT>(block + 32 * j);
      store(to->by[first / K_GROUP] + 16 * j, scale.by * .0625f), store(to->more[first / K_GROUP] + 16 * j, scale.more);
    }
  const __m512i upper = _mm512_set1_epi8((char)0xf0);
  const __m512i e2m1 = _mm512_broadcast_i32x4(_mm_setr_epi8((char)128, (char)136, (char)144, (char)152, (char)160, (char)176, (char)192, (char)224, (char)128,
                                                            120, 112, 104, 96, 80, 64, 32));
  for (int64_t k = 0; k < depth; k += HALF_STEP, p += HALF_STEP_BYTES)
    for (int j = 0; j < 4; j++) {
      const __m512i codes = _mm512_loadu_si512(p + 64 * j);
      __m512i w[2] = {_mm512_and_si512(_mm512_slli_epi32(codes, 4), upper), _mm512_and_si512(codes, upper)};
      for (int q = 0; q < 2; q++) {
        if (FORMAT == W_MXFP4) w[q] = _mm512_shuffle_epi8(e2m1, _mm512_srli_epi32(w[q], 4));
        _mm512_storeu_si512(to->quads[j][k / 4 + q], w[q]);
      }
    }
}

template <int FORMAT, int MR> void wide_dot(const void *const *av, const Block &block, float *c) {
  enum { ABREAST = 2, QUADS = K_GROUP / 4 };
  const WholeGroup *const *a = (const WholeGroup *const *)av;
  const QuadBlock &weights = *(const QuadBlock *)block.panel;
  const uint8_t *next = block.ahead;
  for (int j = 0; j < 4; j += ABREAST) {
    __m512 sum[MR][ABREAST];
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++)
#pragma GCC unroll 2
      for (int i = 0; i < ABREAST; i++) sum[m][i] = block.k ? _mm512_loadu_ps(c + m * PANEL + 16 * (j + i)) : _mm512_setzero_ps();
    for (int64_t group = 0; group * K_GROUP < block.depth; group++) {
      for (int line = 0; line < K_GROUP / 2 / (4 / ABREAST) * block.lines; line++, next += 64) __builtin_prefetch(next, 0, 2);
      const WholeGroup *row[MR];
      __m512i whole[MR][ABREAST];
#pragma GCC unroll 8
      for (int m = 0; m < MR; m++) row[m] = a[m] + block.k / K_GROUP + group;
#pragma GCC unroll 8
      for (int m = 0; m < MR; m++)
#pragma GCC unroll 2
        for (int i = 0; i < ABREAST; i++) whole[m][i] = _mm512_set1_epi32(row[m]->less);
#pragma GCC unroll 2
      for (int part = 0; part < 2; part++) {
#pragma GCC unroll 8
        for (int q = 0; q < QUADS; q++) {
          __m512i w[ABREAST];
#pragma GCC unroll 2
          for (int i = 0; i < ABREAST; i++) w[i] = _mm512_loadu_si512(weights.quads[j + i][group * QUADS + q]);
#pragma GCC unroll 8
          for (int m = 0; m < MR; m++) {
            const __m512i x = four_of((part ? row[m]->low : row[m]->high) + 4 * q);
#pragma GCC unroll 2
            for (int i = 0; i < ABREAST; i++) whole[m][i] = _mm512_dpbusd_epi32(whole[m][i], w[i], x);
          }
        }
#pragma GCC unroll 8
        for (int m = 0; m < MR && !part; m++)
#pragma GCC unroll 2
          for (int i = 0; i < ABREAST; i++) whole[m][i] = _mm512_slli_epi32(whole[m][i], 7);
      }
#pragma GCC unroll 2
      for (int i = 0; i < ABREAST; i++) {
        const HalfScale scale = {load(weights.by[group] + 16 * (j + i)), load(weights.more[group] + 16 * (j + i))};
#pragma GCC unroll 8
        for (int m = 0; m < MR; m++) sum[m][i] = add_scaled<FORMAT>(whole[m][i], *row[m], scale, sum[m][i]);
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++)
#pragma GCC unroll 2
      for (int i = 0; i < ABREAST; i++) _mm512_storeu_ps(c + m * PANEL + 16 * (j + i), sum[m][i]);
  }
}

template <int F> constexpr TileFn of_quads[MAX_ROWS + 1] = {nullptr, wide_dot<F, 1>, wide_dot<F, 2>, wide_dot<F, 3>, wide_dot<F, 4>, wide_dot<F, 5>, wide_dot<F, 6>};
constexpr ExpertOps with_whole(ExpertOps ops) {
  const WidenFn widen[5] = {nullptr, widen_quads, widen_codes<W_MXFP4>, widen_codes<W_INT4>, widen_codes<W_INT4_ZERO>};
  const TileFn *const wide[5] = {nullptr, of_quads<W_INT8>, of_quads<W_INT8>, of_quads<W_INT8>, of_quads<W_INT4_ZERO>};
  for (int i = 1; i < 5; i++) ops.widen_whole[i] = widen[i], ops.wide_whole[i] = wide[i];
  return ops;
}

// ---- few rows ----

template <int FORMAT> constexpr TileFn of_codes[MAX_NARROW_ROWS + 1] = {nullptr, half_dot<FORMAT, 1>, half_dot<FORMAT, 2>, half_dot<FORMAT, 3>, half_dot<FORMAT, 4>, half_dot<FORMAT, 5>, half_dot<FORMAT, 6>};
constexpr ExpertOps with_few_whole(ExpertOps ops) {
  const TileFn *const codes[3] = {of_codes<W_MXFP4>, of_codes<W_INT4>, of_codes<W_INT4_ZERO>}, bytes[MAX_WHOLE_ROWS + 1] = {nullptr, byte_dot<1>, byte_dot<2>, byte_dot<3>, byte_dot<4>};
  for (int format = 0; format < 3; format++)
    for (int i = 0; i <= MAX_NARROW_ROWS; i++) ops.narrow[W_MXFP4 - W_FP8 + format][i] = codes[format][i];
  for (int i = 0; i <= MAX_WHOLE_ROWS; i++) ops.bytes[i] = bytes[i];
  ops.whole = whole_numbers;
  return ops;
}
