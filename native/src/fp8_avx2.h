// FP8 weights with AVX2: 32 of them at a time become bfloat16 by a look-up of their upper halves, unless there is one among them that is not
// normal (of a thousand groups a few). Included by experts_avx2.cpp inside its namespace, after spread_avx2.h. The same sums as by `tile`.

INLINE vi both(vf even, vf odd) { return (vi)((vu)even >> 16) | ((vi)odd & (int32_t)0xffff0000); }

// With zeros, numbers below the normal ones, or what is no number.
static __attribute__((noinline, cold)) void any_fp8_pairs(const uint8_t *p, vi *w) {
  const __m256i x = _mm256_loadu_si256((const __m256i *)p);
  for (int of = 0; of < 2; of++) w[of] = both(top_value<W_FP8>(top_bytes(x, of * 8)), top_value<W_FP8>(top_bytes(x, of * 8 + 1)));
}

// 32 bytes as pairs of bfloat16, k and k + 1: 8 columns of one group of 16, then of the next.
INLINE void fp8_pairs(const uint8_t *p, vi *w) {
  const __m256i x = _mm256_loadu_si256((const __m256i *)p);
  // From the least normal number to the largest: -128 to -10.
  const __m256i place = _mm256_add_epi8(_mm256_and_si256(x, _mm256_set1_epi8(0x7f)), _mm256_set1_epi8(0x78));
  if (__builtin_expect(_mm256_movemask_epi8(_mm256_cmpgt_epi8(place, _mm256_set1_epi8(-10))), 0)) return any_fp8_pairs(p, w);
  // Sign and the upper three bits of the exponent, whose bias is 120 more.
  const __m256i upper = _mm256_broadcastsi128_si256(_mm_setr_epi8(60, 61, 62, 63, 64, 65, 66, 67, -68, -67, -66, -65, -64, -63, -62, -61));
  const __m256i high = _mm256_shuffle_epi8(upper, _mm256_and_si256(_mm256_srli_epi16(x, 4), _mm256_set1_epi8(15)));
  const __m256i low = _mm256_and_si256(_mm256_slli_epi16(x, 4), _mm256_set1_epi8((char)0xf0));
  w[0] = (vi)_mm256_unpacklo_epi8(low, high), w[1] = (vi)_mm256_unpackhi_epi8(low, high);
}

// Where the columns of half `of` of 32 bytes are, of the 128 of a pair of k.
INLINE constexpr int fp8_column(int unit, int of) { return unit / 2 * 32 + of * 16 + unit % 2 * 8; }

template <class X, int MR> static void fp8_tile(const void *const *a, const Block &block, float *c) {
  enum { UNITS = MR == 1 ? 4 : MR == 2 ? 2 : 1, NV = 2 * UNITS };
  const uint8_t *ahead = block.ahead, *weights = block.panel + PANEL * 4;
  const vi *mask = second_mask();
  alignas(64) float x[MR * K_BLOCK];
  for (int m = 0; m < MR; m++) spread_row((const X *)a[m] + block.k, block.depth, x + m * K_BLOCK);
  for (int unit = 0; unit < 4; unit += UNITS) {
    vf acc[MR][NV] = {};
    const uint8_t *p = weights + 32 * unit;
    for (int64_t k = 0; k < block.depth; k += 2, p += 2 * PANEL) {
      if (!unit)
        for (int line = 0; line < block.lines; line++, ahead += 64) __builtin_prefetch(ahead, 0, 3);
      vi w[NV];
#pragma GCC unroll 4
      for (int u = 0; u < UNITS; u++) fp8_pairs(p + 32 * u, w + 2 * u);
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; odd++)
#pragma GCC unroll 8
        for (int m = 0; m < MR; m++) {
          const vf value = splat(x[m * K_BLOCK + k + odd]);
#pragma GCC unroll 8
          for (int j = 0; j < NV; j++) acc[m][j] += value * (odd ? (vf)(w[j] & *mask) : (vf)(w[j] << 16));
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++)
#pragma GCC unroll 8
      for (int j = 0; j < NV; j++) {
        const int column = fp8_column(unit + j / 2, j % 2);
        float *at = c + m * PANEL + column;
        store(at, (block.k ? load(at) : (vf){}) + acc[m][j] * load((const float *)block.panel + column));
      }
  }
}

template <class X> static void widen_fp8(const uint8_t *block, int64_t depth, uint8_t *out) {
  memcpy(out, block, PANEL * 4);
  block += PANEL * 4, out += PANEL * 4;
  for (int64_t k = 0; k < depth; k += 2, block += 2 * PANEL, out += 2 * PANEL * sizeof(X))
    for (int unit = 0; unit < 4; unit++) {
      vi w[2];
      fp8_pairs(block + 32 * unit, w);
      for (int of = 0; of < 2; of++) {
        const int column = fp8_column(unit, of);
        if (sizeof(X) == 4) store((float *)out + column, (vf)(w[of] << 16)), store((float *)out + PANEL + column, (vf)(w[of] & (int32_t)0xffff0000));
        else *(vi *)(out + 4 * column) = w[of];
      }
    }
}

template <class X, int N> static constexpr void take_fp8(TileFn (&tiles)[MAX_NARROW_ROWS + 1]) {
  tiles[N] = fp8_tile<X, N>;
  if constexpr (N > 1) take_fp8<X, N - 1>(tiles);
}
template <class X> static constexpr ExpertOps with_fp8(ExpertOps ops) {
  take_fp8<X, MAX_NARROW_ROWS>(ops.narrow[0]);
  ops.widen[0] = widen_fp8<X>;
  return ops;
}
