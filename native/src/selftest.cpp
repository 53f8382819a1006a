// Runs every kernel on memory of just the size it asks for, to be built with -fsanitize=address,undefined (tests/native).
// Results are compared with plain loops, roughly: the exact comparison is in tests/moe_kernels.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vector>

#include "choice.h"
#include "selftest_numbers.h"

NATIVE_API void native_choose(const KernelChoice *choice);
NATIVE_API void experts_shape(ExpertShape *s);
NATIVE_API void experts_pack(const ExpertShape *s, uint8_t *slot, const void *gate, const void *up, const void *down,
                             const float *gate_scale, const float *up_scale, const float *down_scale, int64_t scale_rows, int threads);
NATIVE_API void experts_rows(const ExpertShape *s, const uint8_t *weights, const void *x, const int32_t *rows, int64_t stride, void *y,
                             int threads);
NATIVE_API void experts_tokens(const ExpertShape *s, const uint8_t *weights, const void *x, const int64_t *slot, const float *weight,
                               int64_t first_slot, int64_t num_tokens, int64_t top_k, void *y, int y_type, int threads);

namespace {

// A matrix in the form that experts_pack takes, and its numbers.
struct Matrix {
  std::vector<float> value, scale;
  std::vector<uint8_t> bytes;
  Matrix(int64_t outputs, int64_t inputs, int x_type, int format) {
    if (format == W_BF16) x_type = X_BF16, format = W_PLAIN;
    if (format >= W_MXFP4) {
      halves(outputs, inputs, format);
      return;
    }
    int64_t blocks = (inputs + K_BLOCK - 1) / K_BLOCK;
    for (int64_t i = 0; i < outputs * blocks; i++) scale.push_back(.01f + .001f * fabsf(number()));
    for (int64_t o = 0; o < outputs; o++)
      for (int64_t k = 0; k < inputs; k++) {
        float x = number() * .5f;
        if (format == W_INT8) {
          int8_t q = (int8_t)(x * 100);
          bytes.push_back((uint8_t)q);
          x = q * scale[o * blocks + k / K_BLOCK];
        } else if (format == W_FP8) {  // powers of two
          int e = (int)(fabsf(x) * 16);
          bytes.push_back((uint8_t)((x < 0 ? 0x80 : 0) | (e + 1) << 3));
          x = (x < 0 ? -1 : 1) * ldexpf(1, e - 6) * scale[o * blocks + k / K_BLOCK];
        } else if (x_type == X_BF16) {
          bf16 q = rounded(x);
          bytes.insert(bytes.end(), (uint8_t *)&q, (uint8_t *)&q + 2);
          x = widened(q);
        } else {
          bytes.insert(bytes.end(), (uint8_t *)&x, (uint8_t *)&x + 4);
        }
        value.push_back(x);
      }
  }

  // Codes of 4 bits, two in a byte, rows padded to groups of 32.
  void halves(int64_t outputs, int64_t inputs, int format) {
    const float e2m1[8] = {0, .5f, 1, 1.5f, 2, 3, 4, 6};
    int64_t padded = (inputs + K_GROUP - 1) / K_GROUP * K_GROUP;
    std::vector<uint16_t> words;
    for (int64_t o = 0; o < outputs; o++)
      for (int64_t k = 0; k < padded; k++) {
        int exponent = -4 - (int)((o + k / K_GROUP) % 3);  // scales are powers of two: bfloat16 or float16, 2 in a float
        uint16_t bits = (uint16_t)(format == W_MXFP4 ? (127 + exponent) << 7 : (15 + exponent) << 10);
        if (k % K_GROUP == 0) words.push_back(bits);
        int code = k < inputs ? (int)(fabsf(number()) * 1000) % 16 : format == W_MXFP4 ? 0 : 8;
        if (k % 2) bytes.back() |= (uint8_t)(code << 4);
        else bytes.push_back((uint8_t)code);
        float numeral = format == W_MXFP4 ? (code < 8 ? e2m1[code] : -e2m1[code - 8]) : (float)(code - 8);
        if (k < inputs) value.push_back(ldexpf(numeral - (format == W_INT4_ZERO ? 1.5f : 0), exponent));
      }
    if (format == W_INT4_ZERO) words.resize(2 * words.size(), 0x3e00);  // 1.5
    scale.resize((words.size() + 1) / 2);
    memcpy(scale.data(), words.data(), words.size() * 2);
  }
};

struct Expert {
  Matrix gate, up, down;
  Expert(int64_t hidden, int64_t width, int x_type, int format)
      : gate(width, hidden, x_type, (int)up_format(format)), up(width, hidden, x_type, (int)up_format(format)), down(hidden, width, x_type, (int)down_format(format)) {}
  std::vector<float> operator()(const std::vector<float> &x) const {
    size_t hidden = x.size(), width = gate.value.size() / hidden;
    std::vector<float> h(width), y(hidden);
    for (size_t f = 0; f < width; f++) {
      double g = 0, u = 0;
      for (size_t d = 0; d < hidden; d++) g += gate.value[f * hidden + d] * x[d], u += up.value[f * hidden + d] * x[d];
      h[f] = (float)(g / (1 + exp(-g)) * u);
    }
    for (size_t d = 0; d < hidden; d++) {
      double sum = 0;
      for (size_t f = 0; f < width; f++) sum += down.value[d * width + f] * h[f];
      y[d] = (float)sum;
    }
    return y;
  }
  // How large the results' terms are: what rounding a row to whole numbers of 8 bits may do to a result is a part of that.
  float size(const std::vector<float> &x) const {
    size_t hidden = x.size(), width = gate.value.size() / hidden;
    std::vector<float> sum(hidden);
    for (size_t f = 0; f < width; f++) {
      float g = 0, u = 0;
      for (size_t d = 0; d < hidden; d++) g += fabsf(gate.value[f * hidden + d] * x[d]), u += fabsf(up.value[f * hidden + d] * x[d]);
      for (size_t d = 0; d < hidden; d++) sum[d] += fabsf(down.value[d * width + f]) * g * u;
    }
    float most = 0;
    for (float one : sum) most = fmaxf(most, one);
    return most;
  }
};

// Rows of numbers in x's type, `columns` of them used and `room` of them there.
struct Rows {
  int x_type;
  std::vector<uint8_t> bytes;
  std::vector<std::vector<float>> value;
  Rows(int x_type, int64_t rows, int64_t columns, int64_t room) : x_type(x_type) {
    int64_t item = x_type == X_F32 ? 4 : 2;
    bytes.resize(rows * room * item);
    for (int64_t r = 0; r < rows; r++) {
      value.emplace_back();
      for (int64_t c = 0; c < columns; c++) {
        float x = widened(rounded(number()));
        bf16 q = rounded(x);
        memcpy(&bytes[(r * room + c) * item], x_type == X_F32 ? (void *)&x : (void *)&q, item);
        value.back().push_back(x);
      }
    }
  }
};

float read(const std::vector<uint8_t> &bytes, int x_type, int64_t at) {
  if (x_type == X_F32) return *(const float *)&bytes[at * 4];
  return widened(*(const bf16 *)&bytes[at * 2]);
}

int failures = 0;
void expect_near(float got, float wanted, float scale, const char *what) {
  if (fabsf(got - wanted) <= .02f * scale + .02f * fabsf(wanted)) return;
  if (failures++ < 5) printf("%s: %g instead of %g\n", what, got, wanted);
}

void test(int x_type, int format, int64_t hidden, int64_t width, int64_t num_tokens, int threads) {
  const int64_t num_slots = 3, top_k = 2;
  const bool rounded_rows = x_type == X_BF16 && up_format(format) >= W_MXFP4 && vector_isa() == ISA_AVX2;
  ExpertShape s = {x_type, format, num_slots, hidden, width, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, INFINITY, 0};
  experts_shape(&s);
  std::vector<uint8_t> weights(num_slots * s.slot_bytes, 0xff);
  std::vector<Expert> experts;
  for (int64_t slot = 0; slot < num_slots; slot++) {
    experts.emplace_back(hidden, width, x_type, format);
    const Expert &e = experts.back();
    experts_pack(&s, &weights[slot * s.slot_bytes], e.gate.bytes.data(), e.up.bytes.data(), e.down.bytes.data(), e.gate.scale.data(),
                 e.up.scale.data(), e.down.scale.data(), 1, threads);
  }
  Rows x(x_type, num_tokens, hidden, s.up_depth);
  std::vector<int64_t> slot;
  std::vector<float> weight;
  for (int64_t i = 0; i < num_tokens * top_k; i++) slot.push_back(10 + (i * 7 + i / 3) % (num_slots + 1)), weight.push_back(fabsf(number()));
  std::vector<uint8_t> y(num_tokens * hidden * (x_type == X_F32 ? 4 : 2));
  experts_tokens(&s, weights.data(), x.bytes.data(), slot.data(), weight.data(), 10, num_tokens, top_k, y.data(), x_type, threads);
  for (int64_t t = 0; t < num_tokens; t++) {
    std::vector<float> sum(hidden);
    float size = 0;
    for (int64_t k = 0; k < top_k; k++) {
      int64_t here = slot[t * top_k + k] - 10;
      if (here >= num_slots) continue;
      std::vector<float> part = experts[here](x.value[t]);
      for (int64_t d = 0; d < hidden; d++) sum[d] += weight[t * top_k + k] * part[d], size = fmaxf(size, fabsf(sum[d]));
      if (rounded_rows) size = fmaxf(size, weight[t * top_k + k] * experts[here].size(x.value[t]));
    }
    for (int64_t d = 0; d < hidden; d++) expect_near(read(y, x_type, t * hidden + d), sum[d], size, "tokens");
  }
  // The same rows, one slot after another.
  std::vector<int32_t> rows = {(int32_t)(num_tokens / 3), 0, (int32_t)(num_tokens - num_tokens / 3)};
  experts_rows(&s, weights.data(), x.bytes.data(), rows.data(), 0, y.data(), threads);
  for (int64_t t = 0; t < num_tokens; t++) {
    const Expert &expert = experts[t < rows[0] ? 0 : 2];
    std::vector<float> wanted = expert(x.value[t]);
    float size = rounded_rows ? expert.size(x.value[t]) : 0;
    for (float one : wanted) size = fmaxf(size, fabsf(one));
    for (int64_t d = 0; d < hidden; d++) expect_near(read(y, x_type, t * hidden + d), wanted[d], size, "rows");
  }
}

}  // namespace
#include "selftest_layers.h"
#include "selftest_index.h"
#include "selftest_prompts.h"
#include "selftest_tape.h"
#include "selftest_delta.h"

int main() {
  int best = native_best_isa(), count = 0;
  const int64_t sizes[][2] = {{64, 32}, {1, 1}, {7, 5}, {130, 66}, {300, 140}};
  for (int isa = ISA_AVX2; isa <= best; isa++) {
    native_limit_isa(isa);
    count += test_layers() + test_prompts() + test_indexes() + test_tapes() + test_deltas();
    for (int x_type : {X_F32, X_BF16})
      for (int format : {W_PLAIN, W_FP8, W_INT8, W_MXFP4, W_INT4, W_INT4_ZERO, W_INT4_INT8})
        for (auto &size : sizes)
          for (int64_t tokens : {0, 1, 5, 17, 60})
            for (int threads : {1, 2}) test(x_type, format, size[0], size[1], tokens, threads), count++;
    for (int format : {W_PLAIN, W_FP8, W_INT8, W_MXFP4, W_INT4, W_INT4_ZERO, W_INT4_INT8}) test(X_BF16, format, 300, 140, 230, 2), count++;  // several bands of rows
  }
  for (int isa = ISA_AVX2; isa <= best; isa++) {
    native_limit_isa(isa);
    for (int threads : {1, 2}) {
      for (auto &size : sizes)
        for (int64_t tokens : {0, 1, 5, 17, 60}) test(X_F32, W_BF16, size[0], size[1], tokens, threads), count++;
      for (int64_t rows : {0, 1, 5, 13, 40, 100})
        for (int64_t inputs : {2, 130, 256})
          for (int64_t outputs : {1, 64, 150}) test_linear_packed(X_F32, W_BF16, rows, inputs, outputs, threads), count++;
    }
  }
  const KernelChoice usual = kernel_choice();
  for (int isa : {ISA_AVX512, ISA_AVX512_BF16}) {
    if (isa > best || !experts_whole(isa)) continue;
    native_limit_isa(isa);
    for (int64_t few : {0, 3}) {  // rows are whole numbers
      const KernelChoice choice = {ISA_AVX512, few, few, few, 1, 0};
      native_choose(&choice);
      for (int format : {W_INT8, W_MXFP4, W_INT4, W_INT4_ZERO, W_INT4_INT8})
        for (auto &size : sizes)
          for (int64_t tokens : {0, 1, 5, 17, 60, 230}) test(X_BF16, format, size[0], size[1], tokens, 2), count++;
    }
  }
  native_choose(&usual);
  printf("%d cases, %d numbers wrong\n", count, failures);
  return failures != 0;
}
