// Attention of single queries over a paged cache: grouped heads, or heads that all share one latent (MLA).
//
// Of a cache row, key head h has key_dim numbers from h * key_dim on, value head h value_dim from h * value_dim on. For MLA the two
// caches are the same memory: a value is the first part of its key.
// A sequence's keys are cut into chunks that depend on its length alone. Each chunk gives its sum of values weighted by
// exp(score - largest), the sum of those weights, and the largest score; they are merged in order. So a result depends neither on
// the company nor on the number of threads.
//
// A sink is a score of no key: it takes part in the softmax of its head, and has no value.
#pragma once
#include "native.h"

enum { CHUNK = 256, MOST_CHUNKS = 64, KEY_TILE = 16, MOST_ROWS = 8 };
enum AttentionType { ATTENTION_F32 = 0, ATTENTION_BF16 = 1 };

// What ctypes passes. Strides are in numbers of x's type.
struct AttentionShape {
  int64_t x_type, num_sequences, num_heads, num_kv_heads, key_dim, value_dim, block_size;
  int64_t key_stride, value_stride;  // from one cache row to the next
  const int64_t *lens;               // [num_sequences] keys of each, at least 1
  const int64_t *table;              // [num_sequences, table_stride] block numbers
  int64_t table_stride;
  int64_t window;  // keys that a query sees, its own included; 0: all. Blocks behind them are not looked at
};

// What ctypes passes to attention_absorb: numbers from one token and one head to the next.
struct QueryStrides {
  int64_t nope_token, nope_head, pe_token, pe_head;
};

// Weights of one row of scores after the softmax.
struct Largest {
  float largest, sum;
};

// What the driver needs from an instruction set, for one type of x.
struct AttentionOps {
  // s[g * s_stride + i] = scale * q[g] . key[i], for i < n <= KEY_TILE. q: rows of q_stride numbers. next: for each key one that is brought
  // nearer meanwhile, n rounded up to a multiple of KEY_TILE / heads of them; or null.
  void (*scores)(const void *q, int64_t q_stride, int64_t heads, const uint8_t *const *key, int n, int64_t dim, float scale, float *s,
                 int64_t s_stride, const uint8_t *const *next);
  // p[i] = exp(s[i] - largest), of x's type; one more, zero, behind an odd n. Both have room for a multiple of 16.
  Largest (*softmax)(float *s, int64_t n, void *p);
  // acc[g * dim + j] += sum over i < n of p[g * p_stride + i] * value[i][j]. n is even but for the last keys of a chunk. next: n
  // values that are brought nearer, one more behind an odd n; or null.
  void (*weigh)(const void *p, int64_t p_stride, int64_t heads, const uint8_t *const *value, int n, int64_t dim, float *acc,
                const uint8_t *const *next);
  // out[j] = acc[j] * factor, as x's type.
  void (*finish)(const float *acc, int64_t dim, float factor, void *out);
  int64_t least_keys, least_values;  // rows of a tile for `scores` (of a single head KEY_TILE) and for `weigh`: with fewer they take longer
};

const AttentionOps *attention_ops(int64_t x_type);  // those of the instruction set in use
extern const AttentionOps *const attention_avx2[2], *const attention_avx512[2];  // by AttentionType
extern const AttentionOps *const attention_avx512_bf16;                          // of bfloat16 x only
