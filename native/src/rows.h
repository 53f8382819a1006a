// Small operations on the rows of a step, each in one pass, with the roundings of torch's operations one after another.
#pragma once
#include "native.h"

enum RowType { ROWS_F32 = 0, ROWS_BF16 = 1 };

// What ctypes passes to rows_heads. Strides in numbers.
struct HeadsCall {
  int64_t x_type, num_heads, num_kv_heads, dim;
  const void *norm;  // [num_heads + num_kv_heads, dim] or null
  void *x;           // [rows, num_heads + 2 * num_kv_heads, dim]: queries, keys, values; queries are changed in place
  const void *cos, *sin;  // [rows, dim]; the first half of sin is negative
  const int64_t *slots;   // [rows]
  void *k_cache, *v_cache;
  int64_t k_stride, v_stride;
  float eps;
};

// What ctypes passes to rows_latent (MLA). Strides in numbers.
struct LatentCall {
  int64_t x_type, num_heads, nope_dim, rope_dim, latent_dim;
  void *q;             // [rows, num_heads, nope_dim + rope_dim]: the rotated part is changed in place
  int64_t q_stride;    // from one row to the next
  const void *latent;  // [rows, latent_dim + rope_dim]
  int64_t latent_stride;
  const void *norm;       // [latent_dim]
  const void *cos, *sin;  // [rows, rope_dim]; the first half of sin is negative
  const int64_t *slots;   // [rows]
  void *cache;
  int64_t cache_stride;
  float eps;
};

// What ctypes passes to rows_index (sparse attention's indexer). Strides in numbers, but for the cache's.
struct IndexKeyCall {
  int64_t x_type, fp8, num_heads, dim, rope_dim;
  void *q;             // [rows, num_heads, dim]: the rotated part, the first, is changed in place; no heads: only keys are placed
  int64_t q_stride;    // from one row to the next
  const void *key;     // [rows, dim]
  int64_t key_stride;
  const void *norm, *bias;  // [dim] of a layer norm
  const void *cos, *sin;    // [rows, rope_dim]; the first half of sin is negative
  const int64_t *slots;     // [rows]
  uint8_t *cache;           // rows of dim numbers of x's type, or of dim e4m3 and a scale (float32)
  int64_t cache_bytes;      // from one row to the next
  float eps;
};

// What ctypes passes to rows_grouped_topk: with a bias sigmoid scores (or, where softmax is set, softmax ones) and the best `kept` of
// `groups` by the sum of their two best biased scores; without one softmax scores and groups by their best. Weights are divided by
// their sum, or by `smallest` if that is more.
struct GroupedCall {
  int64_t experts, groups, kept, k;
  const float *logits, *bias;  // [rows, experts], [experts]
  int64_t *index;              // [rows, k]
  float *weight;               // [rows, k]
  int64_t renormalize, softmax;
  float scale, smallest;
};

struct RowOps {
  // residual += x (if there is x); y = residual / rms(residual) * weight.
  void (*norm)(const void *x, void *residual, const void *weight, void *y, int64_t dim, float eps);
  // Norm and rotation of one row's queries and keys; keys and values go to the caches.
  void (*heads)(const HeadsCall &call, int64_t row);
  // Norm of one row's latent and rotation of its key, to the cache; rotation of its queries.
  void (*latent)(const LatentCall &call, int64_t row);
  // Norm, rotation and writing of one row's index key; rotation of its index queries. work: dim numbers of x's type.
  void (*index_key)(const IndexKeyCall &call, int64_t row, void *work);
  // y = silu(gate_up[0..width)) * gate_up[width..2 width).
  void (*silu_mul)(const void *gate_up, void *y, int64_t width);
  // y *= sigmoid(gate), with a number of the gate for each of y, or one for all.
  void (*sigmoid_gate)(const void *gate, bool one, void *y, int64_t width);
  // The k largest of n numbers, and their softmax over the chosen (renormalize) or over all.
  void (*softmax_topk)(const void *logits, int64_t n, int64_t k, bool renormalize, int64_t *index, float *weight, float *work);
  // One row; work: 2 * experts + groups numbers.
  void (*grouped_topk)(const GroupedCall &call, int64_t row, float *work);
  // y += x.
  void (*add)(const void *x, void *y, int64_t dim);
  // y = the weighted sum of n rows.
  void (*weigh)(const void *const *rows, const float *weight, int64_t n, void *y, int64_t dim);
  // cos and sin of one position's angles, [2 * planes]; the first half of sin is negative.
  void (*rope)(int64_t position, const float *frequency, float scale, void *cos, void *sin, int64_t planes);
  // y[o] = x . w[o], for o < outputs.
  // y[r][o] = x[r] . w[o]; rows of x and y begin so many numbers apart. The order of a sum is the same for any number of rows.
  void (*dots)(const void *x, int64_t x_stride, int64_t rows, const float *w, int64_t inputs, int64_t outputs, float *y, int64_t y_stride);
  // Where the largest of n numbers is, the first of equals; NaN is not looked at.
  int64_t (*best)(const void *x, int64_t n);
  // y = x, rounded.
  void (*halve)(const float *x, bf16 *y, int64_t dim);
};

extern const RowOps *const rows_avx2[2], *const rows_avx512[2];  // by RowType
extern const RowOps *const rows_avx512_bf16;                     // of bfloat16 only

// y[t] = sum over k of weight[t, k] * the row of that choice, in the order of k. slot int64 [T, K]; choice (t, k) is in part
// slot / slots_per_part, whose rows lie at part[.] in the order of tokens and choices. Rows and y have x's type.
void weigh_rows(int x_type, const int64_t *slot, const float *weight, int64_t slots_per_part, const void *const *part, int64_t parts, void *y,
                int64_t rows, int64_t top_k, int64_t dim, int threads);
// y[i] = the weighted sum of rows first[i] to first[i + 1], in their order.
void weigh_bags(int x_type, const void *const *row, const float *weight, const int64_t *first, void *y, int64_t rows, int64_t dim, int threads);
