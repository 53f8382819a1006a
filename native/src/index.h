// Which keys the queries of sparse attention look at (mla/index.py): scores of index keys, and the largest of them.
//
// score(query, key) = sum over heads of weight * relu(query . key). Some queries of a sequence are taken at a time; its keys come 64 at a
// time, packed into panels (experts.h), so that the products run on the tiles of the experts, and only their weighted sums are kept.
// A choice depends neither on the company nor on the number of threads.
#pragma once
#include "native.h"

enum { INDEX_QUERIES = 8, INDEX_KEYS = 512, INDEX_SCALE_BYTES = 4 };  // of a piece of work; the scale behind a key in FP8
enum { INDEX_ROOM = 4 << 20 };                                        // scores that are kept at a time

// What ctypes passes.
struct IndexCall {
  int64_t x_type, fp8, num_queries, num_heads, dim, topk, block_size;
  int64_t q_stride;         // numbers from one query to the next; its heads lie side by side
  int64_t key_bytes;        // from one cache row to the next
  const void *q;            // [num_queries, heads, dim]
  const float *weight;      // [num_queries, heads]
  const uint8_t *keys;      // the cache: rows of dim numbers of x's type, or of dim e4m3 and a scale (float32)
  const int64_t *lens;      // [num_queries] keys that each sees, at least 1
  const int64_t *sequence;  // [num_queries] whose keys those are; null: query i is of sequence i
  const int64_t *table;     // [., table_stride] block numbers of each sequence
  int64_t table_stride;
  int64_t *rows;    // [num_queries, topk] the chosen rows of the cache in the order of positions, then zeros
  int64_t *counts;  // [num_queries] how many are chosen
};

// What the driver needs from an instruction set, for one type of x.
struct IndexOps {
  // s[j] = sum over rows m of weight[m] * max(c[m * 64 + j], 0), for 64 columns; added up in the order of the rows.
  void (*weighted_relu)(const float *c, int64_t rows, const float *weight, float *s);
  // A key in FP8 as x's type.
  void (*widen)(const uint8_t *key, int64_t dim, void *out);
};

extern const IndexOps *const index_avx2[2], *const index_avx512[2];  // by XType of experts.h
