// Rows of bfloat16 as whole numbers of 8 bits, times weights of 4 bits, with AVX2: four products of bytes to a number, whose sums of 32 have room
// in 16 bits. They are nearly twice as many in a cycle as those of whole_avx2.h. Included by experts_avx2.cpp inside its namespace, behind that.

// Codes of MXFP4 are taken for twice what they are, and so much more, not to be negative.
enum { CODES_ABOVE = 12 };

// 32 numbers of a row as whole numbers of 8 bits times a scale, which loses at most 2^-8 of the largest of them: weights of 4 bits have lost
// more. sum: theirs, times the scale. above: -CODES_ABOVE times the numbers of each half of a quad, as sums of MXFP4 begin: they may pass 16 bits
// on their way, but do not end there.
struct QuadGroup {
  int8_t number[K_GROUP];  // of each 8 those at 0, 4, 1, 5, 2, 6, 3, 7, as codes lie when they are taken apart
  float scale, sum;
  int32_t above;
  uint8_t rest[WHOLE_BYTES - K_GROUP - 12];

  inline __attribute__((always_inline)) void set(const bf16 *x) {
    const __m256i raw[2] = {_mm256_loadu_si256((const __m256i *)x), _mm256_loadu_si256((const __m256i *)(x + 16))};
    const Scaling of(raw, 127);
    const __m256 by = _mm256_set1_ps(of.by);
    __m256i whole[4];
    for (int i = 0; i < 4; i++)
      whole[i] = _mm256_cvtps_epi32(_mm256_mul_ps((__m256)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(x + 8 * i))), 16), by));
    const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(whole[0], whole[1]), _mm256_packs_epi32(whole[2], whole[3]));  // first halves, then second
    const __m128i first = _mm256_castsi256_si128(bytes), second = _mm256_extracti128_si256(bytes, 1);
    _mm_storeu_si128((__m128i *)number, _mm_unpacklo_epi8(first, second));
    _mm_storeu_si128((__m128i *)(number + 16), _mm_unpackhi_epi8(first, second));
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), _mm256_loadu_si256((const __m256i *)number));
    __m128i halves = _mm_add_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    halves = _mm_add_epi16(halves, _mm_shuffle_epi32(halves, 0x4e)), halves = _mm_add_epi16(halves, _mm_shuffle_epi32(halves, 0xb1));
    scale = of.scale, sum = scale * (float)_mm_cvtsi128_si32(_mm_madd_epi16(halves, _mm_set1_epi16(1)));
    above = _mm_cvtsi128_si32(_mm_mullo_epi16(halves, _mm_set1_epi16(-CODES_ABOVE)));
  }
};
static_assert(sizeof(QuadGroup) == WHOLE_BYTES);

void whole_numbers(const void *row, int64_t depth, int64_t format, uint8_t *out) {
  if (format >= W_MXFP4) groups_of_row((const bf16 *)row, depth, (QuadGroup *)out);
  else groups_of_row((const bf16 *)row, depth, (WholeGroup *)out);
}

// Of 8 columns and 32 k: what sums of codes as they are are multiplied by, and what the row's sum is.
template <int FORMAT> INLINE HalfScale quad_scale(const uint8_t *p) {
  if (FORMAT == W_MXFP4) return {load((const bf16 *)p) * .5f, splat(0.f)};
  const vf by = (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
  if (FORMAT == W_INT4) return {by, by * -8.f};
  return {by, -by * ((vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + GROUP_SCALES))) + 8.f)};
}

// c += sums of 8 columns and 32 k, scaled. Everything that multiplies whole numbers of 8 bits here ends so: how many rows there are does not
// change a bit.
template <int FORMAT> INLINE void add_quads_scaled(__m256i sums, const QuadGroup &row, const HalfScale &scale, bool more, float *c) {
  const vf product = (vf)_mm256_cvtepi32_ps(_mm256_madd_epi16(sums, _mm256_set1_epi16(1))) * splat(row.scale);
  const __m256 sum = _mm256_fmadd_ps((__m256)product, (__m256)scale.by, more ? _mm256_loadu_ps(c) : _mm256_setzero_ps());
  store(c, FORMAT == W_MXFP4 ? (vf)sum : (vf)_mm256_fmadd_ps((__m256)scale.more, _mm256_set1_ps(row.sum), sum));
}

INLINE __m256i quad_of(const int8_t *p) { return _mm256_set1_epi32(*(const int __attribute__((may_alias)) *)p); }

// sum += products of bytes, two to a number of 16 bits.
INLINE void add_quads(__m256i &sum, __m256i w, __m256i x) {
  __m256i product;
  asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sum), "=&x"(product) : "x"(w), "x"(x));
}

// Codes of 8 k and 8 columns as bytes: of four k, then of the others.
template <int FORMAT> INLINE void quads_of_codes(const uint8_t *p, __m256i (&w)[2]) {
  const __m256i codes = load_bytes(p), nibble = _mm256_set1_epi8(15);
  w[0] = _mm256_and_si256(codes, nibble), w[1] = _mm256_and_si256(_mm256_srli_epi16(codes, 4), nibble);
  if (FORMAT != W_MXFP4) return;
  const __m256i e2m1 = _mm256_broadcastsi128_si256(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
  w[0] = _mm256_shuffle_epi8(e2m1, w[0]), w[1] = _mm256_shuffle_epi8(e2m1, w[1]);
}

// Few rows: codes are taken apart in registers.
template <int FORMAT, int MR> void half_quads(const void *const *av, const Block &block, float *c) {
  enum { ABREAST = MR == 1 ? 4 : 2 };
  const QuadGroup *const *a = (const QuadGroup *const *)av;
  const uint8_t *p = block.panel + half_scales(FORMAT), *next = block.ahead, *scales = block.panel;
  const int64_t lines = block.lines * ABREAST / 2;
  for (int64_t first = 0; first < block.depth; first += K_GROUP, scales += PANEL * 2) {
    const int64_t n = block.depth - first < K_GROUP ? block.depth - first : (int64_t)K_GROUP, k = block.k + first;
    const int steps = (int)(n + HALF_STEP - 1) / HALF_STEP;
    const QuadGroup *row[MR];
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++) row[m] = a[m] + k / K_GROUP;
    for (int j = 0; j < 8; j += ABREAST) {
      __m256i acc[MR][ABREAST];
#pragma GCC unroll 8
      for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
        for (int i = 0; i < ABREAST; i++) acc[m][i] = FORMAT == W_MXFP4 ? _mm256_set1_epi32(row[m]->above) : _mm256_setzero_si256();
      for (int step = 0; step < steps; step++) {
        for (int64_t line = 0; line < lines; line++, next += 64) _mm_prefetch((const char *)next, _MM_HINT_T0);
        __m256i w[ABREAST][2];
#pragma GCC unroll 4
        for (int i = 0; i < ABREAST; i++) quads_of_codes<FORMAT>(p + step * HALF_STEP_BYTES + 32 * (j + i), w[i]);
#pragma GCC unroll 2
        for (int q = 0; q < 2; q++)
#pragma GCC unroll 8
          for (int m = 0; m < MR; m++) {
            const __m256i x = quad_of(row[m]->number + 8 * step + 4 * q);
#pragma GCC unroll 4
            for (int i = 0; i < ABREAST; i++) add_quads(acc[m][i], w[i][q], x);
          }
      }
#pragma GCC unroll 4
      for (int i = 0; i < ABREAST; i++) {
        const HalfScale scale = quad_scale<FORMAT>(scales + 16 * (j + i));
#pragma GCC unroll 8
        for (int m = 0; m < MR; m++) add_quads_scaled<FORMAT>(acc[m][i], *row[m], scale, k, c + m * PANEL + 8 * (j + i));
      }
    }
    p += steps * HALF_STEP_BYTES;
  }
}

// Many rows: a block of weights is taken apart once for all of them.
template <int FORMAT> void widen_quads(const uint8_t *block, int64_t depth, uint8_t *out) {
  QuadBlock *to = (QuadBlock *)out;
  const uint8_t *p = block + half_scales(FORMAT);
  for (int64_t first = 0; first < depth; first += K_GROUP, block += PANEL * 2)
    for (int j = 0; j < 8; j++) {
      const HalfScale scale = quad_scale<FORMAT>(block + 16 * j);
      store(to->by[first / K_GROUP] + 8 * j, scale.by), store(to->more[first / K_GROUP] + 8 * j, scale.more);
    }
  for (int64_t k = 0; k < depth; k += HALF_STEP, p += HALF_STEP_BYTES)
    for (int j = 0; j < 8; j++) {
      __m256i w[2];
      quads_of_codes<FORMAT>(p + 32 * j, w);
      for (int q = 0; q < 2; q++) _mm256_storeu_si256((__m256i *)(to->quads[j / 2][k / 4 + q] + j % 2 * 32), w[q]);
    }
}

#define FIRST_QUAD(M, LOW, HIGH, _) \
  "vpbroadcastd (%[x" #M "]),%%ymm12\n\tvpmaddubsw %%ymm12,%%ymm14," REGISTER(LOW) "\n\tvpmaddubsw %%ymm12,%%ymm15," REGISTER(HIGH) "\n\t"
#define NEXT_QUAD(M, LOW, HIGH, AT)                                                                                          \
  "vpbroadcastd 4*" #AT "(%[x" #M "]),%%ymm12\n\tvpmaddubsw %%ymm12,%%ymm14,%%ymm13\n\tvpmaddubsw %%ymm12,%%ymm15,%%ymm12\n\t"    \
  "vpaddw %%ymm13," REGISTER(LOW) "," REGISTER(LOW) "\n\tvpaddw %%ymm12," REGISTER(HIGH) "," REGISTER(HIGH) "\n\t"
#define QUAD_AT(N, AT) WEIGHTS_AT(AT) ROWS_##N(NEXT_QUAD, AT)
#define QUADS_SCALED(M, LOW, HIGH)                                                                                                   \
  "vbroadcastss 32(%[x" #M "]),%%ymm12\n\tvpmaddwd %[one]," REGISTER(LOW) "," REGISTER(LOW) "\n\tvpmaddwd %[one]," REGISTER(HIGH) ","        \
  REGISTER(HIGH) "\n\t" SCALED(LOW, 14, "256*" #M "(%[c])") SCALED(HIGH, 15, "256*" #M "+32(%[c])")
#define ADD_QUADS(M, LOW, HIGH, _)                                                                                                   \
  QUADS_SCALED(M, LOW, HIGH) "vbroadcastss 36(%[x" #M "]),%%ymm13\n\tvfmadd231ps (%[more]),%%ymm13," REGISTER(LOW)                         \
  "\n\tvfmadd231ps 32(%[more]),%%ymm13," REGISTER(HIGH) "\n\t" STORED_ROW(M, LOW, HIGH)
#define ABOVE_QUADS(M, LOW, HIGH, _) "vpbroadcastd 40(%[x" #M "])," REGISTER(LOW) "\n\tvmovdqa " REGISTER(LOW) "," REGISTER(HIGH) "\n\t"
#define ADD_E2M1(M, LOW, HIGH, _) QUADS_SCALED(M, LOW, HIGH) STORED_ROW(M, LOW, HIGH)
#define QUADS_OF(N, FIRST, ADD)                                                                                                      \
  if constexpr (MR == N)                                                                                                             \
    asm volatile(FIRST QUAD_AT(N, 1) QUAD_AT(N, 2) QUAD_AT(N, 3) QUAD_AT(N, 4) QUAD_AT(N, 5) QUAD_AT(N, 6) QUAD_AT(N, 7)                  \
                 "vmovups (%[by]),%%ymm14\n\tvmovups 32(%[by]),%%ymm15\n\t" ROWS_##N(ADD, 0)                                             \
                 : : ROW_POINTERS, [p] "r"(p), [by] "r"(by), [more] "r"(more), [c] "r"(c), [one] "m"(ones) : REGISTERS);
#define QUADS(N) QUADS_OF(N, WEIGHTS_AT(0) ROWS_##N(FIRST_QUAD, 0), ADD_QUADS)
#define E2M1_QUADS(N) QUADS_OF(N, ROWS_##N(ABOVE_QUADS, 0) QUAD_AT(N, 0), ADD_E2M1)
alignas(32) static const int16_t all_ones[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
// c[row][16 columns] += 32 numbers of the rows times codes from p on, scaled as add_quads_scaled does it. The last numbers of a row are
// zeros, so that all codes are taken. by, more: of the columns.
template <int FORMAT, int MR> INLINE void add_quads_of(const QuadGroup *const (&row)[MR], const uint8_t *p, const float *by, const float *more, float *c) {
  static_assert(offsetof(QuadGroup, scale) == 32 && offsetof(QuadGroup, sum) == 36 && offsetof(QuadGroup, above) == 40);
  const __m256i &ones = *(const __m256i *)all_ones;
  if constexpr (FORMAT == W_MXFP4) {
    EACH_MR(E2M1_QUADS)
  } else {
    EACH_MR(QUADS)
  }
}

template <int FORMAT, int MR> void wide_quads(const void *const *av, const Block &block, float *c) {
  const QuadGroup *const *a = (const QuadGroup *const *)av;
  const QuadBlock &w = *(const QuadBlock *)block.panel;
  const uint8_t *next = block.ahead;
  if (block.k == 0) memset(c, 0, MR * PANEL * sizeof(float));
  for (int column = 0; column < PANEL; column += 16)
    for (int64_t first = 0; first < block.depth; first += K_GROUP) {
      next = bring_share(block, next);
      const QuadGroup *row[MR];
#pragma GCC unroll 8
      for (int m = 0; m < MR; m++) row[m] = a[m] + (block.k + first) / K_GROUP;
      const int64_t group = first / K_GROUP;
      add_quads_of<FORMAT, MR>(row, w.quads[column / 16][first / 4], w.by[group] + column, w.more[group] + column, c + column);
    }
}

template <int N> constexpr void take_whole(ExpertOps &ops) {
  ops.bytes[N] = byte_pairs<N>, ops.narrow[W_MXFP4 - W_FP8][N] = half_quads<W_MXFP4, N>;
  ops.narrow[W_INT4 - W_FP8][N] = half_quads<W_INT4, N>, ops.narrow[W_INT4_ZERO - W_FP8][N] = half_quads<W_INT4_ZERO, N>;
  if constexpr (N > 1) take_whole<N - 1>(ops);
}
constexpr TileFn of_pairs[MAX_ROWS + 1] = {nullptr, wide_pairs<1>, wide_pairs<2>, wide_pairs<3>, wide_pairs<4>, wide_pairs<5>, wide_pairs<6>};
template <int F>
constexpr TileFn of_quads[MAX_ROWS + 1] = {nullptr, wide_quads<F, 1>, wide_quads<F, 2>, wide_quads<F, 3>, wide_quads<F, 4>, wide_quads<F, 5>, wide_quads<F, 6>};
constexpr ExpertOps with_whole(ExpertOps ops) {
  const WidenFn widen[5] = {nullptr, widen_bytes, widen_quads<W_MXFP4>, widen_quads<W_INT4>, widen_quads<W_INT4_ZERO>};
  const TileFn *const wide[5] = {nullptr, of_pairs, of_quads<W_MXFP4>, of_quads<W_INT4>, of_quads<W_INT4>};
  ops.whole = whole_numbers;
  take_whole<MAX_WHOLE_ROWS>(ops);
  for (int i = 1; i < 5; i++) ops.widen_whole[i] = widen[i], ops.wide_whole[i] = wide[i];
  return ops;
}
