// Linear layers with AVX512-BF16: products of pairs, sums in float32. Few rows: pairs lie along the inputs, and weights are read as
// they lie. Many: weights are packed into a panel first (experts.h), which costs as much as a few rows.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,fma,prefer-vector-width=512")
#include "experts.h"
#include "linear.h"

#include <immintrin.h>
namespace {
enum { LANES = 16 };
#include "vector.h"
#include "pairs_avx512bf16.h"

enum { OUTPUTS = 4, ROWS = 4 };  // of a tile: 16 sums, of 16 numbers each

INLINE void note_best(const LinearCall &call, int64_t row, const bf16 *y, int n, int64_t first) {
  for (int j = 0; j < n; j++) {
    int16_t x = (int16_t)y[j];
    x = x == INT16_MIN ? 0 : (int16_t)(x ^ (x >> 15 & 0x7fff));  // both zeros are 0
    if (x > call.best[row]) call.best[row] = x, call.place[row] = first + j;
  }
}

// Whether one of 64 sums is above the best so far: only then it can be so when it is rounded.
INLINE bool may_be_best(const float *c, int16_t best) {
  if (best == INT16_MIN) return true;
  bf16 bits = (bf16)(best ^ (best >> 15 & 0x7fff));
  __m512 most = _mm512_max_ps(_mm512_max_ps(_mm512_load_ps(c), _mm512_load_ps(c + 16)), _mm512_max_ps(_mm512_load_ps(c + 32), _mm512_load_ps(c + 48)));
  return _mm512_cmp_ps_mask(most, float_of(bits), _CMP_GT_OQ) != 0;
}

// A tile of outputs from o on and rows from m on. ahead: bytes from a weight to the one that will be wanted, 0: it is near already.
template <int MR>
INLINE void tile(const LinearCall &call, int64_t o, int outputs, int64_t m, int64_t ahead) {
  const bf16 *w[OUTPUTS], *x[MR];
#pragma GCC unroll 16
  for (int i = 0; i < OUTPUTS; i++) w[i] = call.w + (o + (i < outputs ? i : outputs - 1)) * call.w_stride;
#pragma GCC unroll 4
  for (int i = 0; i < MR; i++) x[i] = call.x + (m + i) * call.x_stride;
  __m512 acc[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) acc[i] = _mm512_setzero_ps();
  int64_t k = 0;
  for (; k + 32 <= call.inputs; k += 32) {
    __m512bh a[MR];
#pragma GCC unroll 4
    for (int i = 0; i < MR; i++) a[i] = (__m512bh)_mm512_loadu_si512(x[i] + k);
#pragma GCC unroll 16
    for (int j = 0; j < OUTPUTS; j++) {
      if (ahead) _mm_prefetch((const char *)(w[j] + k) + ahead, _MM_HINT_T0);
      __m512bh b = (__m512bh)_mm512_loadu_si512(w[j] + k);
#pragma GCC unroll 4
      for (int i = 0; i < MR; i++) acc[i * OUTPUTS + j] = _mm512_dpbf16_ps(acc[i * OUTPUTS + j], b, a[i]);
    }
  }
  if (k < call.inputs)
#pragma GCC unroll 16
    for (int j = 0; j < OUTPUTS; j++)
#pragma GCC unroll 4
      for (int i = 0; i < MR; i++)
        acc[i * OUTPUTS + j] =
            _mm512_dpbf16_ps(acc[i * OUTPUTS + j], some_pairs(w[j] + k, call.inputs - k), some_pairs(x[i] + k, call.inputs - k));
  __m512 sum = sum_each(acc);
  if (call.bias) {
    bf16 bias[16] = {};
    for (int i = 0; i < MR; i++) memcpy(bias + i * OUTPUTS, call.bias + o, sizeof(bf16) * outputs);
    sum += load(bias);
  }
  alignas(32) bf16 y[16];
  _mm256_store_si256((__m256i *)y, (__m256i)_mm512_cvtneps_pbh(sum));
  if (call.best) {
    for (int i = 0; i < MR; i++) note_best(call, m + i, y + i * OUTPUTS, outputs, o);
    return;
  }
  bf16 *to = call.y + m * call.y_stride + o;
  for (int i = 0; i < MR; i++, to += call.y_stride) {
    if (outputs == OUTPUTS) memcpy(to, y + i * OUTPUTS, sizeof(bf16) * OUTPUTS);
    else memcpy(to, y + i * OUTPUTS, sizeof(bf16) * outputs);
  }
}

// 16 rows of 16 pairs to 16 registers with one pair of every row.
INLINE void transpose(const __m512i *x, __m512i *y) {
  __m512i a[16], b[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) a[2 * i] = _mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]), a[2 * i + 1] = _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {  // b[4 i + c]: column c of each quarter, of rows 4 i to 4 i + 3
    b[4 * i] = _mm512_unpacklo_epi64(a[4 * i], a[4 * i + 2]), b[4 * i + 1] = _mm512_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 2] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]), b[4 * i + 3] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) {
    __m512i low0 = _mm512_shuffle_i32x4(b[c], b[4 + c], 0x88), high0 = _mm512_shuffle_i32x4(b[c], b[4 + c], 0xdd);
    __m512i low1 = _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0x88), high1 = _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0xdd);
    y[c] = _mm512_shuffle_i32x4(low0, low1, 0x88), y[8 + c] = _mm512_shuffle_i32x4(low0, low1, 0xdd);
    y[4 + c] = _mm512_shuffle_i32x4(high0, high1, 0x88), y[12 + c] = _mm512_shuffle_i32x4(high0, high1, 0xdd);
  }
}

// Weights of outputs o to o + count (at most 64) in the form of a panel; outputs beyond are zero.
void pack(const LinearCall &call, int64_t o, int count, uint8_t *panel) {
  for (int group = 0; group < 4; group++)
    for (int64_t k = 0; k < call.inputs; k += 32) {
      __m512i x[16], y[16];
      for (int i = 0; i < 16; i++) {
        int64_t row = 16 * group + i;
        x[i] = row < count ? (__m512i)some_pairs(call.w + (o + row) * call.w_stride + k, call.inputs - k) : _mm512_setzero_si512();
      }
      transpose(x, y);
      int64_t pairs = (call.inputs - k) / 2 < 16 ? (call.inputs - k) / 2 : 16;
      for (int64_t i = 0; i < pairs; i++) _mm512_storeu_si512(panel + (k / 2 + i) * 256 + group * 64, y[i]);
    }
}
}  // namespace

void linear_many_rows(const LinearCall &call, int64_t first, int64_t last, uint8_t *panel) {
  alignas(64) float c[MAX_ROWS * PANEL];
  const void *a[MAX_ROWS];
  void *to[MAX_ROWS];
  // While one block of weights is multiplied, the next is brought nearer: so many cache lines for each pair of inputs.
  int64_t tiles = (call.rows + MAX_ROWS - 1) / MAX_ROWS, lines = (4 + tiles - 1) / tiles, row_bytes = call.w_stride * (int64_t)sizeof(bf16);
  for (int64_t o = first; o < last; o += PANEL) {
    int count = last - o < PANEL ? (int)(last - o) : (int)PANEL;
    pack(call, o, count, panel);
    Ahead ahead = {(const uint8_t *)call.w + (o + PANEL) * row_bytes, (const uint8_t *)call.w + (o + 2 * PANEL < last ? o + 2 * PANEL : last) * row_bytes,
                   lines == 3 ? 4 : (int)lines, false};
    for (int64_t m = 0; m < call.rows;) {
      int64_t left = call.rows - m, rows = left <= MAX_ROWS ? left : left < 2 * MAX_ROWS ? (left + 1) / 2 : (int64_t)MAX_ROWS;
      for (int64_t i = 0; i < rows; i++) a[i] = call.x + (m + i) * call.x_stride, to[i] = call.y ? call.y + (m + i) * call.y_stride + o : nullptr;
      experts_avx512_bf16->plain[rows](a, panel, call.inputs, c, ahead);
      ahead.next += call.inputs * 32 * ahead.lines;
      if (call.bias)
        for (int64_t i = 0; i < rows; i++)
          for (int j = 0; j < count; j++) c[i * PANEL + j] += float_of(call.bias[o + j])[0];
      if (!call.best) experts_avx512_bf16->store(c, PANEL, (int)rows, to, count);
      for (int64_t i = 0; call.best && i < rows; i++)
        if (may_be_best(c + i * PANEL, call.best[m + i])) {
          alignas(64) bf16 y[PANEL];
          void *own = y;
          experts_avx512_bf16->store(c + i * PANEL, PANEL, 1, &own, count);
          note_best(call, m + i, y, count, o);
        }
      m += rows;
    }
  }
}

template <int MR> static void rows_from(const LinearCall &call, int64_t first, int64_t last) {
  int64_t next = call.w_stride * OUTPUTS * (int64_t)sizeof(bf16);
  for (int64_t o = first; o < last; o += OUTPUTS) tile<MR>(call, o, last - o < OUTPUTS ? (int)(last - o) : OUTPUTS, 0, next);
}

void linear_few_rows(const LinearCall &call, int64_t first, int64_t last) {
  if (call.rows == 1) return rows_from<1>(call, first, last);
  if (call.rows == 2) return rows_from<2>(call, first, last);
  if (call.rows == 3) return rows_from<3>(call, first, last);
  int64_t next = call.w_stride * OUTPUTS * (int64_t)sizeof(bf16);
  for (int64_t o = first; o < last; o += OUTPUTS) {
    int outputs = last - o < OUTPUTS ? (int)(last - o) : (int)OUTPUTS;
    int64_t m = 0;
    for (; m + ROWS <= call.rows; m += ROWS) tile<ROWS>(call, o, outputs, m, m ? 0 : next);
    switch (call.rows - m) {
      case 3: tile<3>(call, o, outputs, m, 0); break;
      case 2: tile<2>(call, o, outputs, m, 0); break;
      case 1: tile<1>(call, o, outputs, m, 0); break;
    }
  }
}
#endif
