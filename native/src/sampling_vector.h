// Sampling in GCC's vector types. Included inside a namespace of one instruction set, after `enum { LANES = ... }`.
#include "vector.h"

INLINE float largest_of(vf x) {
  float most = x[0];
  for (int j = 1; j < LANES; j++) most = x[j] > most ? x[j] : most;
  return most;
}

template <class X> static void largest(const void *logits, int64_t n, float *most) {
  const X *x = (const X *)logits;
  const float least = -__builtin_inff();
  for (int64_t at = 0; at < n; at += STRETCH, most++) {
    int64_t end = at + STRETCH < n ? at + STRETCH : n, i = at;
    vf best = splat(least);
    for (; i + LANES <= end; i += LANES) {
      vf a = load(x + i);
      best = a > best ? a : best;
    }
    float found = largest_of(best);
    for (; i < end; i++) {
      float a = number(x + i);
      found = a > found ? a : found;
    }
    *most = found;
  }
}

INLINE vf power(vf x) {
  vf y = exp_of(x);
  return x >= -87.f ? y : splat(0.f);  // NaN is 0 too
}

template <class X> static void powers(const void *logits, int64_t n, float temperature, float shift, float *p, float *most) {
  const X *x = (const X *)logits;
  for (int64_t at = 0; at < n; at += STRETCH, most++) {
    int64_t end = at + STRETCH < n ? at + STRETCH : n, i = at;
    vf best = {};
    for (; i + LANES <= end; i += LANES) {
      vf y = power(load(x + i) / temperature - shift);
      best = y > best ? y : best;
      store(p + i, y);
    }
    float found = largest_of(best);
    for (; i < end; i++) {
      p[i] = power(splat(number(x + i) / temperature - shift))[0];
      found = p[i] > found ? p[i] : found;
    }
    *most = found;
  }
}

static void limit(float *p, int64_t n, float least, float *sum) {
  for (int64_t at = 0; at < n; at += STRETCH, sum++) {
    int64_t end = at + STRETCH < n ? at + STRETCH : n, i = at;
    vf sums = {};
    for (; i + LANES <= end; i += LANES) {
      vf a = load(p + i);
      a = a >= least ? a : splat(0.f);
      store(p + i, a);
      sums += a;
    }
    float found = total(sums);
    for (; i < end; i++) {
      p[i] = p[i] >= least ? p[i] : 0.f;
      found += p[i];
    }
    *sum = found;
  }
}

// e = -log(1 - r) for r = (bits + 1/2) / 2^32 is more than the first 24 bits of r, and numbers are rounded by less than what `best` is
// lowered by: so who wins is among those that are kept.
static void race(const float *p, const int32_t *id, int64_t first, int64_t n, uint64_t word, float least, float best, uint64_t *may) {
  float bound = best * (1 - 0x1p-18f) * 0x1p-24f;
  vu count;
  for (int j = 0; j < LANES; j++) count[j] = j;
  may[0] = may[1] = 0;
  for (int64_t i = 0; i < n; i += LANES) {
    vf a = {};
    vu token = count + (uint32_t)(first + i);
    if (i + LANES <= n) {
      a = load(p + i);
      if (id) token = *(const vu *)(id + i);
    } else {
      memcpy(&a, p + i, 4 * (n - i));
      if (id) memcpy(&token, id + i, 4 * (n - i));
    }
    vi kept = (a >= least) & (a > 0.f);
    vf r = __builtin_convertvector((vi)(race_bits<vu>(token, word) >> 8), vf);
    vi wins = kept & (a > r * bound);
    uint64_t pairs[LANES / 2], bits = 0;
    memcpy(pairs, &wins, sizeof(wins));
    for (int j = 0; j < LANES / 2; j++) bits |= pairs[j];
    if (!bits) continue;
    bits = 0;
    for (int j = 0; j < LANES; j++) bits |= (uint64_t)(wins[j] & 1) << j;
    may[i / 64] |= bits << i % 64;
  }
}

template <class X> static int64_t find(const void *logits, int64_t n, float x) {
  int64_t i = 0;
  while (i < n && number((const X *)logits + i) != x) i++;
  return i;
}

template <class X> static void widen(const void *logits, int64_t n, float *out) {
  const X *x = (const X *)logits;
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) store(out + i, load(x + i));
  for (; i < n; i++) out[i] = number(x + i);
}

// Many words of a mask are 0: their logits are not read.
template <class X> static void widen_masked(const uint32_t *mask, const void *logits, int64_t n, float *out) {
  const X *x = (const X *)logits;
  const vf least = splat(-__builtin_inff());
  vu bit;
  for (int j = 0; j < LANES; j++) bit[j] = 1u << j;
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    uint32_t may = mask[i / 32] >> i % 32;
    store(out + i, may ? (((vu){} + may) & bit) ? load(x + i) : least : least);
  }
  for (; i < n; i++) out[i] = mask[i / 32] >> i % 32 & 1 ? number(x + i) : least[0];
}

template <class X> struct Ops {
  static constexpr SampleOps table = {largest<X>, powers<X>, limit, race, find<X>, widen<X>, widen_masked<X>};
};
