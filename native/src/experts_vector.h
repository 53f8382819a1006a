// The expert kernels in GCC's vector types: products in float32, whatever the instruction set. Included inside a namespace of
// one, after `enum { LANES = ... }` (numbers in a register) and `enum { GROUPS = ... }` (groups of 16 columns at a time).
#include "vector.h"

enum { PARTS = 16 / LANES };  // registers to a group

template <class X> static void gated_columns(const float *c, int rows, void *const *h, const Gating &by) {
  const vf limit = splat(by.limit);
  for (int m = 0; m < rows; m++)
    for (int at = 0; at < 32; at += LANES) {
      const float *q = c + m * PANEL + at / 16 * 32 + at % 16;
      vf gate = *(const vf *)q, up = *(const vf *)(q + 16);
      if (by.bias) gate += load(by.bias + (q - c) % PANEL), up += load(by.bias + (q - c) % PANEL + 16);
      gate = gate > limit ? limit : gate;
      up = up > limit ? limit : up;
      up = up < -limit ? -limit : up;
      vf y = gate / (1.f + exp_of(gate * -by.alpha)) * (up + by.offset);
      y = gate != gate ? gate : y;
      if (sizeof(X) == 4) *(vf *)((float *)h[m] + at) = y;
      else *(vh *)((bf16 *)h[m] + at) = bf16_of(y);
    }
}

template <class X> static void weigh_columns(const void *rows, int64_t stride, const float *weight, int64_t n, float *sum) {
  for (int at = 0; at < PANEL; at += LANES) store(sum + at, weighted(n, weight, [&](int64_t i) { return load((const X *)rows + i * stride + at); }));
}

template <class X> static void store_columns(const float *c, int64_t stride, int rows, void *const *y, int columns) {
  for (int m = 0; m < rows; m++) {
    const float *from = c + m * stride;
    int at = 0;
    for (; at + LANES <= columns; at += LANES) {
      if (sizeof(X) == 4) *(vf *)((float *)y[m] + at) = *(const vf *)(from + at);
      else *(vh *)((bf16 *)y[m] + at) = bf16_of(*(const vf *)(from + at));
    }
    if (at < columns) {
      vf rest = {};
      memcpy(&rest, from + at, 4 * (columns - at));
      vh half = bf16_of(rest);
      if (sizeof(X) == 4) memcpy((float *)y[m] + at, &rest, 4 * (columns - at));
      else memcpy((bf16 *)y[m] + at, &half, 2 * (columns - at));
    }
  }
}

// ---- the weights of one k pair, group of 16 columns and part of it: those of k and of k + 1 ----

struct Pair {
  vf even, odd;
};

INLINE Pair bf16_pair(const uint8_t *p) {
  vi bits = *(const vi *)p;
  return {(vf)(bits << 16), (vf)(bits & (int32_t)0xffff0000)};
}

INLINE Pair value_pair(const float *a) { return {value(a), value(a + 1)}; }
INLINE Pair value_pair(const bf16 *a) {
  int32_t both;
  memcpy(&both, a, 4);
  vi bits = both - (vi){};
  asm("" : "+v"(bits));  // broadcast from memory, then taken apart: not numbers taken apart and then broadcast
  return {(vf)(bits << 16), (vf)(bits & (int32_t)0xffff0000)};
}

// Bytes of LANES columns and one k to the top of as many numbers: 16 bytes have 4 columns of a group, then 4 of the next, k and k + 1.
#ifdef AVX512_FILE
typedef __m512i Bytes;
INLINE Bytes bytes_at(const uint8_t *p) { return _mm512_loadu_si512(p); }
INLINE vi top_bytes(Bytes x, __m128i of_4) { return (vi)_mm512_shuffle_epi8(x, _mm512_broadcast_i32x4(of_4)); }
INLINE Bytes with_sign(Bytes x) {
  const __m512i size = _mm512_and_si512(x, _mm512_set1_epi8(0x7f));
  return _mm512_mask_sub_epi8(size, _mm512_movepi8_mask(x), _mm512_setzero_si512(), size);
}
#else
typedef __m256i Bytes;
INLINE Bytes bytes_at(const uint8_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
INLINE vi top_bytes(Bytes x, __m128i of_4) { return (vi)_mm256_shuffle_epi8(x, _mm256_broadcastsi128_si256(of_4)); }
INLINE Bytes with_sign(Bytes x) { return _mm256_sign_epi8(_mm256_and_si256(x, _mm256_set1_epi8(0x7f)), x); }
#endif
INLINE __m128i every_other(int first) {
  return _mm_setr_epi32(first << 24 | 0x808080, (first + 2) << 24 | 0x808080, (first + 4) << 24 | 0x808080, (first + 6) << 24 | 0x808080);
}

// 2^120 takes e4m3's exponent, read as float32's, to where it belongs; numbers below the normal ones come out right too.
template <int FORMAT> INLINE vf top_value(vi x) {
  if (FORMAT == W_INT8) return __builtin_convertvector(x >> 24, vf);
  vi bits = x >> 4 & (int32_t)0x87ffffff;
  return (vf)((vi)((vf)bits * 0x1p120f) | ((x & 0x7f000000) == 0x7f000000));
}

template <int FORMAT> INLINE Pair byte_pair(const uint8_t *p, int group, int part) {
  Bytes x = bytes_at(p + group / 2 * 64 + part * LANES * 4);
  if (FORMAT == W_INT8) x = with_sign(x);
  return {top_value<FORMAT>(top_bytes(x, every_other(group % 2 * 8))), top_value<FORMAT>(top_bytes(x, every_other(group % 2 * 8 + 1)))};
}

// ---- tiles: GROUPS groups of columns at a time, in the order of k ----

enum Kind { F32 = -2, BF16 = -1, FP8 = W_FP8, INT8 = W_INT8 };

// Bytes of a panel for each k.
INLINE constexpr int bytes_per_k(int kind) { return kind == F32 ? 256 : kind == BF16 ? 128 : 64; }

// acc += a[.][k0..k1) times the panel part p, whose first k is k0. Beside each pair of k of bfloat16 LINES cache lines
// that are NEAR_AHEAD away are brought to the nearest cache; and where rows are of bfloat16, whose weights come from memory, as many
// from `ahead` on to the second one.
template <class X, int KIND, int MR, int LINES = 0>
INLINE void multiply(const X *const *a, const uint8_t *p, int64_t k0, int64_t k1, int group, vf (&acc)[MR][GROUPS * PARTS], const uint8_t *ahead = nullptr) {
  if (KIND == F32) {
    for (int64_t k = k0; k < k1; k++, p += 256)
#pragma GCC unroll 8
      for (int j = 0; j < GROUPS * PARTS; j++) {
        vf w = *(const vf *)(p + 64 * group + 4 * LANES * j);
#pragma GCC unroll 8
        for (int m = 0; m < MR; m++) acc[m][j] += value(a[m] + k) * w;
      }
    return;
  }
  // Weights of a half of the pairs, and the sums, fill the registers.
  for (int64_t k = k0; KIND == BF16 && k < k1; k += 2, p += 256, ahead += 64 * LINES) {
#pragma GCC unroll 4
    for (int i = 0; i < LINES; i++) {
      if (sizeof(X) == sizeof(bf16)) __builtin_prefetch(ahead + 64 * i, 0, 2);
      __builtin_prefetch(p + NEAR_AHEAD + 64 * i, 0, 3);
    }
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; odd++) {
      vf w[GROUPS * PARTS];
#pragma GCC unroll 8
      for (int j = 0; j < GROUPS * PARTS; j++) {
        Pair both = bf16_pair(p + 64 * group + 4 * LANES * j);
        w[j] = odd ? both.odd : both.even;
      }
#pragma GCC unroll 8
      for (int m = 0; m < MR; m++) {
        Pair both = value_pair(a[m] + k);
        vf x = odd ? both.odd : both.even;
#pragma GCC unroll 8
        for (int j = 0; j < GROUPS * PARTS; j++) acc[m][j] += x * w[j];
      }
      asm volatile("" ::: "memory");  // the other half is read again: it would have no register
    }
  }
  for (int64_t k = k0; KIND != BF16 && k < k1; k += 2, p += 2 * bytes_per_k(KIND))
#pragma GCC unroll 8
    for (int j = 0; j < GROUPS * PARTS; j++) {
      int at = group + j / PARTS, part = j % PARTS;
      Pair w;
      if constexpr (KIND == FP8 || KIND == INT8) w = byte_pair<KIND>(p, at, part);
#pragma GCC unroll 8
      for (int m = 0; m < MR; m++) {
        Pair x = value_pair(a[m] + k);
        acc[m][j] += x.even * w.even;
        acc[m][j] += x.odd * w.odd;
      }
    }
}

// SCALED: the block has its scales before its weights.
template <class X, int KIND, bool SCALED, int MR>
static void tile(const void *const *av, const Block &block, float *c) {
  const X *const *a = (const X *const *)av;
  int64_t k = block.k, end = k + block.depth;
  const bool beside = KIND == BF16 && GROUPS == 4 && !SCALED && block.lines == 4;
  if (!beside)
    for (const uint8_t *at = block.ahead, *last = at + block.depth * 32 * block.lines; at < last; at += 64) __builtin_prefetch(at, 0, 2);
  for (int group = 0; group < 4; group += GROUPS) {
    vf sum[MR][GROUPS * PARTS] = {}, acc[MR][GROUPS * PARTS] = {};
    if (k)
#pragma GCC unroll 8
      for (int m = 0; m < MR; m++)
#pragma GCC unroll 8
        for (int j = 0; j < GROUPS * PARTS; j++) sum[m][j] = *(const vf *)(c + m * PANEL + 16 * group + LANES * j);
    if (SCALED) {
      multiply<X, KIND, MR>(a, block.panel + PANEL * 4, k, end, group, acc);
#pragma GCC unroll 8
      for (int m = 0; m < MR; m++)
#pragma GCC unroll 8
        for (int j = 0; j < GROUPS * PARTS; j++) sum[m][j] += acc[m][j] * *(const vf *)(block.panel + 64 * group + 4 * LANES * j);
    } else if (beside) {
      multiply<X, KIND, MR, 4>(a, block.panel, k, end, group, sum, block.ahead);
    } else {
      multiply<X, KIND, MR>(a, block.panel, k, end, group, sum);
    }
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++)
#pragma GCC unroll 8
      for (int j = 0; j < GROUPS * PARTS; j++) *(vf *)(c + m * PANEL + 16 * group + LANES * j) = sum[m][j];
  }
}

// A block of 8-bit weights as one of X, its scales copied.
template <class X, int FORMAT> static void widen(const uint8_t *block, int64_t depth, uint8_t *out) {
  memcpy(out, block, PANEL * 4);
  block += PANEL * 4, out += PANEL * 4;
  for (int64_t k = 0; k < depth; k += 2, block += 128, out += 128 * sizeof(X))
    for (int j = 0; j < 4 * PARTS; j++) {
      Pair w = byte_pair<FORMAT>(block, j / PARTS, j % PARTS);
      if (sizeof(X) == 4) {
        *(vf *)(out + 4 * LANES * j) = w.even;
        *(vf *)(out + 256 + 4 * LANES * j) = w.odd;
      } else {
        vi even = (vi)w.even, odd = (vi)w.odd;  // both exact in bfloat16
        *(vi *)(out + 4 * LANES * j) = (int32_t)0xffff0000 & odd | (vi)((even >> 16) & 0xffff);
      }
    }
}

// ---- weights of 4 bits ----

alignas(64) static const float half_values[2][16] = {{0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6},
                                                     {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7}};

// What codes stand for: in the lowest 4 bits, what is above them does not matter.
template <int FORMAT> INLINE vf half_value(vi code) {
  vf y = __builtin_shuffle(*(const vf *)half_values[FORMAT != W_MXFP4], code);
  if (LANES == 16) return y;
  if (FORMAT == W_MXFP4) return (vf)((vi)y | (code & 8) << 28);
  return __builtin_convertvector(code & 15, vf) - 8.f;
}

// float16 to float32, numbers below the normal ones too.
INLINE vf half_floats(const uint8_t *p) {
  vi bits = wide(*(const vh *)p);
  return (vf)((vi)((vf)((bits & 0x7fff) << 13) * 0x1p112f) | (bits & 0x8000) << 16);
}

// Of a group of k: what codes are multiplied by, and what is then added.
struct HalfScale {
  vf by, more;
};
template <int FORMAT> INLINE HalfScale half_scale(const uint8_t *p) {
  if (FORMAT == W_MXFP4) return {load((const bf16 *)p), splat(0.f)};
  vf by = half_floats(p);
  return {by, FORMAT == W_INT4_ZERO ? -by * half_floats(p + GROUP_SCALES) : splat(0.f)};
}

// acc += n numbers of the rows (8, or at the end of all fewer) times the codes of as many k.
template <class X, int FORMAT, int MR>
INLINE void half_step(const X *const *a, int64_t k, int n, const uint8_t *p, vf (&acc)[MR][GROUPS * PARTS]) {
#pragma GCC unroll 4
  for (int i = 0; i < n; i += 2) {
    vf even[GROUPS * PARTS], odd[GROUPS * PARTS];
#pragma GCC unroll 8
    for (int j = 0; j < GROUPS * PARTS; j++) {
      vi codes = *(const vi *)(p + 4 * LANES * j);
      even[j] = half_value<FORMAT>((vi)((vu)codes >> (2 * i))), odd[j] = half_value<FORMAT>((vi)((vu)codes >> (2 * i + 16)));
    }
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++) {
      Pair x = value_pair(a[m] + k + i);
#pragma GCC unroll 8
      for (int j = 0; j < GROUPS * PARTS; j++) acc[m][j] += x.even * even[j];
#pragma GCC unroll 8
      for (int j = 0; j < GROUPS * PARTS; j++) acc[m][j] += x.odd * odd[j];
    }
  }
}

template <class X, int FORMAT, int MR>
static void half_tile(const void *const *av, const Block &block, float *c) {
  const X *const *a = (const X *const *)av;
  for (const uint8_t *at = block.ahead, *last = at + block.depth * 32 * block.lines; at < last; at += 64) __builtin_prefetch(at, 0, 2);
  for (int group = 0; group < 4; group += GROUPS) {
    const uint8_t *p = block.panel + half_scales(FORMAT) + 64 * group;
    for (int64_t first = 0; first < block.depth; first += K_GROUP) {
      int64_t n = block.depth - first < K_GROUP ? block.depth - first : (int64_t)K_GROUP, k = block.k + first, i = 0;
      vf acc[MR][GROUPS * PARTS] = {};
      for (; i + HALF_STEP <= n; i += HALF_STEP, p += HALF_STEP_BYTES) half_step<X, FORMAT, MR>(a, k + i, HALF_STEP, p, acc);
      if (i < n) half_step<X, FORMAT, MR>(a, k + i, (int)(n - i), p, acc);
      float sum_of[MR];
      for (int m = 0; FORMAT == W_INT4_ZERO && m < MR; m++) {
        vf sum = {};
        int64_t at = 0;
        for (; at + LANES <= n; at += LANES) sum += load(a[m] + k + at);
        sum_of[m] = total(sum);
        for (; at < n; at++) sum_of[m] += number(a[m] + k + at);
      }
#pragma GCC unroll 8
      for (int j = 0; j < GROUPS * PARTS; j++) {
        HalfScale scale = half_scale<FORMAT>(block.panel + first / K_GROUP * PANEL * 2 + 32 * group + 2 * LANES * j);
#pragma GCC unroll 8
        for (int m = 0; m < MR; m++) {
          float *to = c + m * PANEL + 16 * group + LANES * j;
          vf sum = acc[m][j] * scale.by + (k ? load(to) : (vf){});
          if (FORMAT == W_INT4_ZERO) sum += scale.more * sum_of[m];
          store(to, sum);
        }
      }
    }
  }
}

// A block of 4-bit weights as one of X: its scales are in the numbers. What bfloat16 cannot hold is rounded.
template <class X, int FORMAT> static void widen_halves(const uint8_t *block, int64_t depth, uint8_t *out) {
  const uint8_t *scales = block, *p = block + half_scales(FORMAT);
  for (int64_t first = 0; first < depth; first += K_GROUP, scales += PANEL * 2) {
    int64_t n = depth - first < K_GROUP ? depth - first : (int64_t)K_GROUP;
    HalfScale scale[4 * PARTS];
    for (int j = 0; j < 4 * PARTS; j++) scale[j] = half_scale<FORMAT>(scales + 2 * LANES * j);
    for (int64_t k = 0; k < n; k += 2, out += 128 * sizeof(X)) {
      if (k % HALF_STEP == 0) __builtin_prefetch(p + half_scales(FORMAT) + K_BLOCK * PANEL / 2, 0, 3);
      for (int j = 0; j < 4 * PARTS; j++) {
        vi codes = (vi)(*(const vu *)(p + 4 * LANES * j) >> (int)(k % HALF_STEP * 2));
        vf even = half_value<FORMAT>(codes) * scale[j].by, odd = half_value<FORMAT>((vi)((vu)codes >> 16)) * scale[j].by;
        if (FORMAT == W_INT4_ZERO) even += scale[j].more, odd += scale[j].more;
        if (sizeof(X) == 4) {
          store((float *)out + LANES * j, even), store((float *)(out + 256) + LANES * j, odd);
        } else {
          vi low = wide(bf16_of(even)), high = wide(bf16_of(odd));
          *(vi *)(out + 4 * LANES * j) = low | high << 16;
        }
      }
      if (k % HALF_STEP == HALF_STEP - 2 || k + 2 >= n) p += HALF_STEP_BYTES;
    }
  }
}

template <class X> struct Ops {
  enum { PLAIN = sizeof(X) == 4 ? F32 : BF16 };
  template <bool SCALED, int N> static constexpr TileFn wide() { return tile<X, PLAIN, SCALED, N>; }
  template <int FORMAT, int N> static constexpr TileFn narrow() {
    if constexpr (FORMAT >= W_MXFP4) return half_tile<X, FORMAT, N>;
    else return tile<X, FORMAT, true, N>;
  }
  template <int N> static constexpr TileFn of_bf16() {
    if constexpr (sizeof(X) == 4) return tile<X, BF16, false, N>;
    else return nullptr;
  }
#define NARROW(F) {0, narrow<F, 1>(), narrow<F, 2>(), narrow<F, 3>(), narrow<F, 4>(), narrow<F, 5>(), narrow<F, 6>()}
  static constexpr ExpertOps table = {
      {0, wide<false, 1>(), wide<false, 2>(), wide<false, 3>(), wide<false, 4>(), wide<false, 5>(), wide<false, 6>()},
      {0, wide<true, 1>(), wide<true, 2>(), wide<true, 3>(), wide<true, 4>(), wide<true, 5>(), wide<true, 6>()},
      {NARROW(W_FP8), NARROW(W_INT8), NARROW(W_MXFP4), NARROW(W_INT4), NARROW(W_INT4_ZERO)},
      {widen<X, W_FP8>, widen<X, W_INT8>, widen_halves<X, W_MXFP4>, widen_halves<X, W_INT4>, widen_halves<X, W_INT4_ZERO>},
      nullptr,
      {},
      gated_columns<X>,
      weigh_columns<X>,
      store_columns<X>,
      {},
      {},
      {0, of_bf16<1>(), of_bf16<2>(), of_bf16<3>(), of_bf16<4>(), of_bf16<5>(), of_bf16<6>()},
  };
};
