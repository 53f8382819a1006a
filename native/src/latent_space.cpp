// Into the latent's space and out of it (MLA): a small product for each head. Many rows of bfloat16 go through panels on matrix tiles, if
// there are any; else a row's numbers are added up in one order, whatever the number of rows.
#include <string.h>

#include "attention.h"
#include "choice.h"
#include "experts.h"
#include "prefill.h"
#include "scratch.h"
#include "tape.h"
#include "team.h"

namespace {

int64_t up_to_64(int64_t n) { return (n + 63) / 64 * 64; }

// Of each head: out [tokens, columns] = x [tokens, depth] times w, whose numbers for a head lie together. Strides in numbers, from one
// token and one head to the next.
struct Product {
  const uint8_t *x;
  int64_t x_token, x_head;
  const uint8_t *w;
  uint8_t *out;
  int64_t tokens, heads, depth, columns, out_head;

  // Numbers of a row, with some behind them: not a power of two, of which many would share a few places of a cache.
  int64_t row_bytes() const { return depth * 2 + 64; }
  int64_t panel_bytes() const { return depth * PANEL * 2; }
  int64_t work_bytes() const { return up_to_64(tokens * row_bytes()) + panel_bytes() + MAX_BAND * PANEL * 4; }

  const uint8_t *weights(int64_t head) const { return w + head * depth * columns * 2; }

  // pack(first column, how many, panel)
  template <class Pack> void of_head(int64_t head, uint8_t *rows, const Pack &pack) const {
    const BandOps *bands = experts_bands(X_BF16);
    uint8_t *panel = rows + up_to_64(tokens * row_bytes());
    float *c = (float *)(panel + panel_bytes());
    for (int64_t at = 0; at < depth * columns * 2; at += 64) __builtin_prefetch(weights(head) + at, 0, 2);
    for (int64_t t = 0; t < tokens; t++) memcpy(rows + t * row_bytes(), x + (t * x_token + head * x_head) * 2, depth * 2);
    for (int64_t first = 0; first < columns; first += PANEL) {
      int64_t count = columns - first < PANEL ? columns - first : (int64_t)PANEL;
      pack(first, count, panel);
      for (int64_t t = 0; t < tokens; t += MAX_BAND) {
        int64_t here = tokens - t < MAX_BAND ? tokens - t : (int64_t)MAX_BAND;
        Ahead nothing = {};
        bands->plain(rows + t * row_bytes(), row_bytes(), here, panel, depth, false, &nothing, c);
        void *to[MAX_BAND];
        for (int64_t i = 0; i < here; i++) to[i] = out + (((t + i) * heads + head) * out_head + first) * 2;
        experts_ops(X_BF16)->store(c, PANEL, (int)here, to, (int)count);
      }
    }
    bands->release();
  }
};

bool on_tiles(int64_t x_type, int64_t tokens, int64_t depth) {
  return x_type == ATTENTION_BF16 && tokens >= TILE_ROWS && depth % TILE_K == 0 && experts_bands(X_BF16) && !kernel_choice().fixed_order;
}

const PrefillOps *packing() {
#if defined(__x86_64__)
  return vector_isa() == ISA_AVX512_BF16 ? prefill_avx512_bf16 : vector_isa() == ISA_AVX512 ? prefill_avx512[X_BF16] : prefill_avx2[X_BF16];
#else
  return nullptr;
#endif
}

// w [heads, depth, columns].
void absorb_on_tiles(const Product &by, const uint8_t *q_pe, const QueryStrides &strides, int64_t rope, int threads) {
  int64_t each = by.work_bytes(), rows_at = up_to_64(threads * each), row_bytes = up_to_64(by.depth * (int64_t)sizeof(uint8_t *));
  uint8_t *work = scratch(rows_at + threads * row_bytes);
  team(threads, by.heads, [&](int64_t head, int worker) {
    const uint8_t **row = (const uint8_t **)(work + rows_at + worker * row_bytes);
    by.of_head(head, work + worker * each, [&](int64_t first, int64_t count, uint8_t *panel) {
      for (int64_t n = 0; n < by.depth; n++) row[n] = by.weights(head) + (n * by.columns + first) * 2;
      packing()->pack_values(row, by.depth, count, panel, by.panel_bytes());
    });
    for (int64_t t = 0; t < by.tokens; t++)
      memcpy(by.out + ((t * by.heads + head) * by.out_head + by.columns) * 2, q_pe + (t * strides.pe_token + head * strides.pe_head) * 2, rope * 2);
  });
}

// w [heads, columns, depth].
void expand_on_tiles(const Product &by, int threads) {
  int64_t each = by.work_bytes();
  uint8_t *work = scratch(threads * each);
  team(threads, by.heads, [&](int64_t head, int worker) {
    by.of_head(head, work + worker * each, [&](int64_t first, int64_t count, uint8_t *panel) {
      const uint8_t *row[PANEL];
      for (int64_t i = 0; i < count; i++) row[i] = by.weights(head) + (first + i) * by.depth * 2;
      packing()->pack_keys(row, (int)count, by.depth / 2, panel);
    });
  });
}

}  // namespace

// Queries into the latent's space: out[t, h] = [q_nope[t, h] w[h] | q_pe[t, h]]. q_nope [T, heads, nope] and q_pe [T, heads, rope], each
// with numbers from one t and one head to the next; w [heads, nope, latent]; out [T, heads, latent + rope]. nope is even.
NATIVE_API void attention_absorb(int x_type, const void *q_nope, const void *q_pe, const QueryStrides *strides, const void *w, void *out,
                                 int64_t tokens, int64_t heads, int64_t nope, int64_t latent, int64_t rope, int threads) {
  tape_note(attention_absorb, x_type, q_nope, q_pe, strides, w, out, tokens, heads, nope, latent, rope, threads);
  if (on_tiles(x_type, tokens, nope)) {
    absorb_on_tiles({(const uint8_t *)q_nope, strides->nope_token, strides->nope_head, (const uint8_t *)w, (uint8_t *)out, tokens, heads, nope, latent, latent + rope},
                    (const uint8_t *)q_pe, *strides, rope, threads);
    return;
  }
  const AttentionOps *ops = attention_ops(x_type);
  int64_t item = x_type == ATTENTION_F32 ? 4 : 2, width = latent + rope, each = up_to_64(tokens * latent * 4 + nope * 8);
  uint8_t *work = scratch(threads * each);
  team(threads, heads, [&](int64_t h, int worker) {
    float *acc = (float *)(work + worker * each);
    const uint8_t **row = (const uint8_t **)(acc + (tokens * latent + 1) / 2 * 2);
    for (int64_t n = 0; n < nope; n++) row[n] = (const uint8_t *)w + (h * nope + n) * latent * item;
    memset(acc, 0, tokens * latent * 4);
    for (int64_t n = 0; n < nope; n += KEY_TILE)
      ops->weigh((const uint8_t *)q_nope + (h * strides->nope_head + n) * item, strides->nope_token, tokens, row + n,
                 nope - n < KEY_TILE ? (int)(nope - n) : (int)KEY_TILE, latent, acc, nullptr);
    for (int64_t t = 0; t < tokens; t++) {
      uint8_t *to = (uint8_t *)out + (t * heads + h) * width * item;
      ops->finish(acc + t * latent, latent, 1, to);
      memcpy(to + latent * item, (const uint8_t *)q_pe + (t * strides->pe_token + h * strides->pe_head) * item, rope * item);
    }
  });
}

// Out of the latent's space: out[t, h, v] = x[t, h] . w[h, v]. x [T, heads, latent], w [heads, values, latent], out [T, heads, values].
NATIVE_API void attention_expand(int x_type, const void *x, const void *w, void *out, int64_t tokens, int64_t heads, int64_t latent,
                                 int64_t values, int threads) {
  tape_note(attention_expand, x_type, x, w, out, tokens, heads, latent, values, threads);
  if (on_tiles(x_type, tokens, latent)) {
    expand_on_tiles({(const uint8_t *)x, heads * latent, latent, (const uint8_t *)w, (uint8_t *)out, tokens, heads, latent, values, values}, threads);
    return;
  }
  const AttentionOps *ops = attention_ops(x_type);
  int64_t item = x_type == ATTENTION_F32 ? 4 : 2, each = up_to_64(tokens * values * 4);
  uint8_t *work = scratch(threads * each);
  team(threads, heads, [&](int64_t h, int worker) {
    float *sum = (float *)(work + worker * each);
    const uint8_t *row[KEY_TILE];
    for (int64_t v = 0; v < values; v += KEY_TILE) {
      int n = values - v < KEY_TILE ? (int)(values - v) : (int)KEY_TILE;
      for (int j = 0; j < n; j++) row[j] = (const uint8_t *)w + (h * values + v + j) * latent * item;
      ops->scores((const uint8_t *)x + h * latent * item, heads * latent, tokens, row, n, latent, 1, sum + v, values, nullptr);
    }
    for (int64_t t = 0; t < tokens; t++) ops->finish(sum + t * values, values, 1, (uint8_t *)out + (t * heads + h) * values * item);
  });
}
