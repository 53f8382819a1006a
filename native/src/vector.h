// GCC's vector types, and what several kernels do with them: arithmetic in float32, whatever the instruction set. Included inside
// a namespace of one, after `enum { LANES = ... }` (numbers in a register).
typedef float vf __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t vh __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

#define INLINE static inline __attribute__((always_inline))

// 16 bits to 32 and back. The compiler makes several instructions of it where one is to be had.
#ifdef AVX512_FILE
static_assert(LANES == 16);
INLINE vi wide(vh x) { return (vi)_mm512_cvtepu16_epi32((__m256i)x); }
INLINE vh narrow(vi x) { return (vh)_mm512_cvtepi32_epi16((__m512i)x); }
#else
INLINE vi wide(vh x) { return __builtin_convertvector(x, vi); }
INLINE vh narrow(vi x) { return __builtin_convertvector(x, vh); }
#endif

INLINE vf splat(float x) { return x - (vf){}; }
INLINE vf float_of(bf16 x) {
  uint32_t bits = (uint32_t)x << 16;
  float y;
  memcpy(&y, &bits, 4);
  return splat(y);
}
INLINE vf value(const float *a) { return splat(*a); }
INLINE vf value(const bf16 *a) { return float_of(*a); }

// The bits of the second of a pair. Where it is read it is not known what it is: it stays in no register.
alignas(64) static const vi second_bits = (vi){} + (int32_t)0xffff0000;
INLINE const vi *second_mask() {
  const vi *at = &second_bits;
  asm("" : "+r"(at));
  return at;
}

// Round to nearest, ties to even; NaN stays NaN.
#ifdef AVX512_BF16_FILE  // one instruction, which takes denormal numbers for 0
INLINE vh bf16_of(vf x) { return (vh)_mm512_cvtneps_pbh((__m512)x); }
#else
INLINE vh bf16_of(vf x) {
  vi bits = (vi)x;
  vi rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  vi nan = (x != x);
  return narrow((rounded & ~nan) | (nan & 0x7fc0));
}
#endif

INLINE vf exp_of(vf x) {  // x is at most 88; below -87 the result is 0 but for rounding
  x = x < -87.f ? splat(-87.f) : x;
  x = x > 88.f ? splat(88.f) : x;
  const vf shift = splat(12582912.f);  // adding it rounds to a whole number
  vf n = x * 1.44269504f + shift - shift;
  vf r = x - n * 0.693359375f + n * 2.12194440e-4f;
  vf p = splat(1.f / 720);
  p = p * r + 1.f / 120;
  p = p * r + 1.f / 24;
  p = p * r + 1.f / 6;
  p = p * r + .5f;
  p = p * r + 1.f;
  p = p * r + 1.f;
  return (vf)((vi)p + (__builtin_convertvector(n, vi) << 23));
}

INLINE vf load(const float *p) { return *(const vf *)p; }
INLINE vf load(const bf16 *p) { return (vf)(wide(*(const vh *)p) << 16); }
INLINE float number(const float *p) { return *p; }
INLINE float number(const bf16 *p) { return float_of(*p)[0]; }
INLINE void store(float *p, vf x) { *(vf *)p = x; }
INLINE void store(bf16 *p, vf x) { *(vh *)p = bf16_of(x); }
INLINE void put(float *p, float x) { *p = x; }
INLINE void put(bf16 *p, float x) { *p = bf16_of(splat(x))[0]; }
// The weighted sum of n rows' numbers, added up in their order. Everything that sums experts' rows does it here: the same rows in
// the same order give the same bits, whichever ranks have computed them.
template <class Row> INLINE vf weighted(int64_t n, const float *weight, const Row &row) {
  vf sum = {};
  for (int64_t i = 0; i < n; i++) sum += row(i) * weight[i];
  return sum;
}
#ifdef AVX512_FILE
INLINE float total(vf x) { return _mm512_reduce_add_ps((__m512)x); }  // in the same order
#else
INLINE float total(vf x) {
  float part[LANES];
  *(vf *)part = x;
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; i++) part[i] += part[i + half];
  return part[0];
}
#endif

// Of two vectors, each number added to its neighbour: those of the first, then those of the second. UNIT: 1: within each 4 lanes; or 4 lanes
// at a time.
template <int UNIT> INLINE vf neighbours(vf a, vf b) {
  typedef int32_t mask __attribute__((vector_size(sizeof(vf))));
  enum { SPAN = UNIT == 1 ? 4 : LANES, HALF = SPAN / 2 };
  mask even, odd;
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++) {
    const int at = i % SPAN, from = at % HALF / UNIT * 2 * UNIT + at % UNIT;
    even[i] = (at < HALF ? 0 : LANES) + i / SPAN * SPAN + from, odd[i] = even[i] + UNIT;
  }
  return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, odd);
}

// The totals of LANES vectors, each in its lane: neighbours are added, until one vector is left.
INLINE vf totals(vf *sum) {
#pragma GCC unroll 8
  for (int i = 0; i < LANES / 2; i++) sum[i] = neighbours<1>(sum[2 * i], sum[2 * i + 1]);
#pragma GCC unroll 4
  for (int i = 0; i < LANES / 4; i++) sum[i] = neighbours<1>(sum[2 * i], sum[2 * i + 1]);
#pragma GCC unroll 2
  for (int i = 0; LANES > 8 && i < 2; i++) sum[i] = neighbours<4>(sum[2 * i], sum[2 * i + 1]);
  return neighbours<4>(sum[0], sum[1]);
}
