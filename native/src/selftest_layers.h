// The part of selftest.cpp for what surrounds the experts: attention, linear layers, operations on rows. Included in its namespace.
#include "attention.h"
#include "linear.h"
#include "rows.h"

NATIVE_API void attention_decode(const AttentionShape *s, const void *q, int64_t q_stride, const void *keys, const void *values,
                                 float scale, const float *sinks, void *out, int threads);
NATIVE_API void attention_absorb(int x_type, const void *q_nope, const void *q_pe, const QueryStrides *strides, const void *w, void *out,
                                 int64_t tokens, int64_t heads, int64_t nope, int64_t latent, int64_t rope, int threads);
NATIVE_API void attention_expand(int x_type, const void *x, const void *w, void *out, int64_t tokens, int64_t heads, int64_t latent,
                                 int64_t values, int threads);
NATIVE_API void linear_bf16(const void *x, int64_t x_stride, const void *w, int64_t w_stride, const void *bias, void *y,
                            int64_t y_stride, int64_t rows, int64_t inputs, int64_t outputs, int threads);
NATIVE_API void linear_bf16_best(const void *x, int64_t x_stride, const void *w, int64_t w_stride, int64_t *place, int64_t rows,
                                 int64_t inputs, int64_t outputs, int threads);
NATIVE_API void linear_packed_fill(int64_t x_type, int64_t format, uint8_t *packed, const void *weight, const float *scale, int64_t scale_rows,
                                   int64_t inputs, int64_t outputs, int threads);
NATIVE_API void linear_packed(int64_t x_type, int64_t format, const uint8_t *packed, const void *x, int64_t x_stride, const void *bias,
                              void *y, int64_t y_stride, int64_t rows, int64_t inputs, int64_t outputs, int threads);
NATIVE_API void rows_norm(int x_type, const void *x, void *residual, int64_t stride, const void *weight, void *y, int64_t y_stride,
                          int64_t rows, int64_t dim, float eps, int threads);
NATIVE_API void rows_heads(const HeadsCall *call, int64_t rows, int threads);
NATIVE_API void rows_latent(const LatentCall *call, int64_t rows, int threads);
NATIVE_API void rows_silu_mul(int x_type, const void *gate_up, void *y, int64_t rows, int64_t width, int threads);
NATIVE_API void rows_grouped_topk(const GroupedCall *call, int64_t rows, int threads);
NATIVE_API void rows_softmax_topk(int x_type, const void *logits, int64_t rows, int64_t n, int64_t k, int renormalize, int64_t *index,
                                  float *weight, int threads);

namespace {

float dot(const std::vector<float> &a, int64_t at, const std::vector<float> &b, int64_t from, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; i++) sum += a[at + i] * b[from + i];
  return (float)sum;
}

void test_attention(int x_type, int64_t heads, int64_t kv_heads, int64_t dim, std::vector<int64_t> lens, int threads, int64_t window = 0) {
  const int64_t size = 4, num = (int64_t)lens.size(), item = x_type == X_F32 ? 4 : 2;
  int64_t longest = 0, blocks = 0;
  for (int64_t len : lens) longest = len > longest ? len : longest, blocks += (len + size - 1) / size;
  int64_t columns = (longest + size - 1) / size, next = blocks;
  std::vector<int64_t> table(num * columns);
  for (int64_t b = 0; b < num; b++)
    for (int64_t i = 0; i * size < lens[b]; i++) table[b * columns + i] = --next;
  Rows keys(x_type, blocks * size, kv_heads * dim, kv_heads * dim), values(x_type, blocks * size, kv_heads * dim, kv_heads * dim);
  Rows q(x_type, num, heads * dim, heads * dim);
  AttentionShape s = {x_type, num, heads, kv_heads, dim, dim, size, kv_heads * dim, kv_heads * dim, lens.data(), table.data(), columns, window};
  std::vector<uint8_t> out(num * heads * dim * item);
  std::vector<float> sinks;
  for (int64_t h = 0; window && h < heads; h++) sinks.push_back(number());
  for (int64_t b = 0; window && b < num; b++)
    for (int64_t i = 0; (i + 1) * size <= lens[b] - window; i++) table[b * columns + i] = -1000000;  // must not be looked at
  attention_decode(&s, q.bytes.data(), heads * dim, keys.bytes.data(), values.bytes.data(), .5f, window ? sinks.data() : nullptr, out.data(), threads);
  for (int64_t b = 0; b < num; b++)
    for (int64_t h = 0; h < heads; h++) {
      int64_t at = h / (heads / kv_heads) * dim;
      std::vector<double> wanted(dim);
      double sum = window ? exp(sinks[h]) : 0;
      for (int64_t i = window && lens[b] > window ? lens[b] - window : 0; i < lens[b]; i++) {
        int64_t row = table[b * columns + i / size] * size + i % size;
        double weight = exp(.5 * dot(q.value[b], h * dim, keys.value[row], at, dim));
        sum += weight;
        for (int64_t d = 0; d < dim; d++) wanted[d] += weight * values.value[row][at + d];
      }
      for (int64_t d = 0; d < dim; d++) expect_near(read(out, x_type, (b * heads + h) * dim + d), (float)(wanted[d] / sum), 1, "attention");
    }
}

void test_latent_space(int x_type, int64_t tokens, int64_t heads, int64_t nope, int64_t latent, int64_t rope, int64_t values, int threads) {
  const int64_t item = x_type == X_F32 ? 4 : 2;
  const QueryStrides strides = {heads * nope, nope, heads * rope, rope};
  Rows q(x_type, tokens, heads * nope, heads * nope), pe(x_type, tokens, heads * rope, heads * rope);
  Rows up(x_type, heads * nope, latent, latent), down(x_type, heads * values, latent, latent), x(x_type, tokens, heads * latent, heads * latent);
  std::vector<uint8_t> wide(tokens * heads * (latent + rope) * item), out(tokens * heads * values * item);
  attention_absorb(x_type, q.bytes.data(), pe.bytes.data(), &strides, up.bytes.data(), wide.data(), tokens, heads, nope, latent, rope, threads);
  attention_expand(x_type, x.bytes.data(), down.bytes.data(), out.data(), tokens, heads, latent, values, threads);
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t h = 0; h < heads; h++) {
      for (int64_t c = 0; c < latent; c++) {
        double sum = 0;
        for (int64_t n = 0; n < nope; n++) sum += q.value[t][h * nope + n] * up.value[h * nope + n][c];
        expect_near(read(wide, x_type, (t * heads + h) * (latent + rope) + c), (float)sum, 1, "absorb");
      }
      for (int64_t p = 0; p < rope; p++)
        expect_near(read(wide, x_type, (t * heads + h) * (latent + rope) + latent + p), pe.value[t][h * rope + p], 0, "absorb");
      for (int64_t v = 0; v < values; v++)
        expect_near(read(out, x_type, (t * heads + h) * values + v), dot(x.value[t], h * latent, down.value[h * values + v], 0, latent), 1, "expand");
    }
}

void test_linear(int64_t rows, int64_t inputs, int64_t outputs, int threads) {
  Rows x(X_BF16, rows, inputs, inputs), w(X_BF16, outputs, inputs, inputs), bias(X_BF16, 1, outputs, outputs);
  std::vector<uint8_t> y(rows * outputs * 2);
  std::vector<int64_t> best(rows);
  linear_bf16(x.bytes.data(), inputs, w.bytes.data(), inputs, bias.bytes.data(), y.data(), outputs, rows, inputs, outputs, threads);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t o = 0; o < outputs; o++)
      expect_near(read(y, X_BF16, r * outputs + o), dot(x.value[r], 0, w.value[o], 0, inputs) + bias.value[0][o], 1, "linear");
  linear_bf16(x.bytes.data(), inputs, w.bytes.data(), inputs, nullptr, y.data(), outputs, rows, inputs, outputs, threads);
  linear_bf16_best(x.bytes.data(), inputs, w.bytes.data(), inputs, best.data(), rows, inputs, outputs, threads);
  for (int64_t r = 0; r < rows; r++) {
    int64_t wanted = 0;
    for (int64_t o = 0; o < outputs; o++)
      if (read(y, X_BF16, r * outputs + o) > read(y, X_BF16, r * outputs + wanted)) wanted = o;
    if (best[r] != wanted) failures++, printf("best: %d instead of %d\n", (int)best[r], (int)wanted);
  }
}

// Numbers are compared in tests/native; here only memory is.
void test_linear_packed(int x_type, int format, int64_t rows, int64_t inputs, int64_t outputs, int threads) {
  const int64_t blocks = (inputs + 127) / 128, scale_rows = format == W_INT8 ? 1 : 128;
  Rows x(x_type, rows, inputs, inputs), bias(x_type, 1, outputs, outputs), scale(X_F32, (outputs + scale_rows - 1) / scale_rows, blocks, blocks);
  const int64_t item = x_type == X_F32 ? 4 : 2, groups = (inputs + K_GROUP - 1) / K_GROUP;
  const bool halves = format >= W_MXFP4 && format != W_BF16;
  const int64_t weight_item = format == W_PLAIN ? item : format == W_BF16 ? 2 : 1;
  std::vector<uint8_t> weight(halves ? outputs * groups * K_GROUP / 2 : outputs * inputs * weight_item, 3), y(rows * outputs * item);
  std::vector<uint8_t> packed((outputs + 63) / 64 * Multiplier{nullptr, nullptr, x_type, format, 0}.panel_bytes(inputs));
  std::vector<uint16_t> words(outputs * groups * (format == W_INT4_ZERO ? 2 : 1), 0x3c00);
  const float *scales = halves ? (const float *)words.data() : (const float *)scale.bytes.data();
  linear_packed_fill(x_type, format, packed.data(), weight.data(), scales, scale_rows, inputs, outputs, threads);
  linear_packed(x_type, format, packed.data(), x.bytes.data(), inputs, bias.bytes.data(), y.data(), outputs, rows, inputs, outputs, threads);
}

void test_rows(int x_type, int64_t rows, int64_t dim, int threads) {
  const int64_t heads = 3, kv_heads = 2, nope = 4;
  Rows x(x_type, rows, dim, dim), residual(x_type, rows, dim, dim), weight(x_type, kv_heads + heads, dim, dim), y(x_type, rows, dim, dim);
  rows_norm(x_type, x.bytes.data(), residual.bytes.data(), dim, weight.bytes.data(), y.bytes.data(), dim, rows, dim, 1e-6f, threads);
  rows_silu_mul(x_type, x.bytes.data(), y.bytes.data(), rows, dim / 2, threads);
  std::vector<int64_t> slots, index(rows * (dim / 2 + 1));
  std::vector<float> weights(index.size());
  for (int64_t r = 0; r < rows; r++) slots.push_back(rows - 1 - r);
  Rows scores(X_F32, rows, 3 * dim + 3, 3 * dim + 3), bias(X_F32, 1, 3 * dim + 3, 3 * dim + 3);
  for (int64_t kept : {1, 3}) {
    GroupedCall grouped = {3 * dim + 3, 3, kept, dim / 2 + 1, (const float *)scores.bytes.data(), (const float *)bias.bytes.data(), index.data(),
                           weights.data(), 1, 0, 2.5f, 0};
    for (const float *with : {grouped.bias, (const float *)nullptr}) {
      grouped.bias = with, grouped.softmax = kept == 3;
      rows_grouped_topk(&grouped, rows, threads);
      for (int64_t i : index)
        if (i < 0 || i >= 3 * dim + 3) failures++, printf("grouped topk: %d\n", (int)i);
    }
  }
  for (int renormalize : {0, 1})
    rows_softmax_topk(x_type, x.bytes.data(), rows, dim, dim / 2 + 1, renormalize, index.data(), weights.data(), threads);
  for (int64_t i : index)
    if (i < 0 || i >= dim) failures++, printf("topk: %d\n", (int)i);
  if (dim % 2) return;
  Rows qkv(x_type, rows, (heads + 2 * kv_heads) * dim, (heads + 2 * kv_heads) * dim), cos(x_type, rows, dim, dim), sin(x_type, rows, dim, dim);
  Rows k(x_type, rows, kv_heads * dim, kv_heads * dim), v(x_type, rows, kv_heads * dim, kv_heads * dim);
  HeadsCall call = {x_type, heads, kv_heads, dim, weight.bytes.data(), qkv.bytes.data(), cos.bytes.data(), sin.bytes.data(), slots.data(),
                    k.bytes.data(), v.bytes.data(), kv_heads * dim, kv_heads * dim, 1e-6f};
  rows_heads(&call, rows, threads);
  const int64_t latent = 5, key = nope + dim;
  Rows q(x_type, rows, heads * key, heads * key), down(x_type, rows, latent + dim, latent + dim), cache(x_type, rows, latent + dim, latent + dim);
  Rows norm(x_type, 1, latent, latent);
  LatentCall mla = {x_type, heads, nope, dim, latent, q.bytes.data(), heads * key, down.bytes.data(), latent + dim, norm.bytes.data(),
                    cos.bytes.data(), sin.bytes.data(), slots.data(), cache.bytes.data(), latent + dim, 1e-6f};
  rows_latent(&mla, rows, threads);
}

int test_layers() {
  int count = 0;
  for (int threads : {1, 2}) {
    for (int x_type : {X_F32, X_BF16}) {
      for (auto &lens : {std::vector<int64_t>{1}, {3, 700, 17}, {256, 257}})
        for (int64_t dim : {1, 36, 64, 130})
          for (int64_t group : {1, 7})
            test_attention(x_type, 2 * group, 2, dim, lens, threads), test_attention(x_type, group, 1, dim, lens, threads, 9), count += 2;
      for (int64_t tokens : {1, 2, 7, 20}) test_latent_space(x_type, tokens, 3, 10, 36, 6, 19, threads), test_latent_space(x_type, tokens, 2, 32, 64, 8, 16, threads), count += 2;
      for (int64_t rows : {0, 1, 5, 2000})
        for (int64_t dim : {1, 2, 7, 32, 66}) test_rows(x_type, rows, dim, threads), count++;
    }
    for (int x_type : {X_F32, X_BF16})
      for (int format : {W_PLAIN, W_FP8, W_INT8, W_MXFP4, W_INT4, W_INT4_ZERO})
        for (int64_t rows : {0, 1, 5, 13, 40, 100})
          for (int64_t inputs : {2, 130, 256})
            for (int64_t outputs : {1, 64, 150})
              test_linear_packed(x_type, format, rows, inputs, outputs, threads), count++;
    for (int64_t rows : {0, 1, 2, 3, 4, 6, 23, 24, 31, 60})
      for (int64_t inputs : {1, 2, 31, 64, 130})
        for (int64_t outputs : {1, 5, 64, 200}) test_linear(rows, inputs, outputs, threads), count++;
    test_linear(7, 1100, 40, threads), count++;
  }
  return count;
}

}  // namespace
