// Products of bfloat16 pairs, for the files compiled for AVX512-BF16. Included inside their namespace, after <immintrin.h>.

// The first `count` of 32 numbers; the others are zero and their memory is not touched.
INLINE __m512bh some_pairs(const bf16 *p, int64_t count) {
  if (count >= 32) return (__m512bh)_mm512_loadu_si512(p);
  return (__m512bh)_mm512_maskz_loadu_epi16(count <= 0 ? 0 : (1u << count) - 1, p);
}

// The sums of 16 registers' numbers, in order.
INLINE __m512 sum_each(const __m512 *x) {
  __m512 a[8], b[4];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) a[i] = _mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]) + _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    __m512d low = (__m512d)a[2 * i], high = (__m512d)a[2 * i + 1];
    b[i] = (__m512)_mm512_unpacklo_pd(low, high) + (__m512)_mm512_unpackhi_pd(low, high);
  }
  __m512 c = _mm512_shuffle_f32x4(b[0], b[1], 0x88) + _mm512_shuffle_f32x4(b[0], b[1], 0xdd);
  __m512 d = _mm512_shuffle_f32x4(b[2], b[3], 0x88) + _mm512_shuffle_f32x4(b[2], b[3], 0xdd);
  return _mm512_shuffle_f32x4(c, d, 0x88) + _mm512_shuffle_f32x4(c, d, 0xdd);
}
