// The part of selftest.cpp for the indexer of sparse attention. Included in its namespace, after selftest_layers.h.
#include "index.h"

NATIVE_API void rows_index(const IndexKeyCall *call, int64_t rows, int threads);
NATIVE_API void index_choose(const IndexCall *call, int threads);

namespace {

// Sequences of (queries, keys). Keys are placed as a model would, and what is chosen is compared with scores of what was placed.
void test_index(int x_type, bool fp8, int64_t heads, int64_t dim, int64_t rope, int64_t topk, std::vector<std::vector<int64_t>> sequences, int threads) {
  const int64_t size = 4, item = x_type == X_F32 ? 4 : 2, key_bytes = fp8 ? dim + 4 : dim * item;
  std::vector<int64_t> lens, whose, table, slots, next_slot;
  int64_t columns = 0, blocks = 0, queries = 0;
  for (auto &one : sequences) columns = (one[1] + size - 1) / size > columns ? (one[1] + size - 1) / size : columns;
  table.resize(sequences.size() * columns);
  for (size_t b = 0; b < sequences.size(); b++) {
    for (int64_t i = 0; i * size < sequences[b][1]; i++) table[b * columns + i] = blocks++;
    for (int64_t i = 0; i < sequences[b][1]; i++) slots.push_back(table[b * columns + i / size] * size + i % size);
    for (int64_t i = 0; i < sequences[b][0]; i++) lens.push_back(sequences[b][1] - sequences[b][0] + i + 1), whose.push_back(b), queries++;
  }
  int64_t keys = (int64_t)slots.size();
  std::vector<uint8_t> cache(blocks * size * key_bytes, 0xff);
  Rows key(x_type, keys, dim, dim), norm(x_type, 1, dim, dim), bias(x_type, 1, dim, dim), cos(x_type, keys, rope, rope), sin(x_type, keys, rope, rope);
  Rows turned(x_type, keys, heads * dim, heads * dim), q(x_type, queries, heads * dim, heads * dim);
  IndexKeyCall place = {x_type, fp8, heads, dim, rope, turned.bytes.data(), heads * dim, key.bytes.data(), dim, norm.bytes.data(), bias.bytes.data(),
                        cos.bytes.data(), sin.bytes.data(), slots.data(), cache.data(), key_bytes, 1e-6f};
  rows_index(&place, keys, threads);
  std::vector<float> weight;
  for (int64_t i = 0; i < queries * heads; i++) weight.push_back(number());
  std::vector<int64_t> rows(queries * topk, -1), counts(queries, -1);
  IndexCall call = {x_type, fp8, queries, heads, dim, topk, size, heads * dim, key_bytes, q.bytes.data(), weight.data(), cache.data(),
                    lens.data(), whose.data(), table.data(), columns, rows.data(), counts.data()};
  index_choose(&call, threads);
  auto stored = [&](int64_t row, int64_t d) {
    if (!fp8) return read(cache, x_type, row * dim + d);
    float scale;
    memcpy(&scale, &cache[row * key_bytes + dim], 4);
    int byte = cache[row * key_bytes + d], exponent = byte >> 3 & 15, mantissa = byte & 7;
    float x = exponent ? ldexpf(1 + mantissa / 8.f, exponent - 7) : ldexpf(mantissa / 8.f, -6);
    return (byte & 128 ? -x : x) * scale;
  };
  for (int64_t i = 0; i < queries; i++) {
    int64_t wanted = lens[i] < topk ? lens[i] : topk;
    double least = INFINITY, most = -INFINITY, size_of = 0;
    for (int64_t at = 0, chosen = 0; at < lens[i]; at++) {
      int64_t row = table[whose[i] * columns + at / size] * size + at % size;
      double score = 0;
      for (int64_t h = 0; h < heads; h++) {
        double product = 0;
        for (int64_t d = 0; d < dim; d++) product += (double)q.value[i][h * dim + d] * stored(row, d);
        score += product > 0 ? product * weight[i * heads + h] : 0, size_of += fabs(product * weight[i * heads + h]);
      }
      if (chosen < wanted && rows[i * topk + chosen] == row) least = score < least ? score : least, chosen++;
      else most = score > most ? score : most;
      if (at + 1 == lens[i] && chosen != wanted) failures++, printf("index: %d of %d chosen\n", (int)chosen, (int)wanted);
    }
    if (counts[i] != wanted || most > least + 1e-5 * size_of) failures++, printf("index: %g is not chosen, %g is\n", most, least);
  }
}

int test_indexes() {
  int count = 0;
  for (int threads : {1, 2})
    for (int x_type : {X_F32, X_BF16})
      for (bool fp8 : {false, true})
        for (auto &sequences : {std::vector<std::vector<int64_t>>{}, {{1, 1}}, {{1, 70}, {1, 3}}, {{9, 140}, {30, 30}}})
          for (int64_t heads : {1, 64, 100})
            for (int64_t dim : {4, 36, 64})
              for (int64_t topk : {1, 33}) test_index(x_type, fp8, heads, dim, dim > 4 ? dim - 6 : 2, topk, sequences, threads), count++;
  return count;
}

}  // namespace
