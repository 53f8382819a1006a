// Linear attention: a short convolution, the gated delta rule and a gated norm in one pass over a sequence's tokens. layers/gated_delta.py
// says what is computed; here the state moves once for a few tokens, which stay in registers.
#pragma once
#include "native.h"

// What ctypes passes to delta_run. Strides in numbers, of x's type: rows may lie apart.
struct DeltaCall {
  int64_t x_type, num_sequences, key_heads, heads, key_dim, value_dim, taps;
  int64_t channel_decay;  // a decay for each channel of a key, else one for each head
  int64_t sigmoid_gate;   // else silu
  const void *qkv, *gate, *beta, *decay;  // [T, channels], [T, heads * value_dim], [T, heads], [T, heads] or [T, heads * key_dim]
  int64_t qkv_stride, gate_stride, beta_stride, decay_stride;
  const float *conv, *rate, *dt_bias, *norm;  // [taps, channels], [heads], as decay, [value_dim]
  const int64_t *starts;                      // sequence b has the tokens from starts[b] to starts[b + 1]; null: each has one
  const int64_t *reads, *writes;              // of each sequence, a record; they may be the same
  void *tails;                                // [records, taps - 1, channels]
  float *states;                              // [records, heads, key_dim, value_dim]
  void *out;                                  // [T, heads * value_dim]
  float eps, lower_bound;                     // lower_bound: of a decay's logarithm; 0: none, and softplus
  // Where sequences have drafts, else null: of each, how many inputs that its record keeps come first, without output, and how many of its
  // tokens are drafts, behind which the state is not kept but their inputs. With these, starts is there.
  const int64_t *applied, *guesses;
  void *kept_qkv, *kept_beta, *kept_decay;  // [records, most_kept, ...]
  int64_t most_kept;
};

struct DeltaOps {
  // All tokens of a sequence, for a key head and the heads that it serves.
  void (*run)(const DeltaCall &call, int64_t sequence, int64_t key_head, float *work);
  // Numbers of `work`.
  int64_t (*room)(const DeltaCall &call);
};

extern const DeltaOps *const delta_avx2[2], *const delta_avx512[2];  // by type: float32, bfloat16
