// Any number of rows of bfloat16 as whole numbers of two bytes, times weights of 8 and 4 bits that are taken apart once for all of them: an
// instruction has 64 products of bytes, so 32 of such numbers, where one of float32 has 16. Included by experts_avx512bf16.cpp inside its
// namespace. Sums are those of its few rows, bit by bit. Weights are QuadBlocks of bytes that are 128 larger; those of 4 bits 16 times as large.

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
