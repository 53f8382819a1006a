// Rows of bfloat16 as whole numbers, times weights of 8 and 4 bits, with AVX2: products of pairs of 16 bits, summed in 32. They are twice
// as many in a cycle as products in float32, with any number of rows. Included by experts_avx2.cpp inside its namespace.

// 32 numbers of a row as whole numbers of 16 bits times a scale, which loses at most 2^-16 of the largest of them. A group with what is
// no number has such a scale.
struct WholeGroup {
  int16_t number[K_GROUP];
  float scale;
  int32_t sum;

  inline __attribute__((always_inline)) void set(const bf16 *x) {
    enum { MOST = 32767 };
    const __m256i raw[2] = {_mm256_loadu_si256((const __m256i *)x), _mm256_loadu_si256((const __m256i *)(x + 16))};
    const __m256i size = _mm256_set1_epi16(0x7fff), of_16 = _mm256_max_epu16(_mm256_and_si256(raw[0], size), _mm256_and_si256(raw[1], size));
    const __m128i of_8 = _mm_max_epu16(_mm256_castsi256_si128(of_16), _mm256_extracti128_si256(of_16, 1));
    const uint32_t bits = (uint16_t)~_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(of_8, _mm_set1_epi16(-1))), 0);
    const float most = _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128((int)(bits << 16))));
    const bool numbers = bits < 0x7f80;
    scale = !numbers ? __builtin_nanf("") : most > 1e-30f ? most / MOST : 0.f;
    const __m256 by = _mm256_set1_ps(most > 1e-30f && numbers ? MOST / most : 0.f);
    __m256i total = _mm256_setzero_si256();
    for (int i = 0; i < 2; i++) {
      const __m256i zero = _mm256_setzero_si256(), low = _mm256_unpacklo_epi16(zero, raw[i]), high = _mm256_unpackhi_epi16(zero, raw[i]);
      const __m256i whole = _mm256_packs_epi32(_mm256_cvtps_epi32(_mm256_mul_ps((__m256)low, by)), _mm256_cvtps_epi32(_mm256_mul_ps((__m256)high, by)));
      _mm256_storeu_si256((__m256i *)(number + 16 * i), whole);
      total = _mm256_add_epi32(total, _mm256_madd_epi16(whole, _mm256_set1_epi16(1)));
    }
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(total), _mm256_extracti128_si256(total, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    sum = _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
  }
};
static_assert(sizeof(WholeGroup) == WHOLE_BYTES);

void whole_numbers(const void *row, int64_t depth, bool, uint8_t *out) {
  const bf16 *x = (const bf16 *)row;
  WholeGroup *to = (WholeGroup *)out;
  int64_t k = 0;
  for (; k + K_GROUP <= depth; k += K_GROUP) to++->set(x + k);
  if (k == depth) return;
  bf16 rest[K_GROUP] = {};
  memcpy(rest, x + k, (depth - k) * sizeof(bf16));
  to->set(rest);
}

INLINE __m256i load_bytes(const uint8_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
INLINE __m256i pair_of(const int16_t *p) { return _mm256_set1_epi32(*(const int __attribute__((may_alias)) *)p); }

// sum += products of pairs, in so many registers as there are: left to itself the compiler takes all products first, and then has none.
INLINE void add_products(__m256i &sum, __m256i w, __m256i x) {
  __m256i product;
  asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(product) : "x"(w), "x"(x));
}

// Of 8 columns and 32 k: what sums are multiplied by, and what a row's sum times that is multiplied by and added. Codes of MXFP4 are
// taken for twice what they are.
template <int FORMAT> INLINE HalfScale whole_scale(const uint8_t *p) {
  if (FORMAT == W_MXFP4) return {load((const bf16 *)p) * .5f, splat(0.f)};
  vf by = (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
  if (FORMAT == W_INT4) return {by, splat(0.f)};
  return {by, -by * (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + GROUP_SCALES)))};
}

// c += sums of 8 columns and 32 k, scaled. Everything that multiplies whole numbers here ends so: how many rows there are does not
// change a bit.
template <bool ZERO> INLINE void add_scaled(__m256i sums, const WholeGroup &row, const HalfScale &scale, bool more, float *c) {
  const vf by = splat(row.scale);
  vf sum = (vf)_mm256_fmadd_ps((__m256)((vf)_mm256_cvtepi32_ps(sums) * by), (__m256)scale.by, more ? _mm256_loadu_ps(c) : _mm256_setzero_ps());
  if (ZERO) sum = (vf)_mm256_fmadd_ps((__m256)scale.more, (__m256)(by * splat((float)row.sum)), (__m256)sum);
  store(c, sum);
}

// Codes of 8 k and 8 columns as numbers that are not negative, of 16 bits: of k and k + 1, then of the next two, ...
template <int FORMAT> INLINE void pairs_of_codes(const uint8_t *p, __m256i (&w)[4]) {
  const __m256i codes = load_bytes(p);
  if (FORMAT == W_MXFP4) {
    const __m256i nibble = _mm256_set1_epi8(15), byte = _mm256_set1_epi16(255);
    const __m256i twice = _mm256_broadcastsi128_si256(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    const __m256i even = _mm256_shuffle_epi8(twice, _mm256_and_si256(codes, nibble));
    const __m256i odd = _mm256_shuffle_epi8(twice, _mm256_and_si256(_mm256_srli_epi16(codes, 4), nibble));
    w[0] = _mm256_and_si256(even, byte), w[1] = _mm256_and_si256(odd, byte), w[2] = _mm256_srli_epi16(even, 8), w[3] = _mm256_srli_epi16(odd, 8);
  } else {
    const __m256i code = _mm256_set1_epi16(15);
    w[0] = _mm256_and_si256(codes, code), w[1] = _mm256_and_si256(_mm256_srli_epi16(codes, 4), code);
    w[2] = _mm256_and_si256(_mm256_srli_epi16(codes, 8), code), w[3] = _mm256_srli_epi16(codes, 12);
  }
}

template <int FORMAT> constexpr int above_zero() { return FORMAT == W_MXFP4 ? 12 : 8; }  // what codes are larger by

// Few rows: codes are taken apart in registers.
template <int FORMAT, int MR> void half_pairs(const void *const *av, const Block &block, float *c) {
  enum { ABREAST = MR == 1 ? 4 : 2 };
  const WholeGroup *const *a = (const WholeGroup *const *)av;
  const uint8_t *p = block.panel + half_scales(FORMAT), *next = block.ahead, *scales = block.panel;
  const int64_t lines = 2 * block.lines * ABREAST;
  for (int64_t first = 0; first < block.depth; first += K_GROUP, scales += PANEL * 2) {
    const int64_t n = block.depth - first < K_GROUP ? block.depth - first : (int64_t)K_GROUP, k = block.k + first;
    const int steps = (int)(n + HALF_STEP - 1) / HALF_STEP;
    const WholeGroup *row[MR];
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++) row[m] = a[m] + k / K_GROUP;
    for (int j = 0; j < 8; j += ABREAST) {
      __m256i acc[MR][ABREAST];
      for (int64_t line = 0; line < lines; line++, next += 64) _mm_prefetch((const char *)next, _MM_HINT_T0);
#pragma GCC unroll 8
      for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
        for (int i = 0; i < ABREAST; i++) acc[m][i] = _mm256_set1_epi32(-above_zero<FORMAT>() * row[m]->sum);
      for (int step = 0; step < steps; step++) {
        __m256i w[ABREAST][4];
#pragma GCC unroll 4
        for (int i = 0; i < ABREAST; i++) pairs_of_codes<FORMAT>(p + step * HALF_STEP_BYTES + 32 * (j + i), w[i]);
#pragma GCC unroll 4
        for (int q = 0; q < 4; q++)
#pragma GCC unroll 8
          for (int m = 0; m < MR; m++) {
            const __m256i x = pair_of(row[m]->number + 8 * step + 2 * q);
#pragma GCC unroll 4
            for (int i = 0; i < ABREAST; i++) add_products(acc[m][i], w[i][q], x);
          }
      }
#pragma GCC unroll 4
      for (int i = 0; i < ABREAST; i++) {
        const HalfScale scale = whole_scale<FORMAT>(scales + 16 * (j + i));
#pragma GCC unroll 8
        for (int m = 0; m < MR; m++) add_scaled<FORMAT == W_INT4_ZERO>(acc[m][i], *row[m], scale, k, c + m * PANEL + 8 * (j + i));
      }
    }
    p += steps * HALF_STEP_BYTES;
  }
}

// 32 bytes of sign and magnitude, 16 columns of k and k + 1, as numbers of 16 bits.
INLINE void pairs_of_bytes(const uint8_t *p, __m256i *w) {
  const __m256i x = load_bytes(p), number = _mm256_sign_epi8(_mm256_and_si256(x, _mm256_set1_epi8(0x7f)), x);
  const __m256i sign = _mm256_cmpgt_epi8(_mm256_setzero_si256(), number);
  w[0] = _mm256_unpacklo_epi8(number, sign), w[1] = _mm256_unpackhi_epi8(number, sign);
}

// Where the columns of register j of a block of bytes are in c: 8 of one group of 16, then 8 of the next group.
INLINE constexpr int byte_column(int j) { return j / 4 * 32 + j % 2 * 16 + j / 2 % 2 * 8; }

template <int MR> void byte_pairs(const void *const *av, const Block &block, float *c) {
  enum { ABREAST = MR == 1 ? 8 : 4 };
  const WholeGroup *const *a = (const WholeGroup *const *)av;
  const uint8_t *next = block.ahead;
  const int64_t lines = block.lines;
  for (int64_t first = 0; first < block.depth; first += K_GROUP) {
    const int64_t n = block.depth - first < K_GROUP ? block.depth - first : (int64_t)K_GROUP, k = block.k + first;
    const WholeGroup *row[MR];
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++) row[m] = a[m] + k / K_GROUP;
    for (int j = 0; j < 8; j += ABREAST) {
      const uint8_t *p = block.panel + PANEL * 4 + first * PANEL + 16 * j;
      __m256i acc[MR][ABREAST];
#pragma GCC unroll 8
      for (int m = 0; m < MR; m++)
#pragma GCC unroll 8
        for (int i = 0; i < ABREAST; i++) acc[m][i] = _mm256_setzero_si256();
      for (int64_t at = 0; at < n; at += 2, p += 2 * PANEL) {
        if (j == 0)
          for (int64_t line = 0; line < lines; line++, next += 64) _mm_prefetch((const char *)next, _MM_HINT_T0);
        __m256i x[MR];
#pragma GCC unroll 8
        for (int m = 0; m < MR; m++) x[m] = pair_of(row[m]->number + at);
#pragma GCC unroll 4
        for (int i = 0; i < ABREAST; i += 2) {
          __m256i w[2];
          pairs_of_bytes(p + 16 * i, w);
#pragma GCC unroll 8
          for (int m = 0; m < MR; m++)
#pragma GCC unroll 2
            for (int of = 0; of < 2; of++) add_products(acc[m][i + of], w[of], x[m]);
        }
      }
#pragma GCC unroll 8
      for (int i = 0; i < ABREAST; i++) {
        const HalfScale scale = {load((const float *)block.panel + byte_column(j + i)), splat(0.f)};
#pragma GCC unroll 8
        for (int m = 0; m < MR; m++) add_scaled<false>(acc[m][i], *row[m], scale, k, c + m * PANEL + byte_column(j + i));
      }
    }
  }
}

// Many rows: a block of weights is taken apart once for all of them. Scales for each 32 k first, what is added behind them, then 16 columns
// after 16, pair of k after pair.
struct WideBlock {
  float by[K_BLOCK / K_GROUP][PANEL], more[K_BLOCK / K_GROUP][PANEL];
  int16_t pairs[4][K_BLOCK / 2][32];
};
static_assert(sizeof(WideBlock) == WHOLE_BLOCK);

template <int FORMAT> void widen_whole(const uint8_t *block, int64_t depth, uint8_t *out) {
  WideBlock *to = (WideBlock *)out;
  if (FORMAT == W_INT8) {
    for (int64_t group = 0; group * K_GROUP < depth; group++) memcpy(to->by[group], block, PANEL * 4);
    block += PANEL * 4;
    for (int64_t k = 0; k < depth; k += 2, block += 2 * PANEL)
      for (int j = 0; j < 8; j += 2) {
        __m256i w[2];
        pairs_of_bytes(block + 16 * j, w);
        for (int of = 0; of < 2; of++) _mm256_storeu_si256((__m256i *)(to->pairs[byte_column(j + of) / 16][k / 2] + byte_column(j) % 16 * 2), w[of]);
      }
    return;
  }
  const uint8_t *p = block + half_scales(FORMAT);
  for (int64_t first = 0; first < depth; first += K_GROUP, block += PANEL * 2)
    for (int j = 0; j < 8; j++) {
      const HalfScale scale = whole_scale<FORMAT>(block + 16 * j);
      store(to->by[first / K_GROUP] + 8 * j, scale.by);
      if (FORMAT == W_INT4_ZERO) store(to->more[first / K_GROUP] + 8 * j, scale.more);
    }
  const __m256i above = _mm256_set1_epi16(above_zero<FORMAT>());
  for (int64_t k = 0; k < depth; k += HALF_STEP, p += HALF_STEP_BYTES)
    for (int j = 0; j < 8; j++) {
      __m256i w[4];
      pairs_of_codes<FORMAT>(p + 32 * j, w);
      for (int q = 0; q < 4; q++) _mm256_storeu_si256((__m256i *)(to->pairs[j / 2][k / 2 + q] + j % 2 * 16), _mm256_sub_epi16(w[q], above));
    }
}

template <bool ZERO, int MR> void wide_pairs(const void *const *av, const Block &block, float *c) {
  const WholeGroup *const *a = (const WholeGroup *const *)av;
  const WideBlock &w = *(const WideBlock *)block.panel;
  for (const uint8_t *at = block.ahead, *last = at + block.depth * 32 * block.lines; at < last; at += 64) __builtin_prefetch(at, 0, 2);
  for (int group = 0; group < 4; group++)
    for (int64_t first = 0; first < block.depth; first += K_GROUP) {
      const int64_t n = block.depth - first < K_GROUP ? block.depth - first : (int64_t)K_GROUP, k = block.k + first;
      const WholeGroup *row[MR];
#pragma GCC unroll 8
      for (int m = 0; m < MR; m++) row[m] = a[m] + k / K_GROUP;
      __m256i acc[MR][2];
#pragma GCC unroll 8
      for (int m = 0; m < MR; m++) acc[m][0] = acc[m][1] = _mm256_setzero_si256();
      const int16_t *p = w.pairs[group][first / 2];
      for (int64_t at = 0; at < n; at += 2, p += 32) {
        const __m256i low = load_bytes((const uint8_t *)p), high = load_bytes((const uint8_t *)(p + 16));
#pragma GCC unroll 8
        for (int m = 0; m < MR; m++) {
          const __m256i x = pair_of(row[m]->number + at);
          add_products(acc[m][0], low, x), add_products(acc[m][1], high, x);
        }
      }
#pragma GCC unroll 2
      for (int i = 0; i < 2; i++) {
        const int column = 16 * group + 8 * i;
        const HalfScale scale = {load(w.by[first / K_GROUP] + column), ZERO ? load(w.more[first / K_GROUP] + column) : splat(0.f)};
#pragma GCC unroll 8
        for (int m = 0; m < MR; m++) add_scaled<ZERO>(acc[m][i], *row[m], scale, k, c + m * PANEL + column);
      }
    }
}

template <int FORMAT, int N> constexpr void take_halves(ExpertOps &ops) {
  ops.narrow[FORMAT - W_FP8][N] = half_pairs<FORMAT, N>;
  if constexpr (N > 1) take_halves<FORMAT, N - 1>(ops);
}
template <int N> constexpr void take_bytes(ExpertOps &ops) {
  ops.bytes[N] = byte_pairs<N>;
  if constexpr (N > 1) take_bytes<N - 1>(ops);
}
template <int N> constexpr void take_wide(ExpertOps &ops) {
  ops.wide_whole[0][N] = wide_pairs<false, N>, ops.wide_whole[1][N] = wide_pairs<true, N>;
  if constexpr (N > 1) take_wide<N - 1>(ops);
}
constexpr ExpertOps with_whole(ExpertOps ops) {
  const WidenFn widen[5] = {nullptr, widen_whole<W_INT8>, widen_whole<W_MXFP4>, widen_whole<W_INT4>, widen_whole<W_INT4_ZERO>};
  ops.whole = whole_numbers;
  take_halves<W_MXFP4, MAX_WHOLE_ROWS>(ops), take_halves<W_INT4, MAX_WHOLE_ROWS>(ops), take_halves<W_INT4_ZERO, MAX_WHOLE_ROWS>(ops);
  take_bytes<MAX_WHOLE_ROWS>(ops), take_wide<MAX_ROWS>(ops);
  for (int i = 0; i < 5; i++) ops.widen_whole[i] = widen[i];
  return ops;
}
