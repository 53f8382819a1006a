// Operations on the rows of a step: rows shared among threads where there are many, arithmetic by instruction set (rows.h).
#include "rows.h"

#include <math.h>

#include <string.h>

#include "scratch.h"
#include "tape.h"
#include "team.h"

static const RowOps *ops_for(int64_t x_type) {
#if defined(__x86_64__)
  if (vector_isa() == ISA_AVX512_BF16 && x_type == ROWS_BF16) return rows_avx512_bf16;
  return vector_isa() >= ISA_AVX512 ? rows_avx512[x_type] : rows_avx2[x_type];
#else
  (void)x_type;
  return nullptr;
#endif
}

enum { FEW = 1 << 15 };  // numbers below which one thread is faster

template <class Row> static void each_row(int64_t rows, int64_t numbers, int threads, Row row) {
  int64_t pieces = rows * numbers < FEW ? 1 : team_pieces(threads, rows);
  team(threads, pieces, [&](int64_t piece, int worker) {
    for (int64_t i = rows * piece / pieces; i < rows * (piece + 1) / pieces; i++) row(i, worker);
  });
}

// residual += x (x may be null); y = residual / rms(residual) * weight. x, residual, y [rows, dim]; weight [dim]. strides: numbers
// from one row of residual or y to the next. y may be residual.
NATIVE_API void rows_norm(int x_type, const void *x, void *residual, int64_t stride, const void *weight, void *y, int64_t y_stride,
                          int64_t rows, int64_t dim, float eps, int threads) {
  tape_note(rows_norm, x_type, x, residual, stride, weight, y, y_stride, rows, dim, eps, threads);
  const RowOps *ops = ops_for(x_type);
  int64_t item = x_type == ROWS_F32 ? 4 : 2, bytes = dim * item;
  each_row(rows, dim, threads, [&](int64_t i, int) {
    ops->norm(x ? (const uint8_t *)x + i * bytes : nullptr, (uint8_t *)residual + i * stride * item, weight, (uint8_t *)y + i * y_stride * item, dim, eps);
  });
}

// Queries and keys are normed and rotated; keys and values go to the caches.
NATIVE_API void rows_heads(const HeadsCall *call, int64_t rows, int threads) {
  tape_note(rows_heads, call, rows, threads);
  const RowOps *ops = ops_for(call->x_type);
  each_row(rows, (call->num_heads + 2 * call->num_kv_heads) * call->dim, threads, [&](int64_t i, int) { ops->heads(*call, i); });
}

// The same for MLA: the latent is normed, its key and the queries are rotated, and the cache gets latent and key.
NATIVE_API void rows_latent(const LatentCall *call, int64_t rows, int threads) {
  tape_note(rows_latent, call, rows, threads);
  const RowOps *ops = ops_for(call->x_type);
  each_row(rows, call->num_heads * call->rope_dim + call->latent_dim, threads, [&](int64_t i, int) { ops->latent(*call, i); });
}

// The indexer's keys are normed, rotated and stored; its queries, where there are any, are rotated.
NATIVE_API void rows_index(const IndexKeyCall *call, int64_t rows, int threads) {
  tape_note(rows_index, call, rows, threads);
  const RowOps *ops = ops_for(call->x_type);
  int64_t room = (call->dim * 4 + 63) / 64 * 64;
  uint8_t *work = scratch(threads * room);
  each_row(rows, call->num_heads * call->rope_dim + 4 * call->dim, threads,
           [&](int64_t i, int worker) { ops->index_key(*call, i, work + worker * room); });
}

// gate_up [rows, 2 * width] -> y [rows, width].
NATIVE_API void rows_silu_mul(int x_type, const void *gate_up, void *y, int64_t rows, int64_t width, int threads) {
  tape_note(rows_silu_mul, x_type, gate_up, y, rows, width, threads);
  const RowOps *ops = ops_for(x_type);
  int64_t bytes = width * (x_type == ROWS_F32 ? 4 : 2);
  each_row(rows, width, threads, [&](int64_t i, int) {
    ops->silu_mul((const uint8_t *)gate_up + 2 * i * bytes, (uint8_t *)y + i * bytes, width);
  });
}

// y [rows, width] *= sigmoid(gate); gate [rows, width] or [rows, 1].
NATIVE_API void rows_sigmoid_gate(int x_type, const void *gate, int64_t gate_width, void *y, int64_t rows, int64_t width, int threads) {
  tape_note(rows_sigmoid_gate, x_type, gate, gate_width, y, rows, width, threads);
  const RowOps *ops = ops_for(x_type);
  int64_t item = x_type == ROWS_F32 ? 4 : 2;
  each_row(rows, width, threads, [&](int64_t i, int) {
    ops->sigmoid_gate((const uint8_t *)gate + i * gate_width * item, gate_width != width, (uint8_t *)y + i * width * item, width);
  });
}

// logits [rows, n] -> index int64 [rows, k], weight [rows, k], in falling order.
NATIVE_API void rows_softmax_topk(int x_type, const void *logits, int64_t rows, int64_t n, int64_t k, int renormalize, int64_t *index,
                                  float *weight, int threads) {
  tape_note(rows_softmax_topk, x_type, logits, rows, n, k, renormalize, index, weight, threads);
  const RowOps *ops = ops_for(x_type);
  int64_t bytes = n * (x_type == ROWS_F32 ? 4 : 2), room = (n + 15) / 16 * 16;
  float *work = (float *)scratch(threads * room * sizeof(float));
  each_row(rows, n * k, threads, [&](int64_t i, int worker) {
    ops->softmax_topk((const uint8_t *)logits + i * bytes, n, k, renormalize, index + i * k, weight + i * k, work + worker * room);
  });
}

// DeepSeek-V3's choice of experts (a group has at least two where groups are left out); without a bias DeepSeek-V2's.
NATIVE_API void rows_grouped_topk(const GroupedCall *call, int64_t rows, int threads) {
  tape_note(rows_grouped_topk, call, rows, threads);
  const RowOps *ops = ops_for(ROWS_F32);
  int64_t room = 2 * call->experts + call->groups;
  float *work = (float *)scratch(threads * room * sizeof(float));
  each_row(rows, call->experts * 4, threads, [&](int64_t i, int worker) { ops->grouped_topk(*call, i, work + worker * room); });
}

// y += x, both of x's type.
NATIVE_API void rows_add(int x_type, const void *x, void *y, int64_t rows, int64_t dim, int threads) {
  tape_note(rows_add, x_type, x, y, rows, dim, threads);
  const RowOps *ops = ops_for(x_type);
  int64_t bytes = dim * (x_type == ROWS_F32 ? 4 : 2);
  each_row(rows, dim, threads, [&](int64_t i, int) { ops->add((const uint8_t *)x + i * bytes, (uint8_t *)y + i * bytes, dim); });
}

// y = x in bfloat16.
NATIVE_API void rows_halve(const float *x, bf16 *y, int64_t rows, int64_t dim, int threads) {
  tape_note(rows_halve, x, y, rows, dim, threads);
  const RowOps *ops = ops_for(ROWS_F32);
  each_row(rows, dim, threads, [&](int64_t i, int) { ops->halve(x + i * dim, y + i * dim, dim); });
}

void weigh_rows(int x_type, const int64_t *slot, const float *weight, int64_t slots_per_part, const void *const *part, int64_t parts, void *y,
                int64_t rows, int64_t top_k, int64_t dim, int threads) {
  const RowOps *ops = ops_for(x_type);
  int64_t bytes = dim * (x_type == ROWS_F32 ? 4 : 2), choices = rows * top_k;
  const uint8_t **row = (const uint8_t **)scratch((choices + parts) * sizeof(void *)), **next = row + choices;
  for (int64_t i = 0; i < parts; i++) next[i] = (const uint8_t *)part[i];
  for (int64_t i = 0; i < choices; i++) {
    const uint8_t *&at = next[slot[i] / slots_per_part];
    row[i] = at, at += bytes;
  }
  each_row(rows, dim * top_k, threads, [&](int64_t i, int) {
    ops->weigh((const void *const *)row + i * top_k, weight + i * top_k, top_k, (uint8_t *)y + i * bytes, dim);
  });
}

void weigh_bags(int x_type, const void *const *row, const float *weight, const int64_t *first, void *y, int64_t rows, int64_t dim, int threads) {
  const RowOps *ops = ops_for(x_type);
  int64_t bytes = dim * (x_type == ROWS_F32 ? 4 : 2);
  each_row(rows, rows ? (first[rows] - first[0]) * dim / rows : 0, threads, [&](int64_t i, int) {
    ops->weigh(row + first[i], weight + first[i], first[i + 1] - first[i], (uint8_t *)y + i * bytes, dim);
  });
}

NATIVE_API void rows_weigh(int x_type, const int64_t *slot, const float *weight, int64_t slots_per_part, const void *const *part,
                           int64_t parts, void *y, int64_t rows, int64_t top_k, int64_t dim, int threads) {
  tape_refuse("rows_weigh");
  weigh_rows(x_type, slot, weight, slots_per_part, part, parts, y, rows, top_k, dim, threads);
}

// y = x, rows of `bytes` bytes.
NATIVE_API void rows_copy(const void *x, void *y, int64_t rows, int64_t bytes, int threads) {
  tape_note(rows_copy, x, y, rows, bytes, threads);
  each_row(rows, bytes, threads, [&](int64_t i, int) { memcpy((uint8_t *)y + i * bytes, (const uint8_t *)x + i * bytes, bytes); });
}

// The same, for whoever finds y when this process has ended, at any time: *layer says which layer's rows y holds, -1 while it is written.
NATIVE_API void rows_keep(const void *x, void *y, int64_t *layer, int64_t number, int64_t rows, int64_t bytes) {
  tape_note(rows_keep, x, y, layer, number, rows, bytes);
  __atomic_store_n(layer, (int64_t)-1, __ATOMIC_RELAXED);
  __atomic_thread_fence(__ATOMIC_RELEASE);
  memcpy(y, x, rows * bytes);
  __atomic_store_n(layer, number, __ATOMIC_RELEASE);
}

// y[i] = table[ids[i]], rows of `bytes` bytes; zeros where the table has no such row.
NATIVE_API void rows_gather(const void *table, int64_t table_rows, const int64_t *ids, void *y, int64_t rows, int64_t bytes, int threads) {
  tape_note(rows_gather, table, table_rows, ids, y, rows, bytes, threads);
  each_row(rows, bytes, threads, [&](int64_t i, int) {
    uint8_t *to = (uint8_t *)y + i * bytes;
    if ((uint64_t)ids[i] < (uint64_t)table_rows) memcpy(to, (const uint8_t *)table + ids[i] * bytes, bytes);
    else memset(to, 0, bytes);
  });
}

// What layers/rope.py makes of positions: cos, sin [rows, 2 * planes] of x's type.
NATIVE_API void rows_rope(int x_type, const int64_t *positions, const float *frequency, float scale, void *cos, void *sin, int64_t rows,
                          int64_t planes, int threads) {
  tape_note(rows_rope, x_type, positions, frequency, scale, cos, sin, rows, planes, threads);
  const RowOps *ops = ops_for(x_type);
  int64_t bytes = 2 * planes * (x_type == ROWS_F32 ? 4 : 2);
  each_row(rows, planes * 32, threads, [&](int64_t i, int) {
    ops->rope(positions[i], frequency, scale, (uint8_t *)cos + i * bytes, (uint8_t *)sin + i * bytes, planes);
  });
}

// y [rows, outputs] float32 = x [rows, inputs] of x's type times w [outputs, inputs] float32, transposed, plus bias [outputs] if there
// is one; all in float32.
NATIVE_API void rows_dots(int x_type, const void *x, int64_t x_stride, const float *w, const float *bias, float *y, int64_t rows,
                          int64_t inputs, int64_t outputs, int threads) {
  tape_note(rows_dots, x_type, x, x_stride, w, bias, y, rows, inputs, outputs, threads);
  const RowOps *ops = ops_for(x_type);
  int64_t each = 16, blocks = (outputs + each - 1) / each;  // a block of weights stays near while all rows pass by
  each_row(blocks, rows * each * inputs, threads, [&](int64_t i, int) {
    int64_t first = i * each, count = outputs - first < each ? outputs - first : each;
    ops->dots(x, x_stride, rows, w + first * inputs, inputs, count, y + first, outputs);
    for (int64_t r = 0; bias && r < rows; r++)
      for (int64_t o = first; o < first + count; o++) y[r * outputs + o] += bias[o];
  });
}

// place[i] = where the largest number of row i is, the first of equals. stride: numbers from one row of x to the next.
NATIVE_API void rows_best(int x_type, const void *x, int64_t stride, int64_t *place, int64_t rows, int64_t n, int threads) {
  tape_note(rows_best, x_type, x, stride, place, rows, n, threads);
  const RowOps *ops = ops_for(x_type);
  int64_t bytes = stride * (x_type == ROWS_F32 ? 4 : 2);
  each_row(rows, n, threads, [&](int64_t i, int) { place[i] = ops->best((const uint8_t *)x + i * bytes, n); });
}
