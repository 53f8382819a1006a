// The part of selftest.cpp for attention of prompts and for sampling. Included in its namespace, after selftest_layers.h.
#include "prefill.h"
#include "sampling.h"

NATIVE_API void attention_prefill(const PrefillCall *call, int threads);
NATIVE_API void sampling_rows(const SampleCall *call, int threads);

namespace {

// Sequences of (queries, keys); queries and results lie in the order of the sequences.
void test_prefill(int x_type, int64_t heads, int64_t kv_heads, int64_t dim, int64_t shared, int64_t value_dim,
                  std::vector<std::vector<int64_t>> sequences, int threads, int64_t window = 0) {
  const int64_t size = 4, num = (int64_t)sequences.size(), width = dim + shared;
  std::vector<int64_t> starts, ends, lens;
  int64_t longest = 0, blocks = 0, tokens = 0;
  for (auto &one : sequences) {
    starts.push_back(tokens), ends.push_back(tokens += one[0]), lens.push_back(one[1]);
    longest = one[1] > longest ? one[1] : longest, blocks += (one[1] + size - 1) / size;
  }
  int64_t columns = (longest + size - 1) / size, next = blocks;
  std::vector<int64_t> table(num * columns);
  for (int64_t b = 0; b < num; b++)
    for (int64_t i = 0; i * size < lens[b]; i++) {
      bool gone = window && (i + 1) * size <= lens[b] - (ends[b] - starts[b]) + 1 - window;
      table[b * columns + i] = --next;
      if (gone) table[b * columns + i] = -1000000;  // must not be looked at
    }
  Rows q(x_type, tokens, heads * width, heads * width), keys(x_type, blocks * size, kv_heads * dim, kv_heads * dim);
  Rows common(x_type, blocks * size, shared, shared), values(x_type, blocks * size, kv_heads * value_dim, kv_heads * value_dim);
  std::vector<uint8_t> out(tokens * heads * value_dim * (x_type == X_F32 ? 4 : 2));
  std::vector<float> sinks;
  for (int64_t h = 0; h < heads; h++) sinks.push_back(number());
  PrefillCall call = {x_type, num, heads, kv_heads, dim, shared, value_dim, size, heads * width, kv_heads * dim, shared, kv_heads * value_dim,
                      heads * value_dim, starts.data(), ends.data(), lens.data(), table.data(), columns, q.bytes.data(), keys.bytes.data(),
                      common.bytes.data(), values.bytes.data(), out.data(), window, window ? sinks.data() : nullptr, .5f};
  attention_prefill(&call, threads);
  for (int64_t b = 0; b < num; b++)
    for (int64_t t = starts[b]; t < ends[b]; t++)
      for (int64_t h = 0; h < heads; h++) {
        int64_t kv = h / (heads / kv_heads);
        std::vector<double> wanted(value_dim);
        double sum = window ? exp(sinks[h]) : 0;
        int64_t own = lens[b] - (ends[b] - t);
        for (int64_t i = window && own >= window ? own - window + 1 : 0; i <= own; i++) {
          int64_t row = table[b * columns + i / size] * size + i % size;
          double weight = exp(.5 * (dot(q.value[t], h * width, keys.value[row], kv * dim, dim) + dot(q.value[t], h * width + dim, common.value[row], 0, shared)));
          sum += weight;
          for (int64_t d = 0; d < value_dim; d++) wanted[d] += weight * values.value[row][kv * value_dim + d];
        }
        for (int64_t d = 0; d < value_dim; d++)
          expect_near(read(out, x_type, (t * heads + h) * value_dim + d), (float)(wanted[d] / sum), 1, "prefill");
      }
}

// The rows want different things; here only memory and the range of the tokens are looked at.
void test_sampling(int logit_type, int64_t rows, int64_t tokens, int threads) {
  Rows logits(logit_type, rows, tokens, tokens);
  std::vector<int64_t> random, top_k, position, has, start, ids, token(rows, -1);
  std::vector<float> temperature, top_p, min_p, value, penalty;
  std::vector<uint64_t> key;
  std::vector<uint32_t> mask((tokens + 31) / 32, 0x5a5a5a5b);
  std::vector<int64_t> mask_of;
  for (int64_t r = 0; r < rows; r++) {
    mask_of.push_back(r % 6 == 1 ? 0 : -1);
    random.push_back(r % 7 != 3), top_k.push_back(r % 3 ? 0 : 1 + r % tokens), position.push_back(r), has.push_back(r % 5 == 4);
    temperature.push_back(.1f + r % 4), top_p.push_back(r % 2 ? 1 : .7f), min_p.push_back(r % 11 == 5 ? .2f : 0), key.push_back(r * 0x123456789u);
    start.push_back(ids.size());
    for (int64_t i = r % 4; r % 5 > 2 && i < tokens; i += 3) ids.push_back(i), value.push_back(number());
  }
  start.push_back(ids.size());
  for (size_t i = 0; i < 4 * ids.size(); i++) penalty.push_back(1 + fabsf(number()));
  for (bool edits : {false, true}) {
    auto some = [&](const int64_t *array) { return edits ? array : nullptr; };
    SampleCall call = {logit_type, rows, tokens, tokens, logits.bytes.data(), random.data(), temperature.data(), top_p.data(), min_p.data(), top_k.data(),
                       key.data(), position.data(), mask_of.data(), mask.data(), some(has.data()), some(start.data()), ids.data(), nullptr, nullptr, some(start.data()), ids.data(),
                       value.data(), some(start.data()), ids.data(), penalty.data(), (int64_t)ids.size(), (int64_t)mask.size(), token.data()};
    for (int forbids : {0, 1}) {
      call.forbidden_start = forbids ? some(start.data()) : nullptr, call.forbidden = ids.data();
      sampling_rows(&call, threads);
      for (int64_t one : token)
        if (one < 0 || one >= tokens) failures++, printf("sampling: %d of %d\n", (int)one, (int)tokens);
    }
  }
}

int test_prompts() {
  int count = 0;
  for (int threads : {1, 2})
    for (int x_type : {X_F32, X_BF16}) {
      for (auto &sequences : {std::vector<std::vector<int64_t>>{{1, 1}}, {{3, 3}, {0, 5}, {2, 259}}, {{30, 70}, {5, 129}}})
        for (int64_t dim : {2, 36, 64})
          for (int64_t group : {1, 7})
            test_prefill(x_type, 2 * group, 2, dim, 0, dim + 1, sequences, threads, 9), test_prefill(x_type, group, 1, dim, 6, 70, sequences, threads), count += 2;
      for (int64_t tokens : {1, 5, 128, 700, 3001})
        for (int64_t rows : {0, 1, 40}) test_sampling(x_type, rows, tokens, threads), count++;
    }
  return count;
}

}  // namespace
