// The part of selftest.cpp for linear attention. Included in its namespace's file.
#include "delta.h"

NATIVE_API void delta_run(const DeltaCall *call, int threads);

namespace {

// Sequences of `lengths` tokens, with everything of just the size that it takes; each goes on in the record that it read, or in another.
void test_delta(int x_type, int64_t key_heads, int64_t group, int64_t key_dim, int64_t value_dim, bool channel_decay, std::vector<int64_t> lengths,
                bool in_place, int threads) {
  const int64_t item = x_type == X_F32 ? 4 : 2, taps = 3, heads = key_heads * group, sequences = (int64_t)lengths.size();
  const int64_t channels = 2 * key_heads * key_dim + heads * value_dim, decays = heads * (channel_decay ? key_dim : 1);
  std::vector<int64_t> starts = {0}, reads, writes;
  bool decode = true;
  for (int64_t b = 0; b < sequences; b++) {
    starts.push_back(starts.back() + lengths[b]), reads.push_back(b), writes.push_back(in_place ? b : sequences + b);
    decode = decode && lengths[b] == 1;
  }
  const int64_t tokens = starts.back(), numbers = key_dim * value_dim;
  auto rows = [&](int64_t width) {
    std::vector<uint8_t> bytes(tokens * width * item);
    for (int64_t i = 0; i < tokens * width; i++) {
      float x = number();
      bf16 q = rounded(x);
      if (x_type == X_F32) memcpy(&bytes[4 * i], &x, 4);
      else memcpy(&bytes[2 * i], &q, 2);
    }
    return bytes;
  };
  auto floats = [&](int64_t count) {
    std::vector<float> values(count);
    for (float &x : values) x = fabsf(number());
    return values;
  };
  std::vector<uint8_t> qkv = rows(channels), gate = rows(heads * value_dim), beta = rows(heads), decay = rows(decays);
  std::vector<uint8_t> tails(2 * sequences * (taps - 1) * channels * item), out(tokens * heads * value_dim * item);
  std::vector<float> conv = floats(taps * channels), rate = floats(heads), bias = floats(decays), norm = floats(value_dim), states = floats(2 * sequences * heads * numbers);
  std::vector<float> before = states;
  DeltaCall call = {x_type,      sequences,  key_heads,    heads,        key_dim,     value_dim,   taps,        channel_decay, 0,
                    qkv.data(),  gate.data(), beta.data(), decay.data(), channels,    heads * value_dim, heads, decays,        conv.data(),
                    rate.data(), bias.data(), norm.data(), decode ? nullptr : starts.data(), reads.data(), writes.data(), tails.data(), states.data(),
                    out.data(),  1e-6f,      0};
  delta_run(&call, threads);
  // Token by token, as the rule is written.
  for (int64_t b = 0; b < sequences; b++)
    for (int64_t h = 0; h < heads; h++) {
      std::vector<float> s(before.begin() + (reads[b] * heads + h) * numbers, before.begin() + (reads[b] * heads + h + 1) * numbers);
      for (int64_t t = starts[b]; t < starts[b + 1]; t++) {
        auto mixed = [&](int64_t channel) {
          float sum = 0;
          for (int64_t w = 0; w < taps; w++)
            if (t - taps + 1 + w >= starts[b]) sum += read(qkv, x_type, (t - taps + 1 + w) * channels + channel) * conv[w * channels + channel];
          return sum / (1 + expf(-sum));
        };
        std::vector<float> q, k, o(value_dim);
        float q_size = 0, k_size = 0, squares = 0;
        for (int64_t i = 0; i < key_dim; i++) {
          q.push_back(mixed(h / group * key_dim + i)), k.push_back(mixed((key_heads + h / group) * key_dim + i));
          q_size += q[i] * q[i], k_size += k[i] * k[i];
        }
        for (int64_t i = 0; i < key_dim; i++) {
          int64_t at = channel_decay ? h * key_dim + i : h;
          float d = expf(-rate[h] * log1pf(expf(read(decay, x_type, t * decays + at) + bias[at])));
          q[i] /= sqrtf((q_size + 1e-6f) * key_dim), k[i] /= sqrtf(k_size + 1e-6f);
          for (int64_t v = 0; v < value_dim; v++) s[i * value_dim + v] *= d;
        }
        for (int64_t v = 0; v < value_dim; v++) {
          float held = 0;
          for (int64_t i = 0; i < key_dim; i++) held += k[i] * s[i * value_dim + v];
          float moved = (mixed(2 * key_heads * key_dim + h * value_dim + v) - held) / (1 + expf(-read(beta, x_type, t * heads + h)));
          for (int64_t i = 0; i < key_dim; i++) s[i * value_dim + v] += k[i] * moved, o[v] += q[i] * s[i * value_dim + v];
          squares += o[v] * o[v];
        }
        for (int64_t v = 0; v < value_dim; v++) {
          int64_t at = (t * heads + h) * value_dim + v;
          float z = read(gate, x_type, at);
          expect_near(read(out, x_type, at), o[v] / sqrtf(squares / value_dim + 1e-6f) * norm[v] * z / (1 + expf(-z)), 1, "delta");
        }
      }
      for (int64_t i = 0; i < numbers; i++) expect_near(states[(writes[b] * heads + h) * numbers + i], s[i], 1, "state");
    }
}

int test_deltas() {
  int count = 0;
  for (int x_type : {X_F32, X_BF16})
    for (bool channel_decay : {false, true})
      for (bool in_place : {false, true})
        for (std::vector<int64_t> lengths : {std::vector<int64_t>{}, {1}, {1, 1, 1}, {1, 2, 21}, {37}})
          for (int threads : {1, 2}) {
            test_delta(x_type, 2, 1, 5, 7, channel_decay, lengths, in_place, threads);
            test_delta(x_type, 1, 2, 16, 16, channel_decay, lengths, in_place, threads);
            test_delta(x_type, 1, 1, 17, 144, channel_decay, lengths, in_place, threads);
            count += 3;
          }
  return count;
}

}  // namespace
