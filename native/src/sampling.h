// From logits to tokens: edits, temperature, min_p, top_k, top_p and one draw per row, without sorting the vocabulary.
//
// A row's numbers are p = exp(logit / temperature - largest), so the best token has p = 1; they need no normalising. What is kept
// are the tokens of p >= some least p, and tokens of equal p are kept or dropped together. The draw is a race: the kept token with the
// largest p / e wins, where e is an exponential number made of the row's key and position and the token's id (engine/sampling/noise.py).
// engine/sampling/sampler.py is the specification. A row's result depends on nothing but the row.
#pragma once
#include "native.h"

enum { STRETCH = 128 };  // numbers whose sum and largest are taken together
enum LogitType { LOGIT_F32 = 0, LOGIT_BF16 = 1 };

// What ctypes passes. Arrays by row have num_rows numbers; those of edits are null where no row has any, and a row's are those from
// *_start[row] to *_start[row + 1].
struct SampleCall {
  int64_t logit_type, num_rows, num_tokens, stride;  // stride: logits from one row to the next
  const void *logits;
  const int64_t *random;  // 0: the largest logit is taken
  const float *temperature, *top_p, *min_p;
  const int64_t *top_k;  // 0: all
  const uint64_t *seed_key;
  const int64_t *position;
  const int64_t *mask_of;  // -1: none
  const uint32_t *masks;   // [*, mask_words]: bit i of word w: token 32 w + i may be drawn; where other edits leave none, it is the first
  const int64_t *has_allowed, *allowed_start, *allowed;  // has_allowed: all others are forbidden
  const int64_t *forbidden_start, *forbidden;
  const int64_t *bias_start, *bias_id;
  const float *bias;
  const int64_t *penalty_start, *penalty_id;
  const float *penalty;  // [4, penalty_stride]: counts, repetition, presence, frequency
  int64_t penalty_stride;
  int64_t mask_words;
  int64_t *token;  // [num_rows], the result
};

// What the driver needs from an instruction set, for one type of logits. n is any number; a stretch is of up to STRETCH numbers.
struct SampleOps {
  // most[i]: the largest of stretch i; NaN counts as nothing (a stretch of nothing else has minus infinity).
  void (*largest)(const void *logits, int64_t n, float *most);
  // p[i] = exp(logits[i] / temperature - shift), 0 where that is nearly nothing; the largest of every stretch.
  void (*powers)(const void *logits, int64_t n, float temperature, float shift, float *p, float *most);
  // Numbers below `least` become 0; sums of stretches.
  void (*limit)(float *p, int64_t n, float least, float *sum);
  // Of up to STRETCH tokens, id[i] or `first` + i where id is null: a bit for each whose p is at least `least` and that may win, so that
  // p / e > best. None that may is left out; a few that may not are in.
  void (*race)(const float *p, const int32_t *id, int64_t first, int64_t n, uint64_t word, float least, float best, uint64_t *may);
  // The first of n <= STRETCH logits that equals x; n if none does.
  int64_t (*find)(const void *logits, int64_t n, float x);
  void (*widen)(const void *logits, int64_t n, float *out);
  // The logits of the mask's tokens; of all others minus infinity.
  void (*widen_masked)(const uint32_t *mask, const void *logits, int64_t n, float *out);
};

// A number for a token: 32 bits, different for every token of the same word (engine/sampling/noise.py: `race_bits`).
template <class U> static inline __attribute__((always_inline)) U race_mix(U x) {
  x = (x ^ x >> 16) * 0x7feb352du;
  x = (x ^ x >> 15) * 0x846ca68bu;
  return x ^ x >> 16;
}
template <class U> static inline __attribute__((always_inline)) U race_bits(U id, uint64_t word) {
  return race_mix<U>(race_mix<U>(id + (uint32_t)word) ^ (uint32_t)(word >> 32));
}

extern const SampleOps *const sampling_avx2[2], *const sampling_avx512[2];  // by LogitType
