// Attention of single queries whose heads all share one latent (MLA), on matrix tiles: from 16 heads on a tile's rows are full, and what is
// packed of the keys serves all heads. Of bfloat16, and where matrix tiles are faster than other ways (experts_bands).
#pragma once
#include "native.h"

enum { LATENT_CHUNK = 128, LATENT_ROWS = 32 };  // keys whose panels stay near; rows that go through them together

// What ctypes passes.
struct LatentTilesCall {
  int64_t num_sequences, num_heads, key_dim, value_dim, block_size;
  int64_t q_stride;      // numbers from one query to the next; its heads lie side by side
  int64_t key_stride;    // numbers from one cache row to the next
  const int64_t *lens;   // [num_sequences] keys of each, at least 1
  const int64_t *table;  // [num_sequences, table_stride] block numbers
  int64_t table_stride;
  const void *q;     // [num_sequences, heads, key_dim]
  const void *keys;  // the cache; a value is the first part of its key
  void *out;         // [num_sequences, heads, value_dim]
  float scale;
};
