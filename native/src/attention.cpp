// Paged attention of single queries: chunks of keys shared among threads, arithmetic by instruction set (attention.h).
#include "attention.h"

#include <math.h>
#include <string.h>

#include "scratch.h"
#include "tape.h"
#include "team.h"

const AttentionOps *attention_ops(int64_t x_type) {
#if defined(__x86_64__)
  switch (vector_isa()) {
    case ISA_AVX512_BF16: return x_type == ATTENTION_BF16 ? attention_avx512_bf16 : attention_avx512[x_type];
    case ISA_AVX512: return attention_avx512[x_type];
    case ISA_AVX2: return attention_avx2[x_type];
  }
#endif
  (void)x_type;
  return nullptr;
}

namespace {

// One chunk of the keys of a run of queries, for some of their heads.
struct Item {
  int32_t sequence, rows, chunk, first_head, heads;
};

struct Job {
  enum { TILE_BYTES = 8192 };  // of rows that are read in pieces
  const AttentionShape *s;
  const AttentionOps *ops;
  const uint8_t *q, *keys, *values;
  int64_t q_stride;
  float scale;
  const float *sinks;  // [heads], or null
  uint8_t *out;
  int64_t item_bytes, longest_chunk, longest_run;
  Item *items;
  int64_t num_items;
  int64_t *first_part;  // of each sequence: its first chunk among the parts, -1 if it has but one
  float *parts;         // [chunk of a long sequence, head]: acc [value_dim], largest, sum
  uint8_t *work;        // for each thread
  int64_t work_bytes;

  int64_t group() const { return s->num_heads / s->num_kv_heads; }
  int64_t part_size() const { return s->value_dim + 2; }
  int64_t p_stride() const { return longest_chunk + 2; }

  // The first key that a sequence's query sees, and how many it sees.
  int64_t first_seen(int64_t sequence) const { return s->lens[sequence] - seen(sequence); }
  int64_t seen(int64_t sequence) const { return s->window && s->window < s->lens[sequence] ? s->window : s->lens[sequence]; }

  // What the sum of values is multiplied by, given the sum of exp(score - largest).
  float share(int64_t head, float sum, float largest) const {
    if (!sinks) return 1 / sum;
    float top = fmaxf(largest, sinks[head]), less = expf(largest - top);
    return less / (sum * less + expf(sinks[head] - top));
  }

  // How many queries from this one on are of one sequence, as a token and its drafts are: each sees the keys of the one before, in the
  // same blocks. They read each tile of keys together; what is computed of a query does not depend on that.
  int64_t run_at(int64_t first) const {
    int64_t b = first;
    for (; !s->window && b + 1 < s->num_sequences && b + 1 - first < MOST_ROWS; b++) {
      int64_t used = (s->lens[b] + s->block_size - 1) / s->block_size;
      const int64_t *blocks = s->table + b * s->table_stride;
      if (s->lens[b + 1] < s->lens[b] || chunk_of(s->lens[b + 1]) != chunk_of(s->lens[b])) break;
      if (memcmp(blocks, blocks + s->table_stride, used * sizeof(int64_t))) break;
    }
    return b + 1 - first;
  }

  // Keys of a chunk that query r of an item sees.
  int64_t keys_of(const Item &item, int64_t r, int64_t start, int64_t chunk) const {
    int64_t left = s->lens[item.sequence + r] - start;
    return left < chunk ? left : chunk;
  }

  void run(const Item &item, const Item *next, int thread) const {
    int64_t last = item.sequence + item.rows - 1, chunk = chunk_of(seen(last)), start = first_seen(last) + item.chunk * chunk;
    int64_t n = keys_of(item, item.rows - 1, start, chunk);
    uint8_t *at = work + thread * work_bytes;
    const uint8_t **rows = (const uint8_t **)at;
    float *scores = (float *)(at + sizeof(uint8_t *) * 2 * longest_chunk), *acc = scores + longest_run * s->num_heads * longest_chunk;
    uint8_t *p = (uint8_t *)(acc + longest_run * s->num_heads * s->value_dim);
    const uint8_t **value_rows = rows + longest_chunk;
    int64_t first_kv = item.first_head / group(), num_kv = (item.heads + group() - 1) / group();
    int64_t per_kv = item.heads < group() ? item.heads : group();
    rows_of(last, start, n, [&](int64_t i, int64_t row) {
      rows[i] = keys + (row * s->key_stride + first_kv * s->key_dim) * item_bytes;
      value_rows[i] = values + (row * s->value_stride + first_kv * s->value_dim) * item_bytes;
    });
    // Calls visit(r, keys, kv head, how many, ahead) for every tile, each tile's for all queries at once. ahead: of the tile that follows, or of
    // `then`; null: they are near.
    const uint8_t *tile[KEY_TILE], *ahead[KEY_TILE];
    auto tiles = [&](const uint8_t *const *row, int64_t dim, int64_t height, bool near, const uint8_t *const *then, int64_t num_then,
                     int64_t then_dim, auto visit) {
      for (int64_t i = 0; i < n; i += height) {
        const int64_t here = n - i < height ? n - i : height, left = n - i - here < height ? n - i - here : height;
        const bool bring = left ? !near : num_then > 0;
        for (int64_t kv = 0; kv < num_kv; kv++) {
          const int64_t at = kv * dim * item_bytes;
          for (int64_t j = 0; j < here; j++) tile[j] = row[i + j] + at;
          for (int64_t j = 0; bring && j < left; j++) ahead[j] = row[i + here + j] + at;
          for (int64_t j = left; bring && j < height; j++) ahead[j] = j - left < num_then ? then[j - left] + kv * then_dim * item_bytes : tile[0];
          const uint8_t *const *follows = bring ? ahead : nullptr;
          for (int64_t r = 0; r < item.rows; r++) {
            int64_t own = keys_of(item, r, start, chunk) - i;
            if (own > 0) visit(r, i, kv, (int)(own < here ? own : here), follows), follows = nullptr;
          }
        }
      }
    };
    const bool same = keys == values;  // then values are near: keys have been read
    const uint8_t *next_keys[KEY_TILE];
    const int64_t num_next = next ? first_keys(*next, next_keys) : 0;
    const int64_t least_keys = per_kv > 1 ? ops->least_keys : (int64_t)KEY_TILE;
    tiles(rows, s->key_dim, height(num_kv, s->key_dim, least_keys), false, value_rows, same ? 0 : n, s->value_dim,
          [&](int64_t r, int64_t i, int64_t kv, int count, const uint8_t *const *follows) {
      const uint8_t *own_q = q + ((item.sequence + r) * q_stride + (item.first_head + kv * group()) * s->key_dim) * item_bytes;
      ops->scores(own_q, s->key_dim, per_kv, tile, count, s->key_dim, scale,
                  scores + (r * item.heads + kv * group()) * longest_chunk + i, longest_chunk, follows);
    });
    Largest found[item.rows * item.heads];
    for (int64_t r = 0; r < item.rows; r++)
      for (int64_t h = r * item.heads; h < (r + 1) * item.heads && keys_of(item, r, start, chunk) > 0; h++)
        found[h] = ops->softmax(scores + h * longest_chunk, keys_of(item, r, start, chunk), p + h * p_stride() * item_bytes);
    memset(acc, 0, item.rows * item.heads * s->value_dim * sizeof(float));
    tiles(value_rows, s->value_dim, height(num_kv, s->value_dim, ops->least_values), same, next_keys, num_next, s->key_dim,
          [&](int64_t r, int64_t i, int64_t kv, int count, const uint8_t *const *follows) {
      int64_t h = r * item.heads + kv * group();
      ops->weigh(p + (h * p_stride() + i) * item_bytes, p_stride(), per_kv, tile, count, s->value_dim, acc + h * s->value_dim, follows);
    });
    for (int64_t r = 0; r < item.rows; r++)
      if (keys_of(item, r, start, chunk) > 0) give(item, r, acc + r * item.heads * s->value_dim, found + r * item.heads);
  }

  // What query r of an item gets of its chunk.
  void give(const Item &item, int64_t r, const float *acc, const Largest *found) const {
    int64_t sequence = item.sequence + r, part = first_part[sequence];
    for (int64_t h = 0; h < item.heads; h++) {
      const float *own = acc + h * s->value_dim;
      int64_t head = item.first_head + h;
      if (part < 0) {
        ops->finish(own, s->value_dim, share(head, found[h].sum, found[h].largest), out + (sequence * s->num_heads + head) * s->value_dim * item_bytes);
        continue;
      }
      float *to = parts + ((part + item.chunk) * s->num_heads + head) * part_size();
      memcpy(to, own, s->value_dim * sizeof(float));
      to[s->value_dim] = found[h].largest, to[s->value_dim + 1] = found[h].sum;
    }
  }

  // Rows of a tile: of fewer ones, where each is read in pieces, more of what is read lies together.
  int64_t height(int64_t num_kv, int64_t dim, int64_t least) const {
    int64_t rows = KEY_TILE;
    while (num_kv > 1 && rows > least && rows * num_kv * dim * item_bytes > TILE_BYTES) rows /= 2;
    return rows;
  }

  // An item's first keys, of the first head that it has; how many there are, at most KEY_TILE.
  int64_t first_keys(const Item &item, const uint8_t **to) const {
    const int64_t sequence = item.sequence + item.rows - 1, first = first_seen(sequence) + item.chunk * chunk_of(seen(sequence));
    const int64_t left = s->lens[sequence] - first, num = left < KEY_TILE ? left : (int64_t)KEY_TILE;
    rows_of(sequence, first, num, [&](int64_t j, int64_t row) { to[j] = keys + (row * s->key_stride + item.first_head / group() * s->key_dim) * item_bytes; });
    return num;
  }

  // Calls take(j, row of the cache) for `num` keys of a sequence, from one on.
  template <class Take> void rows_of(int64_t sequence, int64_t first, int64_t num, const Take &take) const {
    const int64_t *blocks = s->table + sequence * s->table_stride;
    for (int64_t j = 0; j < num;) {
      int64_t inside = (first + j) % s->block_size, row = blocks[(first + j) / s->block_size] * s->block_size + inside;
      for (; inside < s->block_size && j < num; inside++) take(j++, row++);
    }
  }

  // Join the parts of one head of one sequence, in order, into the first of them.
  void merge(int64_t sequence, int64_t head) const {
    int64_t keys_seen = seen(sequence), chunk = chunk_of(keys_seen), num = (keys_seen + chunk - 1) / chunk, dim = s->value_dim;
    float *first = parts + (first_part[sequence] * s->num_heads + head) * part_size();
    float largest = first[dim];
    int64_t step = s->num_heads * part_size();
    for (int64_t c = 1; c < num; c++) largest = fmaxf(largest, first[c * step + dim]);
    float factor = expf(first[dim] - largest), sum = first[dim + 1] * factor;
    for (int64_t j = 0; j < dim; j++) first[j] *= factor;
    for (int64_t c = 1; c < num; c++) {
      const float *more = first + c * step;
      factor = expf(more[dim] - largest);
      sum += more[dim + 1] * factor;
      for (int64_t j = 0; j < dim; j++) first[j] += more[j] * factor;
    }
    ops->finish(first, dim, share(head, sum, largest), out + (sequence * s->num_heads + head) * dim * item_bytes);
  }

  static int64_t chunk_of(int64_t len) { return CHUNK * ((len + CHUNK * MOST_CHUNKS - 1) / (CHUNK * MOST_CHUNKS)); }
};

int64_t up_to_64(int64_t n) { return (n + 63) / 64 * 64; }

}  // namespace

// out[b] = attention of query b over the keys of its sequence. q [B, heads, key_dim] with q_stride numbers from one b to the next;
// keys, values: the caches; sinks [heads], or null; out [B, heads, value_dim].
NATIVE_API void attention_decode(const AttentionShape *s, const void *q, int64_t q_stride, const void *keys, const void *values,
                                 float scale, const float *sinks, void *out, int threads) {
  tape_note(attention_decode, s, q, q_stride, keys, values, scale, sinks, out, threads);
  if (s->num_sequences == 0) return;
  Job job = {};
  job.s = s, job.ops = attention_ops(s->x_type), job.q = (const uint8_t *)q, job.q_stride = q_stride, job.scale = scale, job.sinks = sinks;
  job.keys = (const uint8_t *)keys, job.values = (const uint8_t *)values, job.out = (uint8_t *)out;
  job.item_bytes = s->x_type == ATTENTION_F32 ? 4 : 2;
  int64_t num_chunks = 0, num_parts = 0, all_keys = 0;
  for (int64_t b = 0; b < s->num_sequences; b++) {
    int64_t seen = job.seen(b), chunk = Job::chunk_of(seen), chunks = (seen + chunk - 1) / chunk;
    all_keys += seen;
    if (chunks > 1) num_parts += chunks;
    if (chunk > job.longest_chunk) job.longest_chunk = chunk;
  }
  for (int64_t b = 0, rows; b < s->num_sequences; b += rows) {
    rows = job.run_at(b);
    int64_t seen = job.seen(b + rows - 1), chunk = Job::chunk_of(seen);
    num_chunks += (seen + chunk - 1) / chunk;
    if (rows > job.longest_run) job.longest_run = rows;
  }
  // A few heads at a time where there would be too little for all threads; below some size starting threads takes longer.
  if (all_keys * (s->key_dim + s->value_dim) * s->num_heads < 65536) threads = 1;
  int64_t unit = s->num_kv_heads > 1 ? job.group() : 4, units = (s->num_heads + unit - 1) / unit;
  int64_t split = threads > 1 && num_chunks < 4 * threads ? (4 * threads + num_chunks - 1) / num_chunks : 1;
  if (split > units) split = units;
  if (s->num_kv_heads == 1 && split > threads) split = threads;  // each reads all keys
  int64_t heads_each = (units + split - 1) / split * unit;
  split = (s->num_heads + heads_each - 1) / heads_each;

  int64_t rows_bytes = 2 * sizeof(uint8_t *) * job.longest_chunk, most_heads = job.longest_run * s->num_heads;
  int64_t head_bytes = job.longest_chunk * 4 + s->value_dim * 4 + job.p_stride() * job.item_bytes;  // scores, acc and p
  job.work_bytes = up_to_64(rows_bytes + most_heads * head_bytes);
  int64_t items_at = up_to_64(threads * job.work_bytes), first_at = items_at + up_to_64(num_chunks * split * sizeof(Item));
  int64_t parts_at = first_at + up_to_64(s->num_sequences * 8);
  job.work = scratch(parts_at + num_parts * s->num_heads * job.part_size() * 4);
  job.items = (Item *)(job.work + items_at), job.first_part = (int64_t *)(job.work + first_at), job.parts = (float *)(job.work + parts_at);
  num_parts = 0;
  for (int64_t b = 0; b < s->num_sequences; b++) {
    int64_t seen = job.seen(b), chunk = Job::chunk_of(seen), chunks = (seen + chunk - 1) / chunk;
    job.first_part[b] = chunks > 1 ? num_parts : -1;
    if (chunks > 1) num_parts += chunks;
  }
  for (int64_t b = 0, rows; b < s->num_sequences; b += rows) {
    rows = job.run_at(b);
    int64_t seen = job.seen(b + rows - 1), chunk = Job::chunk_of(seen);
    for (int64_t c = 0; c < (seen + chunk - 1) / chunk; c++)
      for (int64_t head = 0; head < s->num_heads; head += heads_each) {
        int64_t heads = s->num_heads - head < heads_each ? s->num_heads - head : heads_each;
        job.items[job.num_items++] = {(int32_t)b, (int32_t)rows, (int32_t)c, (int32_t)head, (int32_t)heads};
      }
  }
  int64_t pieces = team_pieces(threads, job.num_items);
  team(threads, pieces, [&](int64_t piece, int worker) {
    int64_t last = job.num_items * (piece + 1) / pieces;
    for (int64_t i = job.num_items * piece / pieces; i < last; i++) job.run(job.items[i], i + 1 < last ? &job.items[i + 1] : nullptr, worker);
  });
  if (num_parts)
    team(threads, s->num_sequences, [&](int64_t b, int) {
      for (int64_t head = 0; head < s->num_heads && job.first_part[b] >= 0; head++) job.merge(b, head);
    });
}
