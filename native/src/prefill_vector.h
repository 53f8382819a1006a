// Attention of prompts in GCC's vector types. Included inside a namespace of one instruction set, after `enum { LANES = ... }`.
#include "vector.h"

// Which words of two rows change places when parts of s words do. Written element by element where it is used, the compiler would make
// it anew each time.
struct Exchange {
  int32_t first[5][LANES], second[5][LANES];
  constexpr Exchange() : first(), second() {
    for (int log = 0; log < 5; log++)
      for (int j = 0, s = 1 << log; j < LANES; j++)
        first[log][j] = j & s ? LANES + j - s : j, second[log][j] = j & s ? LANES + j : j + s;
  }
};
alignas(64) constexpr Exchange exchange;

// LANES rows of LANES words, in place.
INLINE void transpose(vi *r) {
#pragma GCC unroll 4
  for (int s = LANES / 2; s; s /= 2) {
    const vi first = *(const vi *)exchange.first[__builtin_ctz(s)], second = *(const vi *)exchange.second[__builtin_ctz(s)];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
      if (!(i & s)) {
        vi a = r[i], b = r[i + s];
        r[i] = __builtin_shuffle(a, b, first), r[i + s] = __builtin_shuffle(a, b, second);
      }
  }
}

static void pack_keys(const uint8_t *const *row, int n, int64_t words, uint8_t *panel) {
  for (int group = 0; group < PANEL; group += LANES) {
    int64_t w = 0;
    for (; w + LANES <= words; w += LANES) {
      vi r[LANES];
      for (int i = 0; i < LANES; i++) r[i] = group + i < n ? *(const vi *)(row[group + i] + 4 * w) : (vi){};
      transpose(r);
      for (int i = 0; i < LANES; i++) *(vi *)(panel + ((w + i) * PANEL + group) * 4) = r[i];
    }
    for (; w < words; w++)
      for (int i = group; i < group + LANES; i++) {
        if (i < n) memcpy(panel + (w * PANEL + i) * 4, row[i] + 4 * w, 4);
        else memset(panel + (w * PANEL + i) * 4, 0, 4);
      }
  }
}

INLINE vi some_words(const bf16 *p, int64_t count) {
  if (count >= LANES) return wide(*(const vh *)p);
  vh part = {};
  if (count > 0) memcpy(&part, p, 2 * count);
  return wide(part);
}

template <class X> static void pack_values(const uint8_t *const *row, int64_t n, int64_t dim, uint8_t *panels, int64_t panel_bytes) {
  for (int64_t at = 0; at < dim; at += PANEL, panels += panel_bytes) {
    uint8_t *to = panels;
    if (sizeof(X) == 4) {
      int64_t columns = dim - at < PANEL ? dim - at : (int64_t)PANEL;
      for (int64_t i = 0; i < n; i++, to += PANEL * 4) {
        memcpy(to, row[i] + 4 * at, 4 * columns);
        memset(to + 4 * columns, 0, 4 * (PANEL - columns));
      }
      continue;
    }
    for (int64_t i = 0; i < n; i += 2)
      for (int j = 0; j < PANEL; j += LANES, to += 4 * LANES) {
        vi even = some_words((const bf16 *)row[i] + at + j, dim - at - j), odd = {};
        if (i + 1 < n) odd = some_words((const bf16 *)row[i + 1] + at + j, dim - at - j);
        *(vi *)to = even | odd << 16;
      }
  }
}

template <class X>
static float softmax(const float *s, int64_t panel_stride, int64_t visible, int64_t depth, float scale, float *largest, float *sum, void *pv) {
  X *p = (X *)pv;
  const float least = -__builtin_inff();
  if (visible <= 0) {
    memset(p, 0, depth * sizeof(X));
    return 1;
  }
  vi place;
  for (int j = 0; j < LANES; j++) place[j] = j;
  vf most = splat(least);
  int64_t whole = visible / LANES * LANES;
  for (int64_t i = 0; i < whole; i += LANES) {
    vf x = load(s + i / PANEL * panel_stride + i % PANEL);
    most = x > most ? x : most;
  }
  vf rest = splat(least);
  if (whole < visible) {
    rest = place < (int32_t)(visible - whole) ? load(s + whole / PANEL * panel_stride + whole % PANEL) : rest;
    most = rest > most ? rest : most;
  }
  float now = *largest;
  for (int j = 0; j < LANES; j++) now = most[j] * scale > now ? most[j] * scale : now;
  vf sums = {};
  for (int64_t i = 0; i < whole; i += LANES) {
    vf x = load(s + i / PANEL * panel_stride + i % PANEL), weight = exp_of(x * scale - now);
    weight = x == x ? weight : x;
    sums += weight;
    store(p + i, weight);
  }
  int64_t end = whole;
  if (whole < visible) {
    vf weight = exp_of(rest * scale - now);
    weight = rest == rest ? weight : rest;
    weight = place < (int32_t)(visible - whole) ? weight : splat(0.f);
    sums += weight;
    store(p + whole, weight);
    end += LANES;
  }
  if (end < depth) memset(p + end, 0, (depth - end) * sizeof(X));
  float factor = *largest == now ? 1.f : exp_of(splat(*largest - now))[0];
  *sum = *sum * factor + total(sums), *largest = now;
  return factor;
}

static void fold(const float *c, int rows, const float *factor, float *acc, int64_t stride) {
  for (int m = 0; m < rows; m++)
    for (int j = 0; j < PANEL; j += LANES) store(acc + m * stride + j, load(acc + m * stride + j) * factor[m] + load(c + m * PANEL + j));
}

template <class X> struct Ops {
  static constexpr PrefillOps table = {pack_keys, pack_values<X>, softmax<X>, fold, 1.f};
};
