// Linear layers with AVX512-BF16: products of pairs, sums in float32. Few rows: pairs lie along the inputs, and weights are read as
// they lie. Many: weights are packed into a panel first (experts.h), which costs as much as a few rows.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,fma,prefer-vector-width=512")
#define AVX512_FILE
#include "experts.h"
#include "linear.h"

#include <immintrin.h>
namespace {
enum { LANES = 16 };
#include "vector.h"
#include "pairs_avx512bf16.h"

enum { OUTPUTS = 4, ROWS = 4 };  // of a tile: 16 sums, of 16 numbers each

// Whether one of 64 sums is above the best so far: only then it can be so when it is rounded.
INLINE bool may_be_best(const float *c, int16_t best) {
  if (best == INT16_MIN) return true;
  bf16 bits = (bf16)(best ^ (best >> 15 & 0x7fff));
  __m512 most = _mm512_max_ps(_mm512_max_ps(_mm512_load_ps(c), _mm512_load_ps(c + 16)), _mm512_max_ps(_mm512_load_ps(c + 32), _mm512_load_ps(c + 48)));
  return _mm512_cmp_ps_mask(most, float_of(bits), _CMP_GT_OQ) != 0;
}

// A tile of outputs from o on and rows from m on. Meanwhile NEXT rows of weights from `next` on are brought nearer.
template <int MR, int NEXT>
INLINE void tile(const LinearCall &call, int64_t o, int outputs, int64_t m, const bf16 *next) {
  const bf16 *w[OUTPUTS], *x[MR];
#pragma GCC unroll 16
  for (int i = 0; i < OUTPUTS; i++) w[i] = call.w + (o + (i < outputs ? i : outputs - 1)) * call.w_stride;
#pragma GCC unroll 4
  for (int i = 0; i < MR; i++) x[i] = call.x + (m + i) * call.x_stride;
  int64_t gap = (const char *)next - (const char *)w[0];
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
      if (j < NEXT) _mm_prefetch((const char *)(w[j] + k) + gap, _MM_HINT_T0);
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

// 16 rows of 16 pairs, `bytes` apart, to 16 registers with one pair of every row. The quarters of rows are put together as they are
// loaded, which leaves half of the shuffles.
INLINE void transpose(const uint8_t *rows, int64_t bytes, uint8_t *out) {
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++, out += 1024) {
    __m512i x[4], y[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {  // quarter q: column c of row 4 q + r
      const uint8_t *at = rows + r * bytes + 16 * c;
      x[r] = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)at));
      x[r] = _mm512_mask_broadcast_i32x4(x[r], 0x00f0, _mm_loadu_si128((const __m128i *)(at + 4 * bytes)));
      x[r] = _mm512_mask_broadcast_i32x4(x[r], 0x0f00, _mm_loadu_si128((const __m128i *)(at + 8 * bytes)));
      x[r] = _mm512_mask_broadcast_i32x4(x[r], 0xf000, _mm_loadu_si128((const __m128i *)(at + 12 * bytes)));
    }
    y[0] = _mm512_unpacklo_epi32(x[0], x[1]), y[1] = _mm512_unpackhi_epi32(x[0], x[1]);
    y[2] = _mm512_unpacklo_epi32(x[2], x[3]), y[3] = _mm512_unpackhi_epi32(x[2], x[3]);
    _mm512_storeu_si512(out, _mm512_unpacklo_epi64(y[0], y[2])), _mm512_storeu_si512(out + 256, _mm512_unpackhi_epi64(y[0], y[2]));
    _mm512_storeu_si512(out + 512, _mm512_unpacklo_epi64(y[1], y[3])), _mm512_storeu_si512(out + 768, _mm512_unpackhi_epi64(y[1], y[3]));
  }
}

// Sums of `rows` rows from m on and `count` outputs from o on, c [rows][64], to where they belong.
INLINE void deliver(const LinearCall &call, float *c, int64_t m, int64_t rows, int64_t o, int count) {
  void *to[MAX_BAND];
  for (int64_t i = 0; i < rows; i++) to[i] = call.y ? call.y + (m + i) * call.y_stride + o : nullptr;
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
}

// 16 rows (those from `rows` on are zero) of 32 numbers (those from `columns` on are zero), turned: to[pair][row].
INLINE void turn(const uint8_t *from, int64_t bytes, int64_t rows, int64_t columns, uint8_t *to) {
  if (rows >= 16 && columns >= 32) return transpose(from, bytes, to);
  alignas(64) uint8_t some[16 * 64];
  for (int64_t row = 0; row < 16; row++)
    _mm512_store_si512(some + row * 64, row < rows ? (__m512i)some_pairs((const bf16 *)(from + row * bytes), columns) : _mm512_setzero_si512());
  transpose(some, 64, to);
}

// Weights of outputs o to o + count (at most 64) in the form of a panel; outputs beyond are zero. inputs is even.
void pack(const LinearCall &call, int64_t o, int count, uint8_t *panel) {
  int64_t bytes = call.w_stride * (int64_t)sizeof(bf16);
  for (int group = 0; group < 4; group++)
    for (int64_t k = 0; k < call.inputs; k += 32) {
      const uint8_t *from = (const uint8_t *)(call.w + (o + 16 * group) * call.w_stride + k);
      uint8_t *to = panel + k / 2 * 256 + group * 64;
      if (k + 32 <= call.inputs) {
        turn(from, bytes, count - 16 * group, call.inputs - k, to);
        continue;
      }
      alignas(64) uint8_t turned[16 * 256];
      turn(from, bytes, count - 16 * group, call.inputs - k, turned);
      for (int64_t i = 0; k + 2 * i < call.inputs; i++) memcpy(to + i * 256, turned + i * 256, 64);
    }
}
}  // namespace

void linear_many_rows(const LinearCall &call, int64_t first, int64_t last, uint8_t *panel) {
  const Multiplier by = {experts_ops(X_BF16), experts_bands(X_BF16), X_BF16, W_PLAIN, 0};
  const RowsAt rows_at = {(const uint8_t *)call.x, call.x_stride * (int64_t)sizeof(bf16), nullptr, false, false};
  for (int64_t o = first; o < last; o += PANEL) {
    int count = last - o < PANEL ? (int)(last - o) : (int)PANEL;
    pack(call, o, count, panel);
    const uint8_t *next = last - o >= 2 * PANEL ? (const uint8_t *)(call.w + (o + PANEL) * call.w_stride) : nullptr;  // brought nearer meanwhile
    by.panels(rows_at, 0, call.rows, call.inputs, 0, 1, [&](int64_t n) { return n ? next : panel; }, panel + PANEL * call.inputs * sizeof(bf16),
              [&](int64_t, float *c, int64_t m, int rows) { deliver(call, c, m, rows, o, count); });
  }
}

int64_t linear_many_rows_bytes(int64_t rows, int64_t inputs) {
  const Multiplier by = {experts_ops(X_BF16), experts_bands(X_BF16), X_BF16, W_PLAIN, 0};
  return PANEL * inputs * (int64_t)sizeof(bf16) + by.work_bytes(inputs, rows);
}

namespace {
#include "tiles.h"

// Sums of 16 outputs a tile: weights as they lie times rows of x that have been turned.
template <int GROUPS_NOW> INLINE void turned_step(const uint8_t *w, int64_t bytes, const uint8_t *x, const uint8_t *next) {
  auto bring = [&](int group) {
    for (int i = 0; next && i < 16; i++) __builtin_prefetch(next + (16 * group + i) * 64, 0, 2);
  };
  tile_load<5>(x, PANEL * 4);
  tile_load<4>(w, bytes), tile_products<0, 4, 5>();
  if (GROUPS_NOW == 1) return;
  bring(0);
  tile_load<6>(w + 16 * bytes, bytes), tile_products<1, 6, 5>(), bring(1);
  tile_load<7>(w + 32 * bytes, bytes), tile_products<2, 7, 5>(), bring(2);
  tile_load<4>(w + 48 * bytes, bytes), tile_products<3, 4, 5>(), bring(3);
}

// c[outputs][16] for outputs from o on: 64, or up to 16.
template <int GROUPS_NOW> INLINE void turned_sums(const LinearCall &call, int64_t o, int outputs, const uint8_t *turned, const uint8_t *next, float *c) {
  int64_t bytes = call.w_stride * (int64_t)sizeof(bf16), k = 0;
  const uint8_t *w = (const uint8_t *)(call.w + o * call.w_stride);
  tile_zero<0>();
  if (GROUPS_NOW == 4) tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  for (; k + 32 <= call.inputs; k += 32) {
    turned_step<GROUPS_NOW>(w + 2 * k, bytes, turned + k / 128 * 16 * PANEL * 4 + k % 128 * 2, next);
    if (next) next += PANEL * 64;
  }
  if (k < call.inputs) {
    alignas(64) uint8_t rest[PANEL * 64];
    for (int i = 0; i < outputs; i++) _mm512_store_si512(rest + 64 * i, (__m512i)some_pairs((const bf16 *)(w + i * bytes) + k, call.inputs - k));
    turned_step<GROUPS_NOW>(rest, 64, turned + k / 128 * 16 * PANEL * 4 + k % 128 * 2, nullptr);
  }
  tile_store<0>(c, 64);
  if (GROUPS_NOW == 4) tile_store<1>(c + 256, 64), tile_store<2>(c + 512, 64), tile_store<3>(c + 768, 64);
}
}  // namespace

int64_t linear_tile_rows_bytes(int64_t inputs) { return (inputs + 127) / 128 * 16 * PANEL * 4; }

void linear_tile_rows(const LinearCall &call, int64_t first, int64_t last, uint8_t *turned) {
  alignas(64) float c[PANEL * 16], sums[16 * PANEL];
  for (int64_t k = 0; k < call.inputs; k += 32)
    turn((const uint8_t *)(call.x + k), call.x_stride * (int64_t)sizeof(bf16), call.rows, call.inputs - k, turned + k / 128 * 16 * PANEL * 4 + k % 128 * 2);
  TileShapes shapes = {};
  shapes.palette = 1;
  for (int i = 0; i < 8; i++) shapes.row_bytes[i] = 64, shapes.rows[i] = 16;
  tile_shapes(shapes);
  for (int64_t o = first; o < last; o += PANEL) {
    int count = last - o < PANEL ? (int)(last - o) : (int)PANEL;
    if (count == PANEL) {
      turned_sums<4>(call, o, count, turned, last - o >= 2 * PANEL && call.w_stride == call.inputs ? (const uint8_t *)(call.w + (o + PANEL) * call.w_stride) : nullptr, c);
    } else {
      for (int at = 0; at < count; at += 16) {
        int outputs = count - at < 16 ? count - at : 16;
        shapes.rows[0] = shapes.rows[4] = (uint8_t)outputs;
        tile_shapes(shapes);
        turned_sums<1>(call, o + at, outputs, turned, nullptr, c + 16 * at);
      }
    }
    for (int group = 0; group < 4; group++) transpose((const uint8_t *)(c + 256 * group), 64, (uint8_t *)(sums + 16 * group));
    deliver(call, sums, 0, call.rows, o, count);
  }
  tile_release();
}

namespace {
// All rows times outputs from o on. The tiles share the work of bringing the outputs after them nearer.
template <int MR>
INLINE void some_rows(const LinearCall &call, int64_t o, int outputs, int64_t m, int lines, const bf16 *next) {
  switch (lines) {
    case 0: return tile<MR, 0>(call, o, outputs, m, next);
    case 1: return tile<MR, 1>(call, o, outputs, m, next);
    case 2: return tile<MR, 2>(call, o, outputs, m, next);
    default: return tile<MR, OUTPUTS>(call, o, outputs, m, next);
  }
}

template <int MR> static void rows_from(const LinearCall &call, int64_t first, int64_t last) {
  for (int64_t o = first; o < last; o += OUTPUTS)
    tile<MR, OUTPUTS>(call, o, last - o < OUTPUTS ? (int)(last - o) : (int)OUTPUTS, 0, call.w + (o + OUTPUTS) * call.w_stride);
}

}  // namespace

void linear_few_rows(const LinearCall &call, int64_t first, int64_t last) {
  if (call.rows == 1) return rows_from<1>(call, first, last);
  if (call.rows == 2) return rows_from<2>(call, first, last);
  if (call.rows == 3) return rows_from<3>(call, first, last);
  for (int64_t o = first; o < last; o += OUTPUTS) {
    int outputs = last - o < OUTPUTS ? (int)(last - o) : (int)OUTPUTS;
    const bf16 *next = call.w + (o + OUTPUTS) * call.w_stride;
    int64_t lines = OUTPUTS, tiles = (call.rows + ROWS - 1) / ROWS;
    for (int64_t m = 0; m < call.rows; m += ROWS, tiles--) {
      int share = (int)((lines + tiles - 1) / tiles);
      switch (call.rows - m) {
        case 1: some_rows<1>(call, o, outputs, m, share, next); break;
        case 2: some_rows<2>(call, o, outputs, m, share, next); break;
        case 3: some_rows<3>(call, o, outputs, m, share, next); break;
        default: some_rows<ROWS>(call, o, outputs, m, share, next);
      }
      lines -= share, next += share * call.w_stride;
    }
  }
}
#endif
