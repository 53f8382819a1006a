// Sampling: rows shared among threads, arithmetic by instruction set, thresholds by counting digits (sampling.h).
#include "sampling.h"

#include <math.h>
#include <string.h>

#include <algorithm>

#include "scratch.h"
#include "tape.h"
#include "team.h"

static const SampleOps *ops_for(int64_t logit_type) {
#if defined(__x86_64__)
  switch (vector_isa()) {
    case ISA_AVX512_BF16:
    case ISA_AVX512: return sampling_avx512[logit_type];
    case ISA_AVX2: return sampling_avx2[logit_type];
  }
#endif
  (void)logit_type;
  return nullptr;
}

namespace {

enum { FIRST_DIGIT = 20, DIGIT = 10, NUM_DIGITS = 1 << 11 };  // 11 bits (the sign is 0), then 10 and 10

int64_t stretches_of(int64_t n) { return (n + STRETCH - 1) / STRETCH; }
int64_t up_to_64(int64_t n) { return (n + 63) / 64 * 64; }

uint64_t finalise(uint64_t x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return x ^ x >> 31;
}

uint64_t word_of(uint64_t key, int64_t position) { return finalise(key + ((uint64_t)position + 1) * 0x9E3779B97F4A7C15u); }

double score_of(float p, int64_t id, uint64_t word) { return p / -log1p(-(race_bits((uint32_t)id, word) + .5) * 0x1p-32); }

uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

// What a thread works in. Numbers are picked without a branch: it would be guessed wrongly too often.
struct Work {
  float *edited, *p, *picked, *most, *sum;
  int32_t *place;
  double *digits;

  static int64_t bytes(int64_t n) { return up_to_64(n * 4) * 4 + up_to_64(stretches_of(n) * 4) * 2 + NUM_DIGITS * 8; }
  Work(uint8_t *at, int64_t n) {
    auto take = [&](int64_t bytes) { return at += up_to_64(bytes), (void *)(at - up_to_64(bytes)); };
    edited = (float *)take(n * 4), p = (float *)take(n * 4), picked = (float *)take(n * 4), place = (int32_t *)take(n * 4);
    most = (float *)take(stretches_of(n) * 4), sum = (float *)take(stretches_of(n) * 4), digits = (double *)take(NUM_DIGITS * 8);
  }

  // The largest of the values (none negative) such that those not below it number, or with `sums` add up to, `goal` or more; 0 if
  // there is none. The values of the digit that it falls into move to the front.
  float least_reaching(float *v, int64_t n, bool sums, double goal) const {
    double above = 0;
    uint32_t found = 0;
    for (int shift = FIRST_DIGIT; shift >= 0; shift -= DIGIT) {
      uint32_t mask = shift == FIRST_DIGIT ? NUM_DIGITS - 1 : (1u << DIGIT) - 1;
      memset(digits, 0, (mask + 1) * sizeof(double));
      for (int64_t i = 0; i < n; i++) digits[bits_of(v[i]) >> shift & mask] += sums ? (double)v[i] : 1.0;
      int64_t digit = mask;
      while (digit >= 0 && !(digits[digit] > 0 && above + digits[digit] >= goal)) above += digits[digit--];
      if (digit < 0) return 0;
      found |= (uint32_t)digit << shift;
      int64_t same = 0;
      for (int64_t i = 0; i < n; i++) {
        float x = v[i];
        v[same] = x, same += (bits_of(x) >> shift & mask) == (uint32_t)digit;
      }
      n = same;
    }
    float least;
    memcpy(&least, &found, 4);
    return least;
  }
};

struct Job {
  const SampleCall *c;
  const SampleOps *of_logits, *of_float;

  bool edits_beside_mask(int64_t row) const {
    auto has = [&](const int64_t *start) { return start && start[row + 1] > start[row]; };
    return (c->has_allowed && c->has_allowed[row]) || has(c->forbidden_start) || has(c->bias_start) || has(c->penalty_start);
  }

  const uint32_t *mask(int64_t row) const {
    return c->mask_of && c->mask_of[row] >= 0 ? c->masks + c->mask_of[row] * c->mask_words : nullptr;
  }

  // How many tokens the row's mask allows, if they are few and it has no other edit, else 0: they and their logits are picked.
  int64_t pick_allowed(int64_t row, const void *logits, const Work &work) const {
    const uint32_t *own = mask(row);
    if (!own || edits_beside_mask(row)) return 0;
    int64_t item = c->logit_type == LOGIT_F32 ? 4 : 2, count = 0;
    for (int64_t w = 0; w < c->mask_words; w++)
      for (uint32_t bits = own[w]; bits; bits &= bits - 1) {
        int64_t id = 32 * w + __builtin_ctz(bits);
        if (id >= c->num_tokens) break;
        if (count == STRETCH) return 0;
        work.place[count++] = (int32_t)id;
      }
    for (int64_t i = 0; i < count; i++) of_logits->widen((const uint8_t *)logits + work.place[i] * item, 1, work.picked + i);
    return count;
  }

  int64_t first_of(const uint32_t *mask) const {
    for (int64_t w = 0; w < c->mask_words; w++)
      if (mask[w]) return 32 * w + __builtin_ctz(mask[w]);
    return 0;
  }

  // What is forbidden stays so: no bias and no penalty lifts minus infinity.
  void edit(int64_t row, const void *logits, float *x) const {
    if (const uint32_t *own = mask(row)) of_logits->widen_masked(own, logits, c->num_tokens, x);
    else of_logits->widen(logits, c->num_tokens, x);
    if (c->has_allowed && c->has_allowed[row]) {
      std::fill(x, x + c->num_tokens, -INFINITY);
      int64_t item = c->logit_type == LOGIT_F32 ? 4 : 2;
      const uint32_t *own = mask(row);
      for (int64_t i = c->allowed_start[row]; i < c->allowed_start[row + 1]; i++) {
        int64_t id = c->allowed[i];
        if (!own || own[id / 32] >> id % 32 & 1) of_logits->widen((const uint8_t *)logits + id * item, 1, x + id);
      }
    }
    if (c->forbidden_start)
      for (int64_t i = c->forbidden_start[row]; i < c->forbidden_start[row + 1]; i++) x[c->forbidden[i]] = -INFINITY;
    if (c->bias_start)
      for (int64_t i = c->bias_start[row]; i < c->bias_start[row + 1]; i++) x[c->bias_id[i]] += c->bias[i];
    if (!c->penalty_start) return;
    for (int64_t i = c->penalty_start[row]; i < c->penalty_start[row + 1]; i++) {
      const float *of = c->penalty + i;
      float count = of[0], repetition = of[c->penalty_stride], presence = of[2 * c->penalty_stride], frequency = of[3 * c->penalty_stride];
      float &logit = x[c->penalty_id[i]];
      logit = logit > 0 ? logit / repetition : logit * repetition;
      logit -= frequency * count + presence * (count > 0 ? 1.f : 0.f);
    }
  }

  int64_t run(int64_t row, const Work &work) const {
    int64_t item = c->logit_type == LOGIT_F32 ? 4 : 2, n = c->num_tokens, stretches = stretches_of(n);
    const void *logits = (const uint8_t *)c->logits + row * c->stride * item;
    const SampleOps *ops = of_logits;
    if (int64_t num_allowed = pick_allowed(row, logits, work)) return among_picked(row, num_allowed, work);
    if (mask(row) || edits_beside_mask(row)) {
      edit(row, logits, work.edited);
      logits = work.edited, ops = of_float, item = 4;
    }
    ops->largest(logits, n, work.most);
    int64_t stretch = std::max_element(work.most, work.most + stretches) - work.most, first = stretch * STRETCH;
    float best = work.most[stretch];
    if (best == -INFINITY) return mask(row) ? first_of(mask(row)) : 0;  // all is forbidden, or no number
    int64_t length = std::min<int64_t>(STRETCH, n - first);
    int64_t token = first + ops->find((const uint8_t *)logits + first * item, length, best);
    if (!c->random[row]) return token;

    // Candidates: a few places when only the best are asked for, else all.
    float temperature = c->temperature[row], shift = best / temperature;
    int64_t k = c->top_k[row], count = n;
    bool few = k > 0 && k <= stretches / 4;
    if (few) {
      count = pick(logits, item, ops, k, work);
      of_float->powers(work.picked, count, temperature, shift, work.p, work.most);
    } else {
      ops->powers(logits, n, temperature, shift, work.p, work.most);
    }
    float least = least_kept(row, count, work);
    return draw(work, count, few, least, word_of(c->seed_key[row], c->position[row]), token);
  }

  // The token of a row of which no others than those picked are allowed.
  int64_t among_picked(int64_t row, int64_t count, const Work &work) const {
    of_float->largest(work.picked, count, work.most);
    float best = work.most[0];
    if (count == 1 || best == -INFINITY) return work.place[0];
    int64_t token = work.place[of_float->find(work.picked, count, best)];
    if (!c->random[row]) return token;
    float temperature = c->temperature[row];
    of_float->powers(work.picked, count, temperature, best / temperature, work.p, work.most);
    float least = least_kept(row, count, work);
    return draw(work, count, true, least, word_of(c->seed_key[row], c->position[row]), token);
  }

  // The logits that may be among the k largest, in vocabulary order: k stretches have a largest number of the k-th largest of those.
  int64_t pick(const void *logits, int64_t item, const SampleOps *ops, int64_t k, const Work &work) const {
    int64_t n = c->num_tokens, stretches = stretches_of(n), count = 0;
    memcpy(work.sum, work.most, stretches * 4);
    std::nth_element(work.sum, work.sum + k - 1, work.sum + stretches, [](float a, float b) { return a > b; });
    float least = work.sum[k - 1], near[STRETCH];
    for (int64_t s = 0; s < stretches; s++) {
      if (!(work.most[s] >= least)) continue;
      int64_t first = s * STRETCH, length = std::min<int64_t>(STRETCH, n - first);
      ops->widen((const uint8_t *)logits + first * item, length, near);
      for (int64_t i = 0; i < length; i++) {
        work.picked[count] = near[i], work.place[count] = (int32_t)(first + i);
        count += near[i] >= least;
      }
    }
    return count;
  }

  // The smallest p that is kept: by min_p, of the rest by top_k, and of its k by top_p.
  float least_kept(int64_t row, int64_t count, const Work &work) const {
    float least = c->min_p[row], top_p = c->top_p[row];
    int64_t k = c->top_k[row];
    if (k == 0 && !(top_p < 1)) return least;
    of_float->limit(work.p, count, least, work.sum);
    if (k > 0) {
      memcpy(work.picked, work.p, count * 4);
      least = std::max(least, work.least_reaching(work.picked, count, false, (double)k));
      if (!(top_p < 1)) return least;
      int64_t num = 0, above = 0;
      double total = 0;
      for (int64_t i = 0; i < count; i++) {
        float p = work.p[i];
        work.picked[num] = p, num += p >= least;
        above += p > least, total += p > least ? (double)p : 0;
      }
      total += (double)std::min(k - above, num - above) * least;  // of equals at the end no more than make k
      return std::max(least, work.least_reaching(work.picked, num, true, total * top_p));
    }
    double total = 0;
    for (int64_t s = 0; s < stretches_of(count); s++) total += work.sum[s];
    // All p below this one together are less than what top_p leaves out.
    float least_that_may = (float)(total * (1 - (double)top_p) / (double)count / 2);
    int64_t num = 0;
    for (int64_t s = 0; s < stretches_of(count); s++) {
      if (work.most[s] < least_that_may) continue;
      for (int64_t i = s * STRETCH; i < count && i < (s + 1) * STRETCH; i++)
        work.picked[num] = work.p[i], num += work.p[i] >= least_that_may;
    }
    return std::max(least, work.least_reaching(work.picked, num, true, total * top_p));
  }

  // Who wins the race of those whose p is at least `least`. The favourite, whose p is 1, sets what the others have to beat.
  int64_t draw(const Work &work, int64_t count, bool few, float least, uint64_t word, int64_t favourite) const {
    int64_t chosen = favourite;
    double best = score_of(1, favourite, word);
    for (int64_t i = 0; i < count; i += STRETCH) {
      if (!(work.most[i / STRETCH] >= least) || work.most[i / STRETCH] == 0) continue;
      uint64_t may[STRETCH / 64];
      int64_t length = std::min<int64_t>(STRETCH, count - i);
      of_float->race(work.p + i, few ? work.place + i : nullptr, i, length, word, least, (float)best, may);
      for (int64_t part = 0; part < STRETCH / 64; part++)
        for (uint64_t bits = may[part]; bits; bits &= bits - 1) {
          int64_t at = i + part * 64 + __builtin_ctzll(bits), id = few ? work.place[at] : at;
          double score = score_of(work.p[at], id, word);
          if (score > best) best = score, chosen = id;
        }
    }
    return chosen;
  }
};

}  // namespace

NATIVE_API void sampling_rows(const SampleCall *call, int threads) {
  tape_refuse("sampling_rows");
  if (call->num_rows == 0) return;
  Job job = {call, ops_for(call->logit_type), ops_for(LOGIT_F32)};
  if (threads > call->num_rows) threads = (int)call->num_rows;
  int64_t each = Work::bytes(call->num_tokens);
  uint8_t *start = scratch(threads * each);
  team(threads, call->num_rows, [&](int64_t row, int worker) {
    call->token[row] = job.run(row, Work(start + worker * each, call->num_tokens));
  });
}
