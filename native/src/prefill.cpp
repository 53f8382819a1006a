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
      if (x_type == X_BF16) return {experts_avx512_bf16, prefill_avx512_bf16, attention_avx512_bf16};
      [[fallthrough]];
    case ISA_AVX512: return {experts_avx512[x_type], prefill_avx512[x_type], attention_avx512[x_type]};
    case ISA_AVX2: return {experts_avx2[x_type], prefill_avx2[x_type], attention_avx2[x_type]};
  }
#endif
  (void)x_type;
  return {};
}

int64_t up_to(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

struct Item {
  int32_t sequence, kv_head, first, queries;
};

struct Job {
  const PrefillCall *c;
  Tables use;
  int64_t item_bytes, group, key_depth, key_panel, value_panels, chunk, value_panel, acc_stride, queries_each;

  Job(const PrefillCall *call) : c(call), use(tables_for(call->x_type)) {
    item_bytes = c->x_type == X_F32 ? 4 : 2;
    group = c->num_heads / c->num_kv_heads;
    key_depth = c->key_dim + c->shared_dim;
    value_panels = (c->value_dim + PANEL - 1) / PANEL;
    chunk = key_depth + c->value_dim <= 512 ? 256 : 128;  // keys whose panels stay near
    key_panel = key_depth * PANEL * item_bytes;
    value_panel = chunk * PANEL * item_bytes;
    acc_stride = value_panels * PANEL;
    int64_t most = MOST_SUMS / acc_stride < QUERY_ROWS ? MOST_SUMS / acc_stride : (int64_t)QUERY_ROWS;
    queries_each = most > group ? most / group : 1;
  }

  int64_t count() const {
    int64_t items = 0;
    for (int64_t b = 0; b < c->num_sequences; b++) items += (c->ends[b] - c->starts[b] + queries_each - 1) / queries_each * c->num_kv_heads;
    return items;
  }

  // What a thread works in.
  struct Work {
    uint8_t *keys, *values, *p;
    float *scores, *acc, *largest, *sum;
  };
  int64_t rows() const { return queries_each * group; }
  // Returns the bytes that it takes; base is null when they are only counted.
  int64_t lay_out(uint8_t *base, Work *work) const {
    int64_t at = 0;
    auto take = [&](int64_t bytes) { return at += up_to(bytes, 64), base ? base + at - up_to(bytes, 64) : nullptr; };
    work->keys = take(chunk / PANEL * key_panel), work->values = take(value_panels * value_panel);
    work->p = take(STRIP * chunk * item_bytes), work->scores = (float *)take(STRIP * chunk * 4);
    work->acc = (float *)take(rows() * acc_stride * 4), work->largest = (float *)take(rows() * 4), work->sum = (float *)take(rows() * 4);
    return at;
  }

  void run(const Item &item, const Work &work) const {
    int64_t len = c->lens[item.sequence], start = c->starts[item.sequence], total = c->ends[item.sequence] - start;
    int64_t num = item.queries * group, first_seen = len - total + item.first + 1;  // keys that the first query sees
    memset(work.acc, 0, num * acc_stride * 4);
    memset(work.sum, 0, num * 4);
    for (int64_t r = 0; r < num; r++) work.largest[r] = -INFINITY;
    int64_t longest = first_seen + item.queries - 1;
    for (int64_t key = 0; key < longest; key += chunk) {
      int64_t n = longest - key < chunk ? longest - key : chunk;
      pack(item, key, n, work);
      for (int64_t r = 0; r < num; r += STRIP) {
        int64_t rows_here = num - r < STRIP ? num - r : (int64_t)STRIP;
        strip(item, r, rows_here, first_seen - key, n, work);
      }
    }
    for (int64_t r = 0; r < num; r++) {
      int64_t token = start + item.first + r / group, head = item.kv_head * group + r % group;
      use.single->finish(work.acc + r * acc_stride, c->value_dim, 1 / work.sum[r],
                         (uint8_t *)c->out + (token * c->out_stride + head * c->value_dim) * item_bytes);
    }
  }

  static void bring_nearer(const uint8_t *row, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at, 0, 2);
  }

  // Keys and values from `key` on, n of them.
  void pack(const Item &item, int64_t key, int64_t n, const Work &work) const {
    const int64_t *blocks = c->table + item.sequence * c->table_stride;
    const uint8_t *own[PANEL], *shared[PANEL], *value[256];
    for (int64_t i = 0; i < n; i++) {
      int64_t row = blocks[(key + i) / c->block_size] * c->block_size + (key + i) % c->block_size;
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
  }

  // Rows r to r + count against a chunk of n keys, of which the item's first query sees `seen`.
  void strip(const Item &item, int64_t r, int64_t count, int64_t seen, int64_t n, const Work &work) const {
    alignas(64) float c_tile[MAX_ROWS * PANEL];
    auto visible = [&](int64_t row) {
      int64_t keys = seen + row / group;
      return keys < 0 ? 0 : keys < n ? keys : n;
    };
    int64_t most = visible(r + count - 1);
    if (most == 0) return;
    int64_t token = c->starts[item.sequence] + item.first;
    const uint8_t *q = (const uint8_t *)c->q + (token * c->q_stride + item.kv_head * group * key_depth) * item_bytes;
    for (int64_t panel = 0; panel * PANEL < most; panel++)
      for (int64_t m = 0; m < count; m += MAX_ROWS) {
        int64_t height = count - m < MAX_ROWS ? count - m : (int64_t)MAX_ROWS;
        if (visible(r + m + height - 1) <= panel * PANEL) continue;
        const void *a[MAX_ROWS];
        for (int64_t i = 0; i < height; i++) a[i] = q + ((r + m + i) / group * c->q_stride + (r + m + i) % group * key_depth) * item_bytes;
        use.tiles->plain[height](a, {work.keys + panel * key_panel, 0, key_depth, nullptr, 0, 0}, work.scores + (panel * STRIP + m) * PANEL);
      }
    float factor[STRIP];
    int64_t depth[STRIP];
    for (int64_t m = 0; m < count; m += MAX_ROWS) {
      int64_t height = count - m < MAX_ROWS ? count - m : (int64_t)MAX_ROWS;
      depth[m] = up_to(visible(r + m + height - 1), c->x_type == X_F32 ? 1 : 2);  // pairs
      for (int64_t i = m; i < m + height; i++)
        factor[i] = use.ops->softmax(work.scores + i * PANEL, STRIP * PANEL, visible(r + i), depth[m], c->scale, work.largest + r + i,
                                     work.sum + r + i, work.p + i * chunk * item_bytes);
    }
    for (int64_t panel = 0; panel < value_panels; panel++)
      for (int64_t m = 0; m < count; m += MAX_ROWS) {
        int64_t height = count - m < MAX_ROWS ? count - m : (int64_t)MAX_ROWS;
        if (depth[m] == 0) continue;
        const void *a[MAX_ROWS];
        for (int64_t i = 0; i < height; i++) a[i] = work.p + (m + i) * chunk * item_bytes;
        use.tiles->plain[height](a, {work.values + panel * value_panel, 0, depth[m], nullptr, 0, 0}, c_tile);
        use.ops->fold(c_tile, (int)height, factor + m, work.acc + (r + m) * acc_stride + panel * PANEL, acc_stride);
      }
  }
};

}  // namespace

// out[t] = attention of query t over the keys of its sequence up to its own. key_dim and shared_dim are even for bfloat16.
NATIVE_API void attention_prefill(const PrefillCall *call, int threads) {
  tape_refuse("attention_prefill");
  Job job(call);
  int64_t pairs = 0, num_items = job.count();
  for (int64_t b = 0; b < call->num_sequences; b++) pairs += (call->ends[b] - call->starts[b]) * call->lens[b];
  if (num_items == 0) return;
  if (pairs * call->num_heads * (job.key_depth + call->value_dim) < 65536) threads = 1;
  // Smaller pieces where there would be too few for all threads.
  for (; num_items < 4 * threads && job.rows() > 4 * STRIP && job.queries_each > 1; num_items = job.count()) job.queries_each /= 2;
  Job::Work work = {};
  int64_t each = job.lay_out(nullptr, &work), items_at = threads * each;
  uint8_t *start = scratch(items_at + num_items * (int64_t)sizeof(Item));
  Item *items = (Item *)(start + items_at);
  num_items = 0;
  // The last queries of a sequence see most keys: they come first, so that all end at about the same time.
  for (int64_t b = 0; b < call->num_sequences; b++) {
    int64_t queries = call->ends[b] - call->starts[b];
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
