// The operations of quantize.h, whatever the instruction set. Included inside a namespace of one, after `enum { LANES = ... }`.
#include "vector.h"

typedef uint8_t vb __attribute__((vector_size(LANES), aligned(1), may_alias));

#ifdef AVX512_FILE
INLINE vb bytes_of(vi x) { return (vb)_mm512_cvtepi32_epi8((__m512i)x); }
INLINE int32_t largest_of(vi x) { return _mm512_reduce_max_epi32((__m512i)x); }
#else  // by way of 16 bits: in one step the compiler takes number by number
INLINE vb bytes_of(vi x) { return __builtin_convertvector(__builtin_convertvector(x, vh), vb); }
INLINE int32_t largest_of(vi x) {
  int32_t most = x[0];
  for (int i = 1; i < LANES; i++) most = x[i] > most ? x[i] : most;
  return most;
}
#endif

// To the nearest whole number, ties to even: its low byte is in the low byte of the sum.
INLINE vi whole(vf x) { return (vi)(x + splat(12582912.f)) & 0xff; }

// As torch does: nearest, ties to even; what is below the smallest normal number is added to a number whose last bit is theirs.
INLINE vi e4m3(vf x) {
  vi bits = (vi)x, sign = bits & (int32_t)0x80000000;
  bits ^= sign;
  vi small = (vi)((vf)bits + splat(16384.f)) - 0x46800000;
  vi normal = (bits + (int32_t)0xc407ffff + ((bits >> 20) & 1)) >> 20;
  vi y = bits < (121 << 23) ? small : normal;
  y = bits >= (1087 << 20) ? (vi)splat(0.f) + 0x7f : y;
  return (y | ((sign >> 24) & 0x80)) & 0xff;
}

// ---- 4 bits: as many groups at once as a register has lanes, one in each ----

#ifdef AVX512_FILE  // the compiler makes two instructions of a comparison
INLINE vf at_most(vf x, float y) { return (vf)_mm512_min_ps((__m512)splat(y), (__m512)x); }
INLINE vf at_least(vf x, float y) { return (vf)_mm512_max_ps((__m512)splat(y), (__m512)x); }
#else
INLINE vf at_most(vf x, float y) { return x > y ? splat(y) : x; }
INLINE vf at_least(vf x, float y) { return x < y ? splat(y) : x; }
#endif

// As float16 and back; x is finite, or no number. Below its normal numbers it has multiples of 2^-24.
INLINE vf half_rounded(vf x) {
  const vf size = (vf)((vi)x & 0x7fffffff), shift = splat(.5f);
  const vi bits = (vi)size;
  vf y = (vf)((bits + 0xfff + (bits >> 13 & 1)) & ~0x1fff);
  y = y > 65504.f ? splat(65504.f) : y;
  y = size < 0x1p-14f ? (size + shift) - shift : y;
  return (vf)((vi)y | ((vi)x & (int32_t)0x80000000));
}
INLINE vi half_bits(vf x) {  // of numbers that half_rounded gave
  const vf size = (vf)((vi)x & 0x7fffffff);
  const vi y = size < 0x1p-14f ? __builtin_convertvector(size * 0x1p24f, vi) : ((vi)size >> 13) - (112 << 10);
  return (x == x ? y : vi{} + 0x7e00) | ((vi)x >> 16 & 0x8000);
}

// The power of two that is no smaller, of normal numbers above 0.
INLINE vf power_above(vf x) { return x == x ? (vf)(((vi)x + 0x7fffff) & 0x7f800000) : x; }

// Row g of a square, in lanes, becomes lane g of all rows: rows i and i + LANES / 2 are interleaved, as often as there are halves.
INLINE void transpose(vi (&row)[LANES]) {
  vi low, high, next[LANES];
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++) low[i] = i / 2 + i % 2 * LANES, high[i] = low[i] + LANES / 2;
  for (int turn = 1; turn < LANES; turn *= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < LANES / 2; i++) {
      next[2 * i] = __builtin_shuffle(row[i], row[i + LANES / 2], low);
      next[2 * i + 1] = __builtin_shuffle(row[i], row[i + LANES / 2], high);
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) row[i] = next[i];
  }
}

// Number k of LANES groups, which follow each other.
INLINE void put_words(int word, vi of, const float *, vf *x) { x[word] = (vf)of; }
INLINE void put_words(int word, vi of, const bf16 *, vf *x) { x[2 * word] = (vf)(of << 16), x[2 * word + 1] = (vf)(of & (int32_t)0xffff0000); }
template <class T> INLINE void groups_in_lanes(const T *at, vf *x) {
  const int words = HALF_INPUTS * sizeof(T) / 4;
  for (int first = 0; first < words; first += LANES) {
    vi row[LANES];
#pragma GCC unroll 16
    for (int g = 0; g < LANES; g++) row[g] = *(const vi *)((const uint8_t *)(at + g * HALF_INPUTS) + first * 4);
    transpose(row);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) put_words(first + i, row[i], at, x);
  }
}

// What each format has: scales that are tried, the number that stands for another one (both in units of the scale), and its code in
// the lowest 4 bits. fine: all scales are normal numbers of float16 and below its largest one, or no number.
struct Int4 {
  enum { TRIED = 6 };
  INLINE void scales(vf most, vf *scale) {
    const float part[3] = {1.f, .93f, .86f};
    const vf size = (vf)((vi)most & 0x7fffffff);
    for (int i = 0; i < TRIED; i++) scale[i] = half_rounded((i < 3 ? most / -8.f : size / 7.f) * part[i % 3]);
  }
  enum { ROUNDS = 12582912 };  // adding it rounds to a whole number, ties to even, which is in the lowest bits
  INLINE vf within(vf exact) { return at_least(at_most(exact, 7.f), -8.f); }
  // In units of fine scales numbers are within +-8, 8.61, 9.31, 7, 7.53 and 8.14, and 2^-11 of that. What would be rounded to less than
  // -8 or more than 7 is kept within.
  INLINE bool fine(const vf *scale) { return largest_of(-((vf)((vi)scale[2] & 0x7fffffff) < 0x1p-14f) | -(scale[3] >= 65504.f)) == 0; }
  template <int I, bool FINE> INLINE vf nearest(vf exact) {
    if (!FINE || I != 3) exact = at_most(exact, 7.f);
    if (!FINE || I == 1 || I == 2) exact = at_least(exact, -8.f);
    return (exact + splat(ROUNDS)) - splat(ROUNDS);
  }
  INLINE vi code(vf exact) { return (vi)(within(exact) + splat(ROUNDS + 8)); }
  INLINE vi bits(vf scale) { return half_bits(scale); }
};

struct Mxfp4 {
  enum { TRIED = 2 };
  INLINE void scales(vf most, vf *scale) {
    vf least = (vf)((vi)most & 0x7fffffff) / 6.f;
    least = least < 0x1p-126f ? splat(0x1p-126f) : least;
    scale[0] = power_above(least), scale[1] = scale[0] * .5f;
  }
  INLINE vi place(vf size) {  // a comparison that is true is -1
    return -((size > .25f) + (size > .75f) + (size > 1.25f) + (size > 1.75f) + (size > 2.5f) + (size > 3.5f) + (size > 5.f));
  }
  INLINE bool fine(const vf *) { return true; }
  template <int, bool> INLINE vf nearest(vf exact) {
    const vi at = place((vf)((vi)exact & 0x7fffffff));
    const vf back = __builtin_convertvector(at < 4 ? at : at < 6 ? 2 * at - 4 : 4 * at - 16, vf) * .5f;
    return exact < 0.f ? -back : back;
  }
  INLINE vi code(vf exact) { return place((vf)((vi)exact & 0x7fffffff)) | (exact < 0.f & 8); }
  INLINE vi bits(vf scale) { return (vi)scale >> 16 & 0xffff; }
};

// What each scale loses: the sum over a group of squares.
template <class Form, bool FINE, int... I> INLINE void add_lost(const vf *x, const vf *scale, const vf *inverse, vf *lost, std::integer_sequence<int, I...>) {
  for (int k = 0; k < HALF_INPUTS; k++) {
    const vf off[] = {Form::template nearest<I, FINE>(x[k] * inverse[I]) * scale[I] - x[k]...};
    ((lost[I] += off[I] * off[I]), ...);
  }
}

// LANES groups with the scale of those tried that loses least, squared; the first of equals. word[i]: eight codes of each group.
template <class Form, class T> INLINE vi best_codes(const T *at, vi (&word)[HALF_INPUTS / 8]) {
  using Tries = std::make_integer_sequence<int, Form::TRIED>;
  vf x[HALF_INPUTS], scale[Form::TRIED], inverse[Form::TRIED], lost[Form::TRIED], most = {};
  vi size = {};
  groups_in_lanes(at, x);
  for (int k = 0; k < HALF_INPUTS; k++) {  // the number of largest size, the first of equals; what is no number is largest
    const vi here = (vi)x[k] & 0x7fffffff;
    most = here > size ? x[k] : most, size = here > size ? here : size;
  }
  Form::scales(most, scale);
#pragma GCC unroll 6
  for (int i = 0; i < Form::TRIED; i++) inverse[i] = scale[i] == 0.f ? splat(0.f) : 1.f / scale[i], lost[i] = splat(0.f);
  if (Form::fine(scale)) add_lost<Form, true>(x, scale, inverse, lost, Tries{});
  else add_lost<Form, false>(x, scale, inverse, lost, Tries{});
  for (int i = 1; i < Form::TRIED; i++) {
    const vi less = lost[i] < lost[0];
    lost[0] = less ? lost[i] : lost[0], scale[0] = less ? scale[i] : scale[0], inverse[0] = less ? inverse[i] : inverse[0];
  }
  for (int i = 0; i < HALF_INPUTS / 8; i++) {
    word[i] = vi{};
#pragma GCC unroll 8
    for (int k = 0; k < 8; k++) word[i] |= (Form::code(x[8 * i + k] * inverse[0]) & 15) << 4 * k;
  }
  return Form::bits(scale[0]);
}

template <class T> struct Quantize {
  // By the bits of the sizes, which are in the order of whole numbers; what is no number is largest of all.
  static float largest(const void *at, int64_t n) {
    const T *x = (const T *)at;
    vi most = {};
    int64_t k = 0;
    for (; k + LANES <= n; k += LANES) {
      const vi size = (vi)load(x + k) & 0x7fffffff;
      most = size > most ? size : most;
    }
    for (; k < n; k++) {
      const vi size = (vi)splat(number(x + k)) & 0x7fffffff;
      most = size > most ? size : most;
    }
    const int32_t bits = largest_of(most);
    float found;
    memcpy(&found, &bits, 4);
    return found;
  }

  // Each number times `inverse` is a number of the format; rounded before anything is added to it, as in torch.
  INLINE vf product(vf x, float inverse) {
    vf y = x * inverse;
    asm("" : "+v"(y));
    return y;
  }
  template <class To> INLINE void each(const void *at, float inverse, int64_t n, uint8_t *y, const To &to) {
    const T *x = (const T *)at;
    int64_t k = 0;
    for (; k + LANES <= n; k += LANES) *(vb *)(y + k) = bytes_of(to(product(load(x + k), inverse)));
    for (; k < n; k++) y[k] = (uint8_t)to(product(splat(number(x + k)), inverse))[0];
  }
  static void to_int8(const void *x, float inverse, int64_t n, uint8_t *y) {
    each(x, inverse, n, y, [](vf v) __attribute__((always_inline)) { return whole(v); });
  }
  static void to_fp8(const void *x, float inverse, int64_t n, uint8_t *y) {
    each(x, inverse, n, y, [](vf v) __attribute__((always_inline)) { return e4m3(v); });
  }
  template <class Form> static void to_halves(const void *at, int64_t n, uint8_t *codes, uint16_t *scale) {
    const T *x = (const T *)at;
    for (int64_t k = 0; k < n; k += LANES * HALF_INPUTS) {
      alignas(64) T room[LANES * HALF_INPUTS];
      const int64_t here = n - k < LANES * HALF_INPUTS ? n - k : (int64_t)LANES * HALF_INPUTS;
      const T *from = x + k;
      if (here < LANES * HALF_INPUTS) {
        memcpy(room, from, here * sizeof(T)), memset(room + here, 0, sizeof(room) - here * sizeof(T));
        from = room;
      }
      vi word[HALF_INPUTS / 8];
      const vi bits = best_codes<Form>(from, word);
      for (int64_t g = 0; g * HALF_INPUTS < here; g++, codes += HALF_INPUTS / 2, scale++) {
        *scale = (uint16_t)((const int32_t *)&bits)[g];
        for (int i = 0; i < HALF_INPUTS / 8; i++) memcpy(codes + 4 * i, (const int32_t *)&word[i] + g, 4);
      }
    }
  }
  static constexpr QuantizeOps table = {largest, to_int8, to_fp8, to_halves<Int4>, to_halves<Mxfp4>};
};
