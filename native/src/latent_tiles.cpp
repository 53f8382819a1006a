// Latent attention of single queries on matrix tiles (latent_tiles.h). A sequence's keys are cut into parts that depend on its length
// alone, and each part's results are merged in order, as in attention.h: neither the company nor the number of threads changes a result.
#include "latent_tiles.h"

#include <math.h>
#include <string.h>

#include "attention.h"
#include "experts.h"
#include "prefill.h"
#include "scratch.h"
#include "tape.h"
#include "team.h"

// Whether there is such a kernel for so many heads.
NATIVE_API int latent_tiles_wanted(int64_t heads) { return heads >= TILE_ROWS && experts_bands(X_BF16) && vector_isa() == ISA_AVX512_BF16; }

#if defined(__x86_64__)
namespace {

int64_t up_to(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

struct Item {
  int32_t sequence, rows, part;  // rows: queries of one sequence, from this one on
};

struct Job {
  const LatentTilesCall *c;
  const BandOps *bands;
  int64_t key_panel, value_panels, value_panel, q_bytes, acc_stride;
  int64_t *first_part;  // of each sequence: where its results lie among the parts, -1 if it has but one
  float *parts;         // [part of a long sequence, head]: acc [acc_stride], largest, sum
  int64_t longest_run;  // queries of an item

  explicit Job(const LatentTilesCall *call) : c(call), bands(experts_bands(X_BF16)) {
    longest_run = 1;
    key_panel = c->key_dim * PANEL * 2;
    value_panels = (c->value_dim + PANEL - 1) / PANEL;
    value_panel = LATENT_CHUNK * PANEL * 2;
    q_bytes = up_to(c->key_dim, TILE_K) * 2 + 64;
    acc_stride = value_panels * PANEL;
  }

  // Keys of a part: a multiple of what is packed at a time.
  static int64_t keys_of(int64_t len) { return CHUNK * ((len + CHUNK * MOST_CHUNKS - 1) / (CHUNK * MOST_CHUNKS)); }
  static int64_t parts_of(int64_t len) { return (len + keys_of(len) - 1) / keys_of(len); }
  int64_t part_size() const { return acc_stride + 2; }

  // How many queries from this one on, at most `most`, are of one sequence, as a token and its drafts are: each sees the keys of the one
  // before, in the same blocks. What is packed of the keys serves them all; what is computed of a query does not depend on that.
  int64_t run_at(int64_t first, int64_t most) const {
    int64_t b = first;
    for (; b + 1 < c->num_sequences && b + 1 - first < most; b++) {
      int64_t used = (c->lens[b] + c->block_size - 1) / c->block_size;
      const int64_t *blocks = c->table + b * c->table_stride;
      if (c->lens[b + 1] < c->lens[b] || keys_of(c->lens[b + 1]) != keys_of(c->lens[b])) break;
      if (memcmp(blocks, blocks + c->table_stride, used * sizeof(int64_t))) break;
    }
    return b + 1 - first;
  }
  // As many as leave something for every thread, and whose sums stay near.
  int64_t most_rows(int threads) const {
    enum { NEAR_BYTES = 1 << 20 };
    int64_t most = NEAR_BYTES / (c->num_heads * acc_stride * 4);
    most = most < 1 ? 1 : most > MOST_ROWS ? (int64_t)MOST_ROWS : most;
    for (; most > 1 && count_items(most) < 2 * threads; most /= 2) {}
    return most;
  }
  int64_t count_items(int64_t most) const {
    int64_t count = 0;
    for (int64_t b = 0, rows; b < c->num_sequences; b += rows) rows = run_at(b, most), count += parts_of(c->lens[b + rows - 1]);
    return count;
  }

  // What a thread works in.
  struct Work {
    uint8_t *keys, *values, *p, *q;
    float *scores, *acc, *largest, *sum;
  };
  int64_t lay_out(uint8_t *base, Work *work) const {
    int64_t at = 0;
    auto take = [&](int64_t bytes) { return at += up_to(bytes, 64), base ? base + at - up_to(bytes, 64) : nullptr; };
    work->keys = take(LATENT_CHUNK / PANEL * key_panel), work->values = take(value_panels * value_panel);
    work->p = take(LATENT_ROWS * LATENT_CHUNK * 2), work->scores = (float *)take(LATENT_ROWS * LATENT_CHUNK * 4);
    int64_t heads = longest_run * c->num_heads;
    work->q = take(heads * q_bytes), work->acc = (float *)take(heads * acc_stride * 4);
    work->largest = (float *)take(heads * 4), work->sum = (float *)take(heads * 4);
    return at;
  }

  void run(const Item &item, const Work &work) const {
    int64_t last = item.sequence + item.rows - 1, len = c->lens[last], each = keys_of(len), start = item.part * each, end = len - start < each ? len : start + each;
    int64_t all_heads = item.rows * c->num_heads;
    memset(work.acc, 0, all_heads * acc_stride * 4);
    for (int64_t h = 0; h < all_heads; h++) {
      const uint8_t *q = (const uint8_t *)c->q + ((item.sequence + h / c->num_heads) * c->q_stride + h % c->num_heads * c->key_dim) * 2;
      memcpy(work.q + h * q_bytes, q, c->key_dim * 2);
      memset(work.q + h * q_bytes + c->key_dim * 2, 0, q_bytes - c->key_dim * 2);
      work.largest[h] = -INFINITY, work.sum[h] = 0;
    }
    for (int64_t key = start; key < end; key += LATENT_CHUNK) {
      int64_t n = end - key < LATENT_CHUNK ? end - key : (int64_t)LATENT_CHUNK, next = end - key - n < LATENT_CHUNK ? end - key - n : (int64_t)LATENT_CHUNK;
      const uint8_t *row[2 * LATENT_CHUNK];
      find(last, key, n + next, row);
      pack(row, n, work);
      // Those that see most keys first: what others do not see is then taken out.
      int64_t strips = (c->num_heads + LATENT_ROWS - 1) / LATENT_ROWS, num_strips = strips * item.rows, at = 0, packed = n;
      for (int64_t r = item.rows - 1; r >= 0; r--) {
        int64_t left = c->lens[item.sequence + r] - key, own = left < n ? left : n;
        if (own > 0) packed = take_out(own, packed, work);
        for (int64_t h = 0; h < c->num_heads; h += LATENT_ROWS, at++) {
          // Beside each strip some of the rows that come next: asked for all at once they would wait for each other.
          for (int64_t i = next * at / num_strips; i < next * (at + 1) / num_strips; i++)
            for (int64_t byte = 0; byte < c->key_dim * 2; byte += 64) __builtin_prefetch(row[n + i] + byte, 0, 2);
          if (own > 0) strip(r * c->num_heads + h, c->num_heads - h < LATENT_ROWS ? c->num_heads - h : (int64_t)LATENT_ROWS, own, work);
        }
      }
    }
    bands->release();
    for (int64_t r = 0; r < item.rows; r++)
      if (c->lens[item.sequence + r] > start) give(item.sequence + r, item.part, r * c->num_heads, work);
  }

  // What a query gets of its part. from: where its heads are.
  void give(int64_t sequence, int64_t number, int64_t from, const Work &work) const {
    int64_t part = first_part[sequence];
    for (int64_t h = 0; h < c->num_heads; h++) {
      const float *own = work.acc + (from + h) * acc_stride;
      if (part < 0) {
        finish(own, 1 / work.sum[from + h], sequence, h);
        continue;
      }
      float *to = parts + ((part + number) * c->num_heads + h) * part_size();
      memcpy(to, own, acc_stride * 4);
      to[acc_stride] = work.largest[from + h], to[acc_stride + 1] = work.sum[from + h];
    }
  }

  // Packed values of keys from n on become zero, up to `packed`; n.
  int64_t take_out(int64_t n, int64_t packed, const Work &work) const {
    for (int64_t i = n; i < packed; i++)
      for (int64_t panel = 0; panel < value_panels; panel++) {
        uint16_t *to = (uint16_t *)(work.values + panel * value_panel) + i / 2 * 2 * PANEL + i % 2;
        for (int64_t j = 0; j < PANEL; j++) to[2 * j] = 0;
      }
    return n;
  }

  void finish(const float *acc, float factor, int64_t sequence, int64_t head) const {
    attention_avx512_bf16->finish(acc, c->value_dim, factor, (uint8_t *)c->out + (sequence * c->num_heads + head) * c->value_dim * 2);
  }

  // Where n keys from `key` on lie.
  void find(int64_t sequence, int64_t key, int64_t n, const uint8_t **row) const {
    const int64_t *block = c->table + sequence * c->table_stride + key / c->block_size;
    for (int64_t inside = key % c->block_size, i = 0; i < n; inside = 0, block++)
      for (; inside < c->block_size && i < n; inside++, i++)
        row[i] = (const uint8_t *)c->keys + (*block * c->block_size + inside) * c->key_stride * 2;
  }

  void pack(const uint8_t *const *row, int64_t n, const Work &work) const {
    for (int64_t i = 0; i < n; i += PANEL)
      prefill_avx512_bf16->pack_keys(row + i, (int)(n - i < PANEL ? n - i : (int64_t)PANEL), c->key_dim / 2, work.keys + i / PANEL * key_panel);
    prefill_avx512_bf16->pack_values(row, n, c->value_dim, work.values, value_panel);
    int64_t packed = up_to(n, 2) * PANEL * 2, read = up_to(n, TILE_K) * PANEL * 2;
    for (int64_t panel = 0; packed < read && panel < value_panels; panel++) memset(work.values + panel * value_panel + packed, 0, read - packed);
  }

  // Some heads against n packed keys.
  void strip(int64_t head, int64_t rows, int64_t n, const Work &work) const {
    alignas(64) float products[LATENT_ROWS * PANEL], factor[LATENT_ROWS];
    Ahead nothing = {};
    for (int64_t panel = 0; panel * PANEL < n; panel++)
      bands->plain(work.q + head * q_bytes, q_bytes, rows, work.keys + panel * key_panel, c->key_dim, false, &nothing, work.scores + panel * LATENT_ROWS * PANEL);
    int64_t depth = up_to(n, TILE_K);
    for (int64_t i = 0; i < rows; i++)
      factor[i] = prefill_avx512_bf16->softmax(work.scores + i * PANEL, LATENT_ROWS * PANEL, n, depth, c->scale, work.largest + head + i,
                                               work.sum + head + i, work.p + i * LATENT_CHUNK * 2);
    for (int64_t panel = 0; panel < value_panels; panel++) {
      bands->plain(work.p, LATENT_CHUNK * 2, rows, work.values + panel * value_panel, depth, false, &nothing, products);
      prefill_avx512_bf16->fold(products, (int)rows, factor, work.acc + head * acc_stride + panel * PANEL, acc_stride);
    }
  }

  // Join the parts of one head of one sequence, in order, into the first of them. Largest scores are in powers of two (prefill_avx512bf16.cpp).
  void merge(int64_t sequence, int64_t head) const {
    int64_t num = parts_of(c->lens[sequence]), step = c->num_heads * part_size();
    float *first = parts + (first_part[sequence] * c->num_heads + head) * part_size(), largest = first[acc_stride];
    for (int64_t i = 1; i < num; i++) largest = fmaxf(largest, first[i * step + acc_stride]);
    float factor = exp2f(first[acc_stride] - largest), sum = first[acc_stride + 1] * factor;
    for (int64_t j = 0; j < acc_stride; j++) first[j] *= factor;
    for (int64_t i = 1; i < num; i++) {
      const float *more = first + i * step;
      factor = exp2f(more[acc_stride] - largest);
      sum += more[acc_stride + 1] * factor;
      for (int64_t j = 0; j < acc_stride; j++) first[j] += more[j] * factor;
    }
    finish(first, 1 / sum, sequence, head);
  }
};

}  // namespace
#endif

// out[b] = attention of query b over the keys of its sequence. key_dim is even. Only where latent_tiles_wanted.
NATIVE_API void latent_tiles(const LatentTilesCall *call, int threads) {
  tape_note(latent_tiles, call, threads);
#if defined(__x86_64__)
  if (call->num_sequences == 0) return;
  Job job(call);
  const int64_t most = job.most_rows(threads);
  int64_t num_items = job.count_items(most), num_parts = 0;
  for (int64_t b = 0, rows; b < call->num_sequences; b += rows) {
    rows = job.run_at(b, most);
    if (rows > job.longest_run) job.longest_run = rows;
  }
  for (int64_t b = 0; b < call->num_sequences; b++) {
    int64_t parts = Job::parts_of(call->lens[b]);
    num_parts += parts > 1 ? parts : 0;
  }
  Job::Work none;
  int64_t each = job.lay_out(nullptr, &none), items_at = threads * each, first_at = items_at + up_to(num_items * (int64_t)sizeof(Item), 64);
  int64_t parts_at = first_at + up_to(call->num_sequences * 8, 64);
  uint8_t *start = scratch(parts_at + num_parts * call->num_heads * job.part_size() * 4);
  Item *items = (Item *)(start + items_at);
  job.first_part = (int64_t *)(start + first_at), job.parts = (float *)(start + parts_at);
  num_items = num_parts = 0;
  for (int64_t b = 0; b < call->num_sequences; b++) {
    int64_t parts = Job::parts_of(call->lens[b]);
    job.first_part[b] = parts > 1 ? num_parts : -1;
    if (parts > 1) num_parts += parts;
  }
  for (int64_t b = 0, rows; b < call->num_sequences; b += rows) {
    rows = job.run_at(b, most);
    for (int64_t i = 0; i < Job::parts_of(call->lens[b + rows - 1]); i++) items[num_items++] = {(int32_t)b, (int32_t)rows, (int32_t)i};
  }
  team(threads, num_items, [&](int64_t i, int worker) {
    Job::Work work;
    job.lay_out(start + worker * each, &work);
    job.run(items[i], work);
  });
  if (num_parts)
    team(threads, call->num_sequences * call->num_heads, [&](int64_t i, int) {
      if (job.first_part[i / call->num_heads] >= 0) job.merge(i / call->num_heads, i % call->num_heads);
    });
#endif
}
