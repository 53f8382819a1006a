// The choice of keys for sparse attention: pieces of queries and keys shared among threads (index.h).
#include "index.h"

#include <string.h>

#include "experts.h"
#include "prefill.h"
#include "scratch.h"
#include "tape.h"
#include "team.h"

namespace {

struct Tables {
  const ExpertOps *tiles;
  const PrefillOps *pack;
  const IndexOps *ops;
};

Tables tables_for(int64_t x_type) {
#if defined(__x86_64__)
  switch (vector_isa()) {
    case ISA_AVX512_BF16:
      if (x_type == X_BF16) return {experts_avx512_bf16, prefill_avx512_bf16, index_avx512[x_type]};
      [[fallthrough]];
    case ISA_AVX512: return {experts_avx512[x_type], prefill_avx512[x_type], index_avx512[x_type]};
    case ISA_AVX2: return {experts_avx2[x_type], prefill_avx2[x_type], index_avx2[x_type]};
  }
#endif
  (void)x_type;
  return {};
}

int64_t up_to(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Of so many neighbouring queries of one sequence the scores of some keys.
struct Piece {
  int32_t first, count, key;
};

struct Job {
  const IndexCall *c;
  Tables use;
  const BandOps *bands;  // or null
  int64_t item_bytes, q_bytes, panel_bytes, heads_at_once;

  explicit Job(const IndexCall *call) : c(call), use(tables_for(call->x_type)), bands(experts_bands(call->x_type)) {
    item_bytes = c->x_type == X_F32 ? 4 : 2;
    q_bytes = bands ? up_to(c->dim, TILE_K) * item_bytes : c->dim * item_bytes;
    panel_bytes = c->dim * PANEL * item_bytes;
    heads_at_once = c->num_heads < MAX_BAND ? c->num_heads : (int64_t)MAX_BAND;
  }

  // What a thread works in: a panel, 64 widened keys, queries with zeros behind them, products.
  int64_t work_bytes() const {
    return up_to(panel_bytes, 64) + up_to(c->fp8 ? panel_bytes : 0, 64) + up_to(copies() ? INDEX_QUERIES * c->num_heads * q_bytes : 0, 64);
  }
  bool copies() const { return bands && c->dim % TILE_K; }
  int64_t sequence(int64_t query) const { return c->sequence ? c->sequence[query] : query; }
  bool chooses(int64_t query) const { return c->lens[query] > c->topk; }

  // The queries from `first` on that go together, at most up to `end`.
  int64_t together(int64_t first, int64_t end) const {
    int64_t i = first + 1;
    while (i < end && i - first < INDEX_QUERIES && sequence(i) == sequence(first)) i++;
    return i - first;
  }
  int64_t longest(int64_t first, int64_t count) const {
    int64_t most = 0;
    for (int64_t i = first; i < first + count; i++)
      if (chooses(i) && c->lens[i] > most) most = c->lens[i];
    return most;
  }

  // scores: of the piece's first query, `stride` from one query to the next.
  void score(const Piece &piece, uint8_t *work, float *scores, int64_t stride) const {
    alignas(64) float products[MAX_BAND * PANEL], part[PANEL];
    uint8_t *panel = work, *wide = panel + up_to(panel_bytes, 64), *queries = wide + up_to(c->fp8 ? panel_bytes : 0, 64);
    int64_t longest_seen = longest(piece.first, piece.count), end = piece.key + INDEX_KEYS;
    if (end > longest_seen) end = longest_seen;
    const uint8_t *row[INDEX_KEYS];
    find(sequence(piece.first), piece.key, end, row);
    if (copies()) copy_queries(piece, queries);
    for (int64_t key = piece.key; key < end; key += PANEL) {
      pack(row + (key - piece.key), end - key, panel, wide);
      for (int64_t i = 0; i < piece.count; i++) {
        int64_t query = piece.first + i;
        if (!chooses(query) || c->lens[query] <= key) continue;
        const uint8_t *q = copies() ? queries + i * c->num_heads * q_bytes : (const uint8_t *)c->q + query * c->q_stride * item_bytes;
        float *to = scores + i * stride + key;
        for (int64_t head = 0; head < c->num_heads; head += heads_at_once) {
          int64_t heads = c->num_heads - head < heads_at_once ? c->num_heads - head : heads_at_once;
          multiply(q + head * q_bytes, heads, panel, products);
          use.ops->weighted_relu(products, heads, c->weight + query * c->num_heads + head, head ? part : to);
          for (int64_t j = 0; head && j < PANEL; j++) to[j] += part[j];
        }
      }
    }
    if (bands) bands->release();
  }

  // products [heads, 64] = the heads of a query times a panel.
  void multiply(const uint8_t *q, int64_t heads, const uint8_t *panel, float *products) const {
    if (bands) {
      Ahead nothing = {};
      bands->plain(q, q_bytes, heads, panel, c->dim, false, &nothing, products);
      return;
    }
    const void *a[MAX_ROWS];
    for (int64_t m = 0; m < heads;) {
      int64_t height = cut_rows(heads - m, MAX_ROWS);
      for (int64_t i = 0; i < height; i++) a[i] = q + (m + i) * q_bytes;
      use.tiles->plain[height](a, {panel, 0, c->dim, nullptr, 0, 0}, products + m * PANEL);
      m += height;
    }
  }

  void copy_queries(const Piece &piece, uint8_t *to) const {
    for (int64_t i = 0; i < piece.count; i++)
      for (int64_t h = 0; h < c->num_heads; h++, to += q_bytes) {
        memcpy(to, (const uint8_t *)c->q + ((piece.first + i) * c->q_stride + h * c->dim) * item_bytes, c->dim * item_bytes);
        memset(to + c->dim * item_bytes, 0, q_bytes - c->dim * item_bytes);
      }
  }

  // Where keys first to end of a sequence lie.
  void find(int64_t sequence, int64_t first, int64_t end, const uint8_t **row) const {
    const int64_t *block = c->table + sequence * c->table_stride + first / c->block_size;
    for (int64_t inside = first % c->block_size, i = first; i < end; inside = 0, block++) {
      const uint8_t *at = c->keys + (*block * c->block_size + inside) * c->key_bytes;
      for (; inside < c->block_size && i < end; inside++, i++, at += c->key_bytes) *row++ = at;
    }
  }

  // Up to 64 of n keys. Those after them are brought nearer meanwhile.
  void pack(const uint8_t **row, int64_t n, uint8_t *panel, uint8_t *wide) const {
    int64_t here = n < PANEL ? n : (int64_t)PANEL;
    for (int64_t i = here; i < n && i < 2 * PANEL; i++)
      for (int64_t at = 0; at < c->key_bytes; at += 64) __builtin_prefetch(row[i] + at, 0, 2);
    for (int64_t i = 0; c->fp8 && i < here; i++) {
      uint8_t *to = wide + i * c->dim * item_bytes;
      use.ops->widen(row[i], c->dim, to);
      row[i] = to;
    }
    use.pack->pack_keys(row, (int)here, c->dim * item_bytes / 4, panel);
  }

  // The topk largest of its scores, or all it sees.
  void choose(int64_t query, const float *scores) const {
    int64_t len = c->lens[query], count = chooses(query) ? c->topk : len, *to = c->rows + query * c->topk;
    const int64_t *blocks = c->table + sequence(query) * c->table_stride;
    uint32_t least = 0;
    int64_t equal = chooses(query) ? threshold(scores, len, count, &least) : 0, chosen = 0;
    for (int64_t start = 0, block = 0; start < len; start += c->block_size, block++) {
      int64_t inside = len - start < c->block_size ? len - start : c->block_size, row = blocks[block] * c->block_size;
      if (!chooses(query)) {
        for (int64_t i = 0; i < inside; i++) to[start + i] = row + i;
        continue;
      }
      for (int64_t i = 0; i < inside && chosen < count; i++) {  // without branches that could not be foreseen
        uint32_t x = ordered(scores[start + i]);
        bool same = x == least;
        to[chosen] = row + i;
        chosen += (x > least) | (same & (equal > 0)), equal -= same;
      }
    }
    memset(to + count, 0, (c->topk - count) * sizeof(int64_t));
    c->counts[query] = count;
  }

  // Whole numbers in the order of the numbers.
  static uint32_t ordered(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits ^ (uint32_t)((int32_t)bits >> 31 | (int32_t)0x80000000);
  }

  // The count-th largest; returns how many that are equal to it are among the count. Its bits are found from the highest on.
  static int64_t threshold(const float *scores, int64_t n, int64_t count, uint32_t *least) {
    static const int shifts[3] = {21, 10, 0}, widths[3] = {11, 11, 10};
    uint32_t found = 0, mask = 0, counts[2][2048];  // neighbours are often alike, and would wait for each other in one place
    for (int pass = 0; pass < 3; pass++) {
      uint32_t last = (1u << widths[pass]) - 1;
      memset(counts, 0, sizeof counts);
      for (int64_t i = 0; i < n; i++) {
        uint32_t x = ordered(scores[i]);
        if ((x & mask) == found) counts[i & 1][x >> shifts[pass] & last]++;
      }
      uint32_t bin = last;
      for (; counts[0][bin] + counts[1][bin] < count; bin--) count -= counts[0][bin] + counts[1][bin];
      found |= bin << shifts[pass], mask |= last << shifts[pass];
    }
    *least = found;
    return count;
  }

  // Queries first to end, whose scores lie in `scores`, `stride` apart.
  void run(int64_t first, int64_t end, float *scores, int64_t stride, Piece *pieces, uint8_t *work, int threads) const {
    int64_t num = 0, each = work_bytes();
    for (int64_t i = first; i < end;) {
      int64_t count = together(i, end), longest_seen = longest(i, count);
      for (int64_t key = 0; key < longest_seen; key += INDEX_KEYS) pieces[num++] = {(int32_t)i, (int32_t)count, (int32_t)key};
      i += count;
    }
    team(threads, num, [&](int64_t i, int worker) {
      score(pieces[i], work + worker * each, scores + (pieces[i].first - first) * stride, stride);
    });
    team(threads, end - first, [&](int64_t i, int) { choose(first + i, scores + i * stride); });
  }
};

}  // namespace

// Of each query the rows of the topk keys with the largest scores, of equal ones the first. dim is even for bfloat16.
NATIVE_API void index_choose(const IndexCall *call, int threads) {
  tape_note(index_choose, call, threads);
  Job job(call);
  int64_t stride = PANEL;
  for (int64_t i = 0; i < call->num_queries; i++)
    if (job.chooses(i) && call->lens[i] > stride) stride = up_to(call->lens[i], PANEL);
  int64_t at_once = INDEX_ROOM / stride > 1 ? INDEX_ROOM / stride : 1;
  if (at_once > call->num_queries) at_once = call->num_queries;
  int64_t most_pieces = at_once * (stride / INDEX_KEYS + 1), each = job.work_bytes();
  uint8_t *start = scratch(threads * each + at_once * stride * sizeof(float) + most_pieces * sizeof(Piece));
  float *scores = (float *)(start + threads * each);
  Piece *pieces = (Piece *)(scores + at_once * stride);
  for (int64_t first = 0; first < call->num_queries; first += at_once) {
    int64_t end = first + at_once < call->num_queries ? first + at_once : call->num_queries;
    job.run(first, end, scores, stride, pieces, start, threads);
  }
}
