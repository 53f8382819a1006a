// Rows of bfloat16 as whole numbers, times weights of 8 bits, with AVX2: products of pairs of 16 bits, summed in 32. They are twice
// as many in a cycle as products in float32, with any number of rows. Included by experts_avx2.cpp inside its namespace.

// Of 32 numbers of a row: what they are multiplied by to become whole numbers of at most `largest`, and what those are multiplied by.
// Numbers among which one is none have such a scale.
struct Scaling {
  float by, scale;
  inline __attribute__((always_inline)) Scaling(const __m256i (&raw)[2], int largest) {
    const __m256i size = _mm256_set1_epi16(0x7fff), of_16 = _mm256_max_epu16(_mm256_and_si256(raw[0], size), _mm256_and_si256(raw[1], size));
    const __m128i of_8 = _mm_max_epu16(_mm256_castsi256_si128(of_16), _mm256_extracti128_si256(of_16, 1));
    const uint32_t bits = (uint16_t)~_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(of_8, _mm_set1_epi16(-1))), 0);
    const float most = _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128((int)(bits << 16))));
    const bool numbers = bits < 0x7f80;
    scale = !numbers ? __builtin_nanf("") : most > 1e-30f ? most / (float)largest : 0.f;
    by = most > 1e-30f && numbers ? (float)largest / most : 0.f;
  }
};

// The total of 8 numbers.
INLINE int32_t total_of(__m256i x) {
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}

// 32 numbers of a row as whole numbers of 16 bits times a scale, which loses at most 2^-16 of the largest of them.
struct WholeGroup {
  int16_t number[K_GROUP];
  float scale;
  int32_t sum;

  inline __attribute__((always_inline)) void set(const bf16 *x) {
    const __m256i raw[2] = {_mm256_loadu_si256((const __m256i *)x), _mm256_loadu_si256((const __m256i *)(x + 16))};
    const Scaling of(raw, 32767);
    const __m256 by = _mm256_set1_ps(of.by);
    __m256i total = _mm256_setzero_si256();
    for (int i = 0; i < 2; i++) {
      const __m256i zero = _mm256_setzero_si256(), low = _mm256_unpacklo_epi16(zero, raw[i]), high = _mm256_unpackhi_epi16(zero, raw[i]);
      const __m256i whole = _mm256_packs_epi32(_mm256_cvtps_epi32(_mm256_mul_ps((__m256)low, by)), _mm256_cvtps_epi32(_mm256_mul_ps((__m256)high, by)));
      _mm256_storeu_si256((__m256i *)(number + 16 * i), whole);
      total = _mm256_add_epi32(total, _mm256_madd_epi16(whole, _mm256_set1_epi16(1)));
    }
    scale = of.scale, sum = total_of(total);
  }
};
static_assert(sizeof(WholeGroup) == WHOLE_BYTES);

// Of rows that become Groups.
template <class Group> INLINE void groups_of_row(const bf16 *x, int64_t depth, Group *to) {
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

// c += sums of 8 columns and 32 k, scaled. Everything that multiplies whole numbers of 16 bits here ends so: how many rows there are does
// not change a bit.
INLINE void add_scaled(__m256i sums, const WholeGroup &row, vf scale, bool more, float *c) {
  store(c, (vf)_mm256_fmadd_ps((__m256)((vf)_mm256_cvtepi32_ps(sums) * splat(row.scale)), (__m256)scale, more ? _mm256_loadu_ps(c) : _mm256_setzero_ps()));
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
  enum { ABREAST = MR == 1 ? 8 : MR == 2 ? 4 : 2 };
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
        const vf scale = load((const float *)block.panel + byte_column(j + i));
#pragma GCC unroll 8
        for (int m = 0; m < MR; m++) add_scaled(acc[m][i], *row[m], scale, k, c + m * PANEL + byte_column(j + i));
      }
    }
  }
}

// Many rows: a block of weights is taken apart once for all of them. Scales for each 32 k first, then 16 columns after 16, pair of k after
// pair.
struct WideBlock {
  float by[K_BLOCK / K_GROUP][PANEL];
  int16_t pairs[4][K_BLOCK / 2][32];
};
static_assert(sizeof(WideBlock) <= WHOLE_BLOCK);

void widen_bytes(const uint8_t *block, int64_t depth, uint8_t *out) {
  WideBlock *to = (WideBlock *)out;
  for (int64_t group = 0; group * K_GROUP < depth; group++) memcpy(to->by[group], block, PANEL * 4);
  block += PANEL * 4;
  for (int64_t k = 0; k < depth; k += 2, block += 2 * PANEL)
    for (int j = 0; j < 8; j += 2) {
      __m256i w[2];
      pairs_of_bytes(block + 16 * j, w);
      for (int of = 0; of < 2; of++) _mm256_storeu_si256((__m256i *)(to->pairs[byte_column(j + of) / 16][k / 2] + byte_column(j) % 16 * 2), w[of]);
    }
}

// The registers of up to 6 rows' sums of 16 columns. They are named in what follows: left to itself the compiler keeps some in memory. The
// first products are the sums; two products before their two additions are faster than one after the other.
#define ROWS_1(DO, AT) DO(0, 0, 1, AT)
#define ROWS_2(DO, AT) ROWS_1(DO, AT) DO(1, 2, 3, AT)
#define ROWS_3(DO, AT) ROWS_2(DO, AT) DO(2, 4, 5, AT)
#define ROWS_4(DO, AT) ROWS_3(DO, AT) DO(3, 6, 7, AT)
#define ROWS_5(DO, AT) ROWS_4(DO, AT) DO(4, 8, 9, AT)
#define ROWS_6(DO, AT) ROWS_5(DO, AT) DO(5, 10, 11, AT)
#define REGISTER(I) "%%ymm" #I
#define WEIGHTS_AT(AT) "vmovdqu 64*" #AT "(%[p]),%%ymm14\n\tvmovdqu 64*" #AT "+32(%[p]),%%ymm15\n\t"
#define STORED_ROW(M, LOW, HIGH) "vmovups " REGISTER(LOW) ",256*" #M "(%[c])\n\tvmovups " REGISTER(HIGH) ",256*" #M "+32(%[c])\n\t"
#define ROW_POINTERS                                                                                                             \
  [x0] "r"(row[0]), [x1] "r"(row[MR > 1 ? 1 : 0]), [x2] "r"(row[MR > 2 ? 2 : 0]), [x3] "r"(row[MR > 3 ? 3 : 0]), [x4] "r"(row[MR > 4 ? 4 : 0]), \
      [x5] "r"(row[MR > 5 ? 5 : 0])
#define REGISTERS                                                                                                                          \
  "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", \
      "xmm15"
#define EACH_MR(STEPS) STEPS(1) STEPS(2) STEPS(3) STEPS(4) STEPS(5) STEPS(6)

#define FIRST_PAIR(M, LOW, HIGH, _) \
  "vpbroadcastd (%[x" #M "]),%%ymm12\n\tvpmaddwd %%ymm14,%%ymm12," REGISTER(LOW) "\n\tvpmaddwd %%ymm15,%%ymm12," REGISTER(HIGH) "\n\t"
#define NEXT_PAIR(M, LOW, HIGH, AT)                                                                                            \
  "vpbroadcastd 4*" #AT "(%[x" #M "],%[k]),%%ymm12\n\tvpmaddwd %%ymm14,%%ymm12,%%ymm13\n\tvpmaddwd %%ymm15,%%ymm12,%%ymm12\n\t"     \
  "vpaddd %%ymm13," REGISTER(LOW) "," REGISTER(LOW) "\n\tvpaddd %%ymm12," REGISTER(HIGH) "," REGISTER(HIGH) "\n\t"
#define PAIR_AT(N, DO, AT) WEIGHTS_AT(AT) ROWS_##N(DO, AT)
#define SCALED(SUM, BY, C)                                                                                              \
  "vcvtdq2ps " REGISTER(SUM) "," REGISTER(SUM) "\n\tvmulps %%ymm12," REGISTER(SUM) "," REGISTER(SUM) "\n\tvfmadd213ps " C "," REGISTER(BY) \
  "," REGISTER(SUM) "\n\t"
#define ADD_PAIRS(M, LOW, HIGH, _) \
  "vbroadcastss 64(%[x" #M "]),%%ymm12\n\t" SCALED(LOW, 14, "256*" #M "(%[c])") SCALED(HIGH, 15, "256*" #M "+32(%[c])") STORED_ROW(M, LOW, HIGH)
#define PAIRS(N)                                                                                                                    \
  if constexpr (MR == N)                                                                                                            \
    asm volatile(PAIR_AT(N, FIRST_PAIR, 0) "1:\n\t" PAIR_AT(N, NEXT_PAIR, 1) PAIR_AT(N, NEXT_PAIR, 2) PAIR_AT(N, NEXT_PAIR, 3)           \
                 "add $12,%[k]\n\tadd $192,%[p]\n\tcmp $60,%[k]\n\tjne 1b\n\tvmovups (%[by]),%%ymm14\n\tvmovups 32(%[by]),%%ymm15\n\t"    \
                 ROWS_##N(ADD_PAIRS, 0)                                                                                             \
                 : [k] "+r"(k), [p] "+r"(p) : ROW_POINTERS, [by] "r"(by), [c] "r"(c) : REGISTERS);
// c[row][16 columns] += 32 numbers of the rows times pairs of weights from p on, scaled as add_scaled does it. Of rows or weights the last
// numbers are zeros, so that all pairs are taken. by: of the columns.
template <int MR> INLINE void add_pairs(const WholeGroup *const (&row)[MR], const int16_t *p, const float *by, float *c) {
  static_assert(MR <= 6 && K_GROUP == 32 && PANEL == 64 && offsetof(WholeGroup, scale) == 64);
  int64_t k = 0;
  EACH_MR(PAIRS)
}

// What is to come nearer beside 32 k of 16 columns, from `next` on. In one burst lines on their way would hold up what is multiplied.
INLINE const uint8_t *bring_share(const Block &block, const uint8_t *next) {
  const uint8_t *last = block.ahead + block.depth * 32 * block.lines;
  for (int line = 0; line < 4 * block.lines && next < last; line++, next += 64) __builtin_prefetch(next, 0, 2);
  return next;
}

template <int MR> void wide_pairs(const void *const *av, const Block &block, float *c) {
  const WholeGroup *const *a = (const WholeGroup *const *)av;
  const WideBlock &w = *(const WideBlock *)block.panel;
  const uint8_t *next = block.ahead;
  if (block.k == 0) memset(c, 0, MR * PANEL * sizeof(float));
  for (int column = 0; column < PANEL; column += 16)
    for (int64_t first = 0; first < block.depth; first += K_GROUP) {
      next = bring_share(block, next);
      const WholeGroup *row[MR];
#pragma GCC unroll 8
      for (int m = 0; m < MR; m++) row[m] = a[m] + (block.k + first) / K_GROUP;
      add_pairs<MR>(row, w.pairs[column / 16][first / 2], w.by[first / K_GROUP] + column, c + column);
    }
}
