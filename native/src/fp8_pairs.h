// FP8 weights times float32. Included by experts_avx2.cpp and experts_avx512.cpp inside their namespaces, after spread.h. The same sums as by
// `tile`, as long as rows are below 2^67.
//
// With few rows a weight's exponent and mantissa are moved to where float32 has them, 2^-120 times what it is; those below the normal ones are
// so there too. The rows take half of that back, the sums the rest. What is no number has made its column's scale so (experts_pack.cpp).

constexpr float of_rows = 0x1p60f, of_sums = 0x1p60f;

enum { UNIT_BYTES = 4 * LANES, ALL_UNITS = 2 * PANEL / UNIT_BYTES };

// A unit of bytes, k and k + 1: LANES columns of one group of 16, and of the next.
struct Fp8Pairs {
  vi of[2];  // neither sign nor exponent is free of what does not belong there
  inline __attribute__((always_inline)) vf even(int i) const { return (vf)(of[i] << 16 & (int32_t)0x87f00000); }
  inline __attribute__((always_inline)) vf odd(int i) const { return (vf)(of[i] & (int32_t)0x87f00000); }
};

INLINE Fp8Pairs fp8_pairs(const uint8_t *p) {
#ifdef AVX512_FILE
  const __m512i x = _mm512_loadu_si512(p), zero = _mm512_setzero_si512();
  return {(vi)_mm512_srai_epi16(_mm512_unpacklo_epi8(zero, x), 4), (vi)_mm512_srai_epi16(_mm512_unpackhi_epi8(zero, x), 4)};
#else
  const __m256i x = _mm256_loadu_si256((const __m256i *)p), zero = _mm256_setzero_si256();
  return {(vi)_mm256_srai_epi16(_mm256_unpacklo_epi8(zero, x), 4), (vi)_mm256_srai_epi16(_mm256_unpackhi_epi8(zero, x), 4)};
#endif
}

// Where the columns of half `of` of a unit are.
INLINE constexpr int fp8_column(int unit, int of) { return unit / PARTS * 32 + of * 16 + unit % PARTS * LANES; }

template <class X, int MR> static void fp8_tile(const void *const *a, const Block &block, float *c) {
  enum { UNITS = LANES == 16 ? (MR <= 4 ? 2 : 1) : MR == 1 ? 4 : MR == 2 ? 2 : 1, NV = 2 * UNITS };
  const uint8_t *ahead = block.ahead, *weights = block.panel + PANEL * 4;
  alignas(64) float x[MR * K_BLOCK];
  for (int m = 0; m < MR; m++) {
    spread_row((const X *)a[m] + block.k, block.depth, x + m * K_BLOCK);
    for (int64_t k = 0; k < block.depth; k++) x[m * K_BLOCK + k] *= of_rows;
  }
  for (int unit = 0; unit < ALL_UNITS; unit += UNITS) {
    vf acc[MR][NV];
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++)
#pragma GCC unroll 8
      for (int j = 0; j < NV; j++) acc[m][j] = splat(0.f);
    const uint8_t *p = weights + UNIT_BYTES * unit;
    for (int64_t k = 0; k < block.depth; k += 2, p += 2 * PANEL) {
      if (!unit)
        for (int line = 0; line < block.lines; line++, ahead += 64) __builtin_prefetch(ahead, 0, 3);
#pragma GCC unroll 4
      for (int u = 0; u < UNITS; u++) {
        const Fp8Pairs w = fp8_pairs(p + UNIT_BYTES * u);
        if (MR <= 4) {
#pragma GCC unroll 2
          for (int odd = 0; odd < 2; odd++)
#pragma GCC unroll 2
            for (int of = 0; of < 2; of++) {
              const vf weight = odd ? w.odd(of) : w.even(of);
#pragma GCC unroll 4
              for (int m = 0; m < MR; m++) acc[m][2 * u + of] += splat(x[m * K_BLOCK + k + odd]) * weight;
            }
          continue;
        }
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; odd++) {
          const vf first = odd ? w.odd(0) : w.even(0), second = odd ? w.odd(1) : w.even(1);
#pragma GCC unroll 8
          for (int m = 0; m < MR; m++) {
            const vf value = splat(x[m * K_BLOCK + k + odd]);
            acc[m][2 * u] += value * first, acc[m][2 * u + 1] += value * second;
          }
          asm volatile("" ::: "memory");  // rows' numbers are read when they are multiplied: there is no register for them before
        }
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++)
#pragma GCC unroll 8
      for (int j = 0; j < NV; j++) {
        const int column = fp8_column(unit + j / 2, j % 2);
        float *at = c + m * PANEL + column;
        store(at, (block.k ? load(at) : (vf){}) + acc[m][j] * of_sums * load((const float *)block.panel + column));
      }
  }
}

template <class X> static void widen_fp8(const uint8_t *block, int64_t depth, uint8_t *out) {
  memcpy(out, block, PANEL * 4);
  block += PANEL * 4, out += PANEL * 4;
  for (int64_t k = 0; k < depth; k += 2, block += 2 * PANEL, out += 2 * PANEL * sizeof(X))
    for (int unit = 0; unit < ALL_UNITS; unit++) {
      const Fp8Pairs w = fp8_pairs(block + UNIT_BYTES * unit);
      for (int of = 0; of < 2; of++) {
        const int column = fp8_column(unit, of);
        const vi even = (vi)(w.even(of) * 0x1p120f), odd = (vi)(w.odd(of) * 0x1p120f);
        if (sizeof(X) == 4) store((float *)out + column, (vf)even), store((float *)out + PANEL + column, (vf)odd);
        else *(vi *)(out + 4 * column) = (vi)((vu)even >> 16) | odd;
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
