// Attention of prompts: pieces of queries shared among threads, products on the tiles of the experts (prefill.h).
#include "prefill.h"

#include <math.h>
#include <string.h>

#include "attention.h"
#include "experts.h"
#include "scratch.h"
#include "tape.h"
#include "team.h"

namespace {

struct Tables {
  const ExpertOps *tiles;
  const PrefillOps *ops;
  const AttentionOps *single;
};

Tables tables_for(int64_t x_type) {
#if defined(__x86_64__)
  switch (vector_isa()) {
    case ISA_AVX512_BF16:
      if (x_type == X_BF16) return {experts_ops(x_type), prefill_avx512_bf16, attention_avx512_bf16};
      [[fallthrough]];
    case ISA_AVX512: return {experts_avx512[x_type], prefill_avx512[x_type], attention_avx512[x_type]};
    case ISA_AVX2: return {experts_avx2[x_type], prefill_avx2[x_type], attention_avx2[x_type]};
  }
#endif
  (void)x_type;
  return {};
}

enum { MOST_CHUNK = 512 };

int64_t up_to(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

struct Item {
  int32_t sequence, kv_head, first, queries;
};

struct Job {
  const PrefillCall *c;
  Tables use;
  const BandOps *bands;  // or null
  int64_t tall, strip_rows;  // rows that are multiplied at once; that go through the panels together
  int64_t item_bytes, group, key_depth, key_panel, value_panels, chunk, value_panel, acc_stride, queries_each, q_stride;

  Job(const PrefillCall *call) : c(call), use(tables_for(call->x_type)), bands(experts_bands(call->x_type)) {
    tall = bands ? 2 * (int64_t)TILE_ROWS : (int64_t)MAX_ROWS;
    strip_rows = bands ? tall : (int64_t)STRIP;
    item_bytes = c->x_type == X_F32 ? 4 : 2;
    group = c->num_heads / c->num_kv_heads;
    key_depth = c->key_dim + c->shared_dim;
    value_panels = (c->value_dim + PANEL - 1) / PANEL;
    chunk = key_depth + c->value_dim > 512 ? 128 : bands ? 512 : 256;  // keys whose panels stay near
    key_panel = key_depth * PANEL * item_bytes;
    q_stride = up_to(key_depth, TILE_K) * item_bytes + 64;
    value_panel = chunk * PANEL * item_bytes;
    acc_stride = value_panels * PANEL;
    int64_t most = MOST_SUMS / acc_stride < QUERY_ROWS ? MOST_SUMS / acc_stride : (int64_t)QUERY_ROWS;
    queries_each = most > group ? most / group : 1;
  }

  int64_t first_of(int64_t sequence) const { return c->starts ? c->starts[sequence] : sequence; }
  int64_t queries_of(int64_t sequence) const { return c->starts ? c->ends[sequence] - c->starts[sequence] : 1; }

  int64_t count() const {
    int64_t items = 0;
    for (int64_t b = 0; b < c->num_sequences; b++) items += (queries_of(b) + queries_each - 1) / queries_each * c->num_kv_heads;
    return items;
  }

  // What a thread works in.
  struct Work {
    uint8_t *keys, *values, *p, *q;  // q: for matrix tiles, an item's rows one after another
    float *scores, *acc, *largest, *sum;
  };
  int64_t p_bytes() const { return chunk * item_bytes + 64; }  // of a row: not a power of two, of which many would share a few places of a cache
  int64_t rows() const { return queries_each * group; }
  // Returns the bytes that it takes; base is null when they are only counted.
  int64_t lay_out(uint8_t *base, Work *work) const {
    int64_t at = 0;
    auto take = [&](int64_t bytes) { return at += up_to(bytes, 64), base ? base + at - up_to(bytes, 64) : nullptr; };
    work->keys = take(chunk / PANEL * key_panel), work->values = take(value_panels * value_panel);
    work->p = take(strip_rows * p_bytes()), work->scores = (float *)take(strip_rows * chunk * 4);
    work->q = take(bands ? rows() * q_stride : 0);
    work->acc = (float *)take(rows() * acc_stride * 4), work->largest = (float *)take(rows() * 4), work->sum = (float *)take(rows() * 4);
    return at;
  }

  void run(const Item &item, const Work &work) const {
    int64_t len = c->lens[item.sequence], start = first_of(item.sequence), total = queries_of(item.sequence);
    int64_t num = item.queries * group, first_seen = len - total + item.first + 1;  // keys up to the first query's own
    int64_t least = c->window && first_seen > c->window ? first_seen - c->window : 0;  // the first key that any query sees
    memset(work.acc, 0, num * acc_stride * 4);
    memset(work.sum, 0, num * 4);
    for (int64_t r = 0; r < num; r++) work.largest[r] = -INFINITY;
    int64_t longest = first_seen + item.queries - 1;
    if (bands) collect(item, num, work);
    // Chunks begin where they would without a window: where a query's keys are cut does not depend on the queries beside it.
    for (int64_t key = least / chunk * chunk; key < longest; key += chunk) {
      int64_t n = longest - key < chunk ? longest - key : chunk;
      pack(item, key, n, least, work);
      for (int64_t r = 0; r < num; r += strip_rows) {
        int64_t rows_here = num - r < strip_rows ? num - r : strip_rows;
        strip(item, r, rows_here, first_seen - key, n, work);
      }
    }
    for (int64_t r = 0; r < num; r++) {
      int64_t token = start + item.first + r / group, head = item.kv_head * group + r % group;
      float sum = work.sum[r];
      if (c->sinks) sum += expf(c->sinks[head] - work.largest[r] * use.ops->unit);
      use.single->finish(work.acc + r * acc_stride, c->value_dim, 1 / sum,
                         (uint8_t *)c->out + (token * c->out_stride + head * c->value_dim) * item_bytes);
    }
    if (bands) bands->release();
  }

  const uint8_t *query(const Item &item, int64_t r) const {
    int64_t token = first_of(item.sequence) + item.first + r / group, head = item.kv_head * group + r % group;
    return (const uint8_t *)c->q + (token * c->q_stride + head * key_depth) * item_bytes;
  }

  void collect(const Item &item, int64_t num, const Work &work) const {
    enum { AHEAD = 12 };
    for (int64_t r = 0; r < num; r++) {
      if (r + AHEAD < num) bring_nearer(query(item, r + AHEAD), key_depth * item_bytes);
      memcpy(work.q + r * q_stride, query(item, r), key_depth * item_bytes);
      memset(work.q + r * q_stride + key_depth * item_bytes, 0, q_stride - key_depth * item_bytes);
    }
  }

  static void bring_nearer(const uint8_t *row, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at, 0, 2);
  }

  // Keys and values from `key` on, n of them. The key `least` stands for those before it, which no query sees.
  void pack(const Item &item, int64_t key, int64_t n, int64_t least, const Work &work) const {
    const int64_t *blocks = c->table + item.sequence * c->table_stride;
    const uint8_t *own[PANEL], *shared[PANEL], *value[MOST_CHUNK];
    for (int64_t i = 0; i < n; i++) {
      int64_t place = key + i > least ? key + i : least, row = blocks[place / c->block_size] * c->block_size + place % c->block_size;
      int64_t at = i % PANEL;
      own[at] = (const uint8_t *)c->keys + (row * c->key_stride + item.kv_head * c->key_dim) * item_bytes;
      shared[at] = (const uint8_t *)c->shared + row * c->shared_stride * item_bytes;
      value[i] = (const uint8_t *)c->values + (row * c->value_stride + item.kv_head * c->value_dim) * item_bytes;
      bring_nearer(own[at], c->key_dim * item_bytes);
      bring_nearer(value[i], c->value_dim * item_bytes);
      if (at + 1 < PANEL && i + 1 < n) continue;  // a panel is full
      uint8_t *panel = work.keys + i / PANEL * key_panel;
      use.ops->pack_keys(own, (int)at + 1, c->key_dim * item_bytes / 4, panel);
      if (c->shared_dim) use.ops->pack_keys(shared, (int)at + 1, c->shared_dim * item_bytes / 4, panel + c->key_dim * PANEL * item_bytes);
    }
    use.ops->pack_values(value, n, c->value_dim, work.values, value_panel);
    int64_t packed = up_to(n, 2) * PANEL * item_bytes, read = up_to(n, TILE_K) * PANEL * item_bytes;
    for (int64_t panel = 0; bands && packed < read && panel < value_panels; panel++) memset(work.values + panel * value_panel + packed, 0, read - packed);
  }

  // c [height, 64] = rows of `stride` bytes, or those that row_at tells, times a panel.
  template <class RowAt> void multiply(const RowAt &row_at, int64_t stride, int64_t height, const uint8_t *panel, int64_t depth, float *out) const {
    if (bands) return bands->shaped(row_at(0), stride, height, panel, depth, out);
    const void *a[MAX_ROWS];
    for (int64_t i = 0; i < height; i++) a[i] = row_at(i);
    use.tiles->plain[height](a, {panel, 0, depth, nullptr, 0, 0}, out);
  }

  // Rows r to r + count against a chunk of n keys, of which the item's first query sees `seen`.
  void strip(const Item &item, int64_t r, int64_t count, int64_t seen, int64_t n, const Work &work) const {
    alignas(64) float c_tile[MOST_STRIP * PANEL];
    auto visible = [&](int64_t row) {
      int64_t keys = seen + row / group;
      return keys < 0 ? 0 : keys < n ? keys : n;
    };
    // Keys of the chunk that lie behind the row's window.
    auto hidden = [&](int64_t row) {
      int64_t keys = c->window ? seen + row / group - c->window : 0;
      return keys < 0 ? 0 : keys;
    };
    int64_t most = visible(r + count - 1);
    if (most <= hidden(r)) return;
    if (bands) bands->shape(count);
    for (int64_t panel = 0; panel * PANEL < most; panel++)
      for (int64_t m = 0; m < count; m += tall) {
        int64_t height = count - m < tall ? count - m : tall;
        if (visible(r + m + height - 1) <= panel * PANEL) continue;
        multiply([&](int64_t i) { return bands ? work.q + (r + m + i) * q_stride : query(item, r + m + i); }, q_stride, height,
                 work.keys + panel * key_panel, key_depth, work.scores + (panel * strip_rows + m) * PANEL);
      }
    float factor[MOST_STRIP];
    int64_t depth[MOST_STRIP], together = bands ? TILE_K : c->x_type == X_F32 ? 1 : 2, p_bytes = this->p_bytes();  // k that are multiplied together
    for (int64_t m = 0; m < count; m += tall) {
      int64_t height = count - m < tall ? count - m : tall;
      depth[m] = up_to(visible(r + m + height - 1), together);
      for (int64_t i = m; i < m + height; i++) {
        int64_t keys = visible(r + i), behind = hidden(r + i);
        if (behind >= keys) keys = 0;
        for (int64_t k = 0; keys && k < behind; k++) work.scores[i * PANEL + k / PANEL * strip_rows * PANEL + k % PANEL] = -INFINITY;
        factor[i] = use.ops->softmax(work.scores + i * PANEL, strip_rows * PANEL, keys, depth[m], c->scale, work.largest + r + i,
                                     work.sum + r + i, work.p + i * p_bytes);
      }
    }
    for (int64_t panel = 0; panel < value_panels; panel++)
      for (int64_t m = 0; m < count; m += tall) {
        int64_t height = count - m < tall ? count - m : tall;
        if (depth[m] == 0) continue;
        multiply([&](int64_t i) { return work.p + (m + i) * p_bytes; }, p_bytes, height, work.values + panel * value_panel, depth[m], c_tile);
        use.ops->fold(c_tile, (int)height, factor + m, work.acc + (r + m) * acc_stride + panel * PANEL, acc_stride);
      }
  }
};

}  // namespace

namespace {
void attend(const PrefillCall *call, int threads) {
  Job job(call);
  int64_t pairs = 0, num_items = job.count();
  for (int64_t b = 0; b < call->num_sequences; b++) pairs += job.queries_of(b) * call->lens[b];
  if (num_items == 0) return;
  if (pairs * call->num_heads * (job.key_depth + call->value_dim) < 65536) threads = 1;
  // Smaller pieces where there would be too few for all threads.
  for (; num_items < 4 * threads && job.rows() > 4 * job.strip_rows && job.queries_each > 1; num_items = job.count()) job.queries_each /= 2;
  Job::Work work = {};
  int64_t each = job.lay_out(nullptr, &work), items_at = threads * each;
  uint8_t *start = scratch(items_at + num_items * (int64_t)sizeof(Item));
  Item *items = (Item *)(start + items_at);
  num_items = 0;
  // The last queries of a sequence see most keys: they come first, so that all end at about the same time.
  for (int64_t b = 0; b < call->num_sequences; b++) {
    int64_t queries = job.queries_of(b);
    for (int64_t end = queries; end > 0; end -= job.queries_each)
      for (int64_t kv = 0; kv < call->num_kv_heads; kv++) {
        int64_t first = end < job.queries_each ? 0 : end - job.queries_each;
        items[num_items++] = {(int32_t)b, (int32_t)kv, (int32_t)first, (int32_t)(end - first)};
      }
  }
  team(threads, num_items, [&](int64_t i, int worker) {
    Job::Work own;
    job.lay_out(start + worker * each, &own);
    job.run(items[i], own);
  });
}
}  // namespace

// out[t] = attention of query t over the keys of its sequence up to its own. key_dim and shared_dim are even for bfloat16.
NATIVE_API void attention_prefill(const PrefillCall *call, int threads) {
  tape_refuse("attention_prefill");
  attend(call, threads);
}

// The same for a query of each sequence, call->starts null; lens and table are kept where they are.
NATIVE_API void attention_fixed_order(const PrefillCall *call, int threads) {
  tape_note(attention_fixed_order, call, threads);
  attend(call, threads);
}
