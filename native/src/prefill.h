// Causal attention of prompts over a paged cache: grouped heads, or heads whose keys have a last part in common (MLA).
//
// A sequence's queries are its last tokens. Some queries of all heads that share keys are taken at a time; keys and values come a
// chunk at a time, packed into panels (experts.h), so that both products run on the tiles of the experts; the softmax is kept up to
// date from chunk to chunk. A result depends neither on the company nor on the number of threads.
#pragma once
#include "native.h"

// Rows (a query of a head) that go through the panels together, without matrix tiles and at most; rows of a piece of work, and numbers that it may have in its sums.
enum { STRIP = 24, MOST_STRIP = 32, QUERY_ROWS = 768, MOST_SUMS = 98304 };

// What ctypes passes. Strides are in numbers of x's type, from one token or cache row to the next.
struct PrefillCall {
  int64_t x_type, num_sequences, num_heads, num_kv_heads, key_dim, shared_dim, value_dim, block_size;
  int64_t q_stride, key_stride, shared_stride, value_stride, out_stride;
  const int64_t *starts, *ends;  // [num_sequences] each one's first query in q and out, and the place behind its last; null: one query each, one after another
  const int64_t *lens;   // [num_sequences] keys of each, its queries' included
  const int64_t *table;  // [num_sequences, table_stride] block numbers
  int64_t table_stride;
  const void *q;       // [., heads, key_dim + shared_dim]
  const void *keys;    // of a cache row, key head h has key_dim numbers from h * key_dim on
  const void *shared;  // shared_dim numbers of every key, the same for all heads, behind the others; or null
  const void *values;  // value head h has value_dim numbers from h * value_dim on
  void *out;           // [., heads, value_dim]
  int64_t window;      // keys that a query sees, its own included; 0: all. Blocks behind them are not looked at
  const float *sinks;  // [heads]: a score of no key, which takes part in the softmax; or null
  float scale;         // above 0
};

// What the driver needs from an instruction set, for one type of x.
struct PrefillOps {
  // Words (4 bytes) of up to 64 rows: word w of row i goes to panel[w][i]; rows beyond n are zero.
  void (*pack_keys)(const uint8_t *const *row, int n, int64_t words, uint8_t *panel);
  // Numbers of n rows, 64 columns a panel: a panel for rows of x as experts.h has it. Columns and rows beyond are zero.
  void (*pack_values)(const uint8_t *const *row, int64_t n, int64_t dim, uint8_t *panels, int64_t panel_bytes);
  // p[i] = exp(scale * score i - largest) for i < visible, 0 up to depth; the scores lie in panels of 64, panel_stride apart.
  // Brings largest (minus infinity at first; only this function reads it) and sum up to date, and returns by what earlier weights must
  // be multiplied. p has room for a multiple of 64.
  float (*softmax)(const float *s, int64_t panel_stride, int64_t visible, int64_t depth, float scale, float *largest, float *sum, void *p);
  // acc[m * stride + j] = acc[..] * factor[m] + c[m * 64 + j], 64 columns.
  void (*fold)(const float *c, int rows, const float *factor, float *acc, int64_t stride);
  float unit;  // of `largest`: times this it is the logarithm of a weight
};

extern const PrefillOps *const prefill_avx2[2], *const prefill_avx512[2];  // by XType of experts.h
extern const PrefillOps *const prefill_avx512_bf16;                      // of bfloat16 x only
