// Fused experts: rows sorted by expert, work shared among threads, tiles by instruction set (experts.h has the layout).
#include "experts.h"

#include <string.h>

#include "choice.h"
#include "scratch.h"
#include "tape.h"
#include "team.h"

static int64_t up_to(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

NATIVE_API void experts_shape(ExpertShape *s) {
  int64_t even = s->x_type == X_F32 && s->format == W_PLAIN ? 1 : 2;
  s->up_panels = up_to(s->width, 32) / 32;
  s->down_panels = up_to(s->hidden, PANEL) / PANEL;
  s->up_depth = up_to(s->hidden, even);
  s->down_depth = up_to(s->width, even);
  s->up_bytes = Multiplier{nullptr, nullptr, s->x_type, up_format(s->format), 0}.panel_bytes(s->up_depth);
  s->down_bytes = Multiplier{nullptr, nullptr, s->x_type, down_format(s->format), 0}.panel_bytes(s->down_depth);
  s->bias_at = up_to(s->up_panels * s->up_bytes + s->down_panels * s->down_bytes, 64);
  s->slot_bytes = s->bias_at + (s->has_bias ? (s->up_panels + s->down_panels) * PANEL * 4 : 0);
  s->hidden_stride = s->up_panels * 32;
}

#if defined(__x86_64__)
// Where products of pairs are slow: float32 takes their place, but for whole numbers and 4 bits.
static const ExpertOps *pairs_apart(bool whole) {
  const auto mixed = [](const ExpertOps *pairs) {
    ExpertOps ops = *pairs;
    const ExpertOps *apart = experts_avx512[X_BF16];
    for (int i = 0; i <= MAX_ROWS; i++) ops.plain[i] = apart->plain[i], ops.scaled[i] = apart->scaled[i];
    for (int format : {W_FP8, W_INT8}) {
      for (int i = 0; i <= MAX_NARROW_ROWS; i++) ops.narrow[format - W_FP8][i] = apart->narrow[format - W_FP8][i];
      ops.widen[format - W_FP8] = apart->widen[format - W_FP8];
    }
    return ops;
  };
  static const ExpertOps of[2] = {mixed(experts_avx512_bf16), mixed(experts_avx512_whole)};
  return &of[whole];
}

// Without bfloat16 arithmetic.
static const ExpertOps *with_vnni() {
  static const ExpertOps of = [] {
    ExpertOps ops = *experts_avx512[X_BF16];
    const ExpertOps *whole = experts_avx512_vnni;
    for (int format = W_MXFP4 - W_FP8; format <= W_INT4_ZERO - W_FP8; format++)
      for (int i = 0; i <= MAX_NARROW_ROWS; i++) ops.narrow[format][i] = whole->narrow[format][i];
    for (int i = 0; i <= MAX_WHOLE_ROWS; i++) ops.bytes[i] = whole->bytes[i];
    for (int i = 0; i < 5; i++) ops.widen_whole[i] = whole->widen_whole[i], ops.wide_whole[i] = whole->wide_whole[i];
    ops.whole = whole->whole;
    return ops;
  }();
  return &of;
}

const ExpertOps *experts_whole(int isa) {
  if (isa == ISA_AVX512) return has_vnni() ? with_vnni() : nullptr;
  return isa == ISA_AVX512_BF16 ? experts_avx512_whole : nullptr;
}

static const ExpertOps *with_pairs(const KernelChoice &by) {
  const bool whole = by.whole && !has_tiles();
  if (by.products == ISA_AVX512) return pairs_apart(whole);
  return whole ? experts_avx512_whole : experts_avx512_bf16;
}
#endif

const ExpertOps *experts_ops(int64_t x_type) {
#if defined(__x86_64__)
  switch (vector_isa()) {
    case ISA_AVX512_BF16:
      if (x_type == X_BF16) return with_pairs(kernel_choice());
      [[fallthrough]];
    case ISA_AVX512:
      if (x_type == X_BF16 && vector_isa() == ISA_AVX512 && kernel_choice().whole && has_vnni()) return with_vnni();
      return experts_avx512[x_type];
    case ISA_AVX2: return experts_avx2[x_type];
  }
#endif
  (void)x_type;
  return nullptr;
}

const BandOps *experts_bands(int64_t x_type) {
#if defined(__x86_64__)
  if (x_type == X_BF16 && has_tiles()) return bands_amx;
#endif
  (void)x_type;
  return nullptr;
}

namespace {

// One call: which rows of x each expert has, and where its results go.
struct Job {
  const ExpertShape *s;
  const ExpertOps *ops;
  const BandOps *bands;
  const uint8_t *weights;
  const uint8_t *x;
  uint8_t *whole_x;                // rows of x as whole numbers, where any number of rows are multiplied so
  RowsAt rows_of_x;                // entry -> row
  uint8_t *y;
  int y_type;
  int64_t num_tokens;   // of a weighted sum
  const int64_t *first; // y[t] is the sum of rows first[t] to first[t + 1], in their order; null: rows are what is wanted
  int64_t num_active;
  const int32_t *active, *start;   // the slots that have rows, and each one's first entry [num_active + 1]
  const int32_t *source, *target;  // entry -> row of x, row of the results
  const float *weight;             // row -> its share of the sum
  uint8_t *hidden;                 // entry -> what lies between the matrices, hidden_stride numbers of x's type
  uint8_t *near;                   // for each thread NEAR_ENTRIES of the same
  uint8_t *whole;                  // the same as whole numbers, of experts whose rows are multiplied so
  uint8_t *rows;                   // for each thread 64 columns of every row, of x's type
  int64_t num_rows;
  uint8_t *work;                   // for each thread what Multiplier works in
  int64_t work_bytes;

  int64_t item() const { return s->x_type == X_F32 ? 4 : 2; }

  Multiplier by(int64_t format) const { return {ops, bands, s->x_type, format, narrow_rows_of(s->x_type, format)}; }
  Multiplier ups() const { return by(up_format(s->format)); }
  Multiplier downs() const { return by(down_format(s->format)); }

  int64_t whole_stride() const { return Multiplier::whole_stride(s->hidden_stride); }

  const uint8_t *up_panel(int64_t j, int64_t n) const { return weights + active[j] * s->slot_bytes + n * s->up_bytes; }
  const uint8_t *down_panel(int64_t j, int64_t n) const {
    return weights + active[j] * s->slot_bytes + s->up_panels * s->up_bytes + n * s->down_bytes;
  }

  // Of the columns of panel n, those of up first; null: there is none.
  const float *bias(int64_t j, int64_t n) const {
    return s->has_bias ? (const float *)(weights + active[j] * s->slot_bytes + s->bias_at) + n * PANEL : nullptr;
  }

  // Panels of an expert cost their bytes or their products, whichever takes longer; a thread has a run of them.
  int64_t cost(int64_t j) const {
    int64_t rows = start[j + 1] - start[j], least = bands ? 64 : 12;
    return rows < least ? least : rows;
  }

  // Part `part` of `parts`, worked on by one thread: an expert, where there are as many parts.
  void up(int64_t part, int64_t parts, int thread) const {
    int64_t total = 0, at = 0, panels = s->up_panels;
    for (int64_t j = 0; j < num_active; j++) total += cost(j) * panels;
    int64_t low = total * part / parts, high = total * (part + 1) / parts;
    for (int64_t j = 0; j < num_active; j++) {
      int64_t each = cost(j), first = low <= at ? 0 : (low - at + each - 1) / each, last = high <= at ? 0 : (high - at + each - 1) / each;
      if (last > panels) last = panels;
      if (parts == num_active) first = j == part ? 0 : panels, last = panels;
      at += each * panels;
      if (first < last) up_of(j, first, last, j + 1 < num_active ? up_panel(j + 1, 0) : nullptr, hidden, thread);
    }
  }

  // Panels first to last of expert j's. next: what follows its panels. between: the entries' places between the matrices.
  void up_of(int64_t j, int64_t first, int64_t last, const uint8_t *next, uint8_t *between, int thread) const {
    const int64_t stride = s->hidden_stride * item(), panels = s->up_panels;
    auto panel_at = [&](int64_t n) { return n < panels ? up_panel(j, n) : next; };
    ups().panels(rows_of_x, start[j], start[j + 1], s->up_depth, first, last, panel_at, work + thread * work_bytes, [&](int64_t n, float *c, int64_t i, int rows) {
      void *h[MAX_BAND];
      for (int m = 0; m < rows; m++) h[m] = between + (i + m) * stride + n * 32 * item();
      ops->gated(c, rows, h, {s->alpha, s->limit, s->offset, bias(j, n)});
      if (!downs().whole(start[j + 1] - start[j])) return;
      for (int m = 0; m < rows; m++) ops->whole(h[m], K_GROUP, down_format(s->format), whole + (i + m) * whole_stride() + n * WHOLE_BYTES);
    });
  }

  // How many panels pass by an expert's rows at once: several where all that lies between the matrices is more than stays near.
  int64_t abreast() const { return num_rows * s->hidden_stride * item() > NEAR_BYTES ? 4 : 1; }

  // A part has columns of y to itself: nothing is added up between threads. Rows are rounded to x's type before they are summed,
  // and summed in the order of a token's choices: as they are where other ranks compute some of them.
  void down(int64_t part, int64_t parts, int thread) const {
    int64_t each = abreast(), groups = (s->down_panels + each - 1) / each;
    for (int64_t g = groups * part / parts; g < groups * (part + 1) / parts; g++) {
      int64_t low = g * each, high = low + each < s->down_panels ? low + each : s->down_panels;
      down_panels(low, high, rows + thread * each * num_rows * PANEL * item(), work + thread * work_bytes);
    }
  }

  // rows_of: of the panels one after another, 64 columns of every row.
  void down_panels(int64_t low, int64_t high, uint8_t *rows_of, uint8_t *in) const {
    int64_t y_item = y_type == X_F32 ? 4 : 2, row_bytes = PANEL * item(), of_panel = num_rows * row_bytes;
    for (int64_t j = 0; j < num_active; j++) {
      const uint8_t *next = j + 1 < num_active ? down_panel(j + 1, low) : nullptr;
      if (first) down_of(j, low, high, next, 1, {rows_of - low * of_panel, row_bytes, of_panel, false}, hidden, in);
      else down_of(j, low, high, next, 1, {y, s->hidden * y_item, PANEL * y_item, false}, hidden, in);
    }
    for (int64_t n = low; first && n < high; n++, rows_of += of_panel)
      for (int64_t t = 0; t < num_tokens; t++) weigh(t, n, rows_of, PANEL);
  }

  // Where rows of results go: 64 columns of a row, `each` apart. far: they are too many to stay near.
  struct Results {
    uint8_t *start;
    int64_t row, each;
    bool far;
  };

  // Panels low to high of expert j's. next: what follows them; `lead` of these panels are as long as one of that.
  void down_of(int64_t j, int64_t low, int64_t high, const uint8_t *next, int64_t lead, const Results &results, const uint8_t *between, uint8_t *in) const {
    RowsAt rows_at = {between, s->hidden_stride * item(), nullptr, true, false};  // what is past F is 0
    if (downs().whole(start[j + 1] - start[j])) rows_at = {whole, whole_stride(), nullptr, true, true};
    auto panel_at = [&](int64_t n) { return n < high ? down_panel(j, n) : next ? next + (n - high) * s->down_bytes : nullptr; };
    Multiplier by = downs();
    by.lead = lead;
    by.panels(rows_at, start[j], start[j + 1], s->down_depth, low, high, panel_at, in, [&](int64_t n, float *c, int64_t i, int rows) {
      if (const float *own = bias(j, s->up_panels + n))
        for (int m = 0; m < rows * PANEL; m++) c[m] += own[m % PANEL];
      void *to[MAX_BAND];
      for (int m = 0; m < rows; m++) to[m] = results.start + target[i + m] * results.row + n * results.each;
      if (results.far) bands->far(c, rows, to);
      else ops->store(c, PANEL, rows, to, first ? (int)PANEL : columns_of(n));
    });
  }

  // 64 columns of a token's result. rows_of: those columns of every row, `stride` numbers apart.
  void weigh(int64_t t, int64_t n, const uint8_t *rows_of, int64_t stride) const {
    alignas(64) float sum[PANEL];
    const int64_t y_item = y_type == X_F32 ? 4 : 2;
    ops->weigh(rows_of + first[t] * stride * item(), stride, weight + first[t], first[t + 1] - first[t], sum);
    void *to = y + n * PANEL * y_item + t * s->hidden * y_item;
    if (y_type == X_F32) memcpy(to, sum, columns_of(n) * 4);
    else ops->store(sum, PANEL, 1, &to, columns_of(n));
  }

  // Whole rows of results may be far away: share n of a token's is asked for while those of the token before it are summed.
  void bring_rows(int64_t t, int64_t n) const {
    const int64_t lines = (first[t + 1] - first[t]) * whole_row() / 64;
    const uint8_t *of_token = rows + first[t] * whole_row();
    for (int64_t i = lines * n / s->down_panels; i < lines * (n + 1) / s->down_panels; i++) __builtin_prefetch(of_token + i * 64, 0, 3);
  }

  int columns_of(int64_t n) const { return (int)(s->hidden - n * PANEL < PANEL ? s->hidden - n * PANEL : PANEL); }

  enum { STREAM = 8, NEAR_BYTES = 1 << 20 };  // panels; what stays in the second cache
  enum { MOST_WHOLE = 64 << 20, NEAR_ENTRIES = 512 };  // bytes of all rows of results; entries

  int64_t whole_row() const { return s->down_panels * PANEL * item(); }

  // Whether whole rows of results may be kept until they are summed.
  bool keeps_rows() const { return bands && num_rows >= FEW_ROWS && num_rows * whole_row() <= MOST_WHOLE; }

  // Whether a thread takes one expert after another, with both matrices: what lies between them is still near then.
  bool by_expert(bool many, int threads) const {
    return bands && many && (!first || keeps_rows()) && (threads == 1 || num_active > FEW_PIECES * threads);
  }

  void run_by_expert(int threads) const {
    team(threads, num_active, [&](int64_t j, int worker) {
      const int64_t follows = j + threads;  // very likely this thread's next one
      const int64_t y_item = y_type == X_F32 ? 4 : 2;
      // Rows that are written again and again stay near.
      uint8_t *between = start[j + 1] - start[j] > NEAR_ENTRIES ? hidden : near + (worker * NEAR_ENTRIES - start[j]) * s->hidden_stride * item();
      up_of(j, 0, s->up_panels, down_panel(j, 0), between, worker);
      const Results results = first ? Results{rows, whole_row(), PANEL * item(), num_rows * whole_row() > NEAR_BYTES} : Results{y, s->hidden * y_item, PANEL * y_item, false};
      down_of(j, 0, s->down_panels, follows < num_active ? up_panel(follows, 0) : nullptr, (s->up_bytes + s->down_bytes - 1) / s->down_bytes, results, between, work + worker * work_bytes);
      bands->release();
    });
    if (!first) return;
    const int64_t pieces = team_pieces(threads, num_tokens);
    team(threads, pieces, [&](int64_t part, int) {
      for (int64_t t = num_tokens * part / pieces, last = num_tokens * (part + 1) / pieces; t < last; t++)
        for (int64_t n = 0; n < s->down_panels; n++) {
          if (t + 1 < last) bring_rows(t + 1, n);
          weigh(t, n, rows + n * PANEL * item(), s->down_panels * PANEL);
        }
    });
  }

  // A row is made whole numbers once for all experts that it goes to, if all of them take it so.
  void take_rows(int threads) {
    rows_of_x = {x, s->up_depth * item(), source, false, false};
    int64_t most = 0;
    for (int64_t j = 0; j < num_active; j++) most = start[j + 1] - start[j] > most ? start[j + 1] - start[j] : most;
    if (!most || !ups().whole(most)) return;
    if (first) rows_of_x.index = nullptr;
    rows_of_x = whole_rows(ops, rows_of_x, first ? num_tokens : start[num_active], s->up_depth, up_format(s->format), whole_x, threads);
    if (first) rows_of_x.index = source;
  }

  void run(int threads) {
    take_rows(threads);
    bool many = start[num_active] >= FEW_ROWS * num_active;
    if (by_expert(many, threads)) return run_by_expert(threads);
    // Many pieces, so that threads end together, but each long enough for its bytes to come in a stream; with many rows an expert,
    // whose rows are gathered once.
    int64_t ups = team_pieces(threads, (num_active * s->up_panels + STREAM - 1) / STREAM, MANY_PIECES), downs = team_pieces(threads, (s->down_panels + abreast() - 1) / abreast(), MANY_PIECES);
    if (many && threads > 1 && num_active > FEW_PIECES * threads) ups = num_active;
    team(threads, ups, [&](int64_t part, int worker) {
      up(part, ups, worker);
      if (bands) bands->release();
    });
    team(threads, downs, [&](int64_t part, int worker) {
      down(part, downs, worker);
      if (bands) bands->release();
    });
  }
};

// Pieces of scratch, one after another.
struct Pieces {
  size_t bytes = 0;
  size_t take(size_t n) {
    size_t at = bytes;
    bytes += (n + 63) / 64 * 64;
    return at;
  }
};

// Entries are counted and laid out; the caller fills source, target and weight.
struct Plan {
  int32_t *active, *start, *count, *source, *target;
  float *weight;
  int64_t *first;
};

// num_tokens: of weighted sums; 0: rows are wanted.
Plan lay_out(Job *job, int64_t entries, int64_t num_tokens, int threads) {
  const ExpertShape *s = job->s;
  job->num_rows = entries;
  Pieces pieces;
  size_t active = pieces.take(4 * s->num_slots), start = pieces.take(4 * (s->num_slots + 1)), count = pieces.take(4 * s->num_slots);
  size_t source = pieces.take(4 * entries), target = pieces.take(4 * entries), weight = pieces.take(4 * entries);
  size_t hidden = pieces.take(entries * s->hidden_stride * job->item());
  job->ops = experts_ops(s->x_type), job->bands = experts_bands(s->x_type);
  size_t near = pieces.take(job->bands && entries >= FEW_ROWS ? threads * Job::NEAR_ENTRIES * s->hidden_stride * job->item() : 0);
  size_t whole = pieces.take(job->downs().whole(1) ? entries * job->whole_stride() : 0);
  size_t whole_x = pieces.take(job->ups().whole(1) ? (num_tokens ? num_tokens : entries) * Multiplier::whole_stride(s->up_depth) : 0);
  size_t first = pieces.take(8 * (num_tokens + 1)), rows = 0;
  if (num_tokens) {
    int64_t of_panels = threads * job->abreast() * entries * PANEL * job->item(), whole_rows = job->keeps_rows() ? entries * job->whole_row() : 0;
    rows = pieces.take(of_panels > whole_rows ? of_panels : whole_rows);
  }
  int64_t ups = job->ups().work_bytes(s->up_depth, entries), downs = job->downs().work_bytes(s->down_depth, entries);
  job->work_bytes = ((ups > downs ? ups : downs) + 63) / 64 * 64;
  size_t work = pieces.take(threads * job->work_bytes);
  uint8_t *base = scratch(pieces.bytes);
  job->hidden = base + hidden, job->near = base + near, job->whole = base + whole, job->whole_x = base + whole_x, job->rows = base + rows, job->work = base + work;
  job->num_tokens = num_tokens;
  Plan plan = {(int32_t *)(base + active), (int32_t *)(base + start), (int32_t *)(base + count),
               (int32_t *)(base + source), (int32_t *)(base + target), (float *)(base + weight), (int64_t *)(base + first)};
  job->first = num_tokens ? plan.first : nullptr;
  job->active = plan.active, job->start = plan.start, job->source = plan.source, job->target = plan.target, job->weight = plan.weight;
  return plan;
}

}  // namespace

// y[row] = expert(x[row]), rows sorted by slot. rows [num_slots]: of each slot. stride: 0 when rows follow each other, else the
// rows that a slot has room for. x [rows, up_depth], y [rows, D] of x's type; rows of y past a slot's are left alone.
NATIVE_API void experts_rows(const ExpertShape *s, const uint8_t *weights, const void *x, const int32_t *rows, int64_t stride,
                             void *y, int threads) {
  tape_note(experts_rows, s, weights, x, rows, stride, y, threads);
  Job job = {};
  job.s = s, job.weights = weights, job.x = (const uint8_t *)x, job.y = (uint8_t *)y, job.y_type = (int)s->x_type;
  int64_t entries = 0;
  for (int64_t slot = 0; slot < s->num_slots; slot++) entries += rows[slot];
  if (entries == 0) return;
  Plan plan = lay_out(&job, entries, 0, threads);
  int32_t at = 0;
  for (int64_t slot = 0; slot < s->num_slots; slot++) {
    if (rows[slot] == 0) continue;
    plan.active[job.num_active] = (int32_t)slot;
    plan.start[job.num_active++] = at;
    for (int32_t row = 0; row < rows[slot]; row++, at++) plan.source[at] = plan.target[at] = stride ? (int32_t)(slot * stride + row) : at;
  }
  plan.start[job.num_active] = at;
  job.run(threads);
}

// Which entries the tokens' choices among these slots are. Rows of results are numbered in the order of tokens and their choices.
// slot int64 [T, K]; weight [T, K] or null.
static void plan_tokens(Job *job, const Plan &plan, const int64_t *slot, const float *weight, int64_t first_slot, int64_t num_tokens, int64_t top_k) {
  const ExpertShape *s = job->s;
  int32_t *next = plan.count;  // of each slot: its rows, then the next entry of it
  memset(next, 0, 4 * s->num_slots);
  for (int64_t i = 0; i < num_tokens * top_k; i++) {
    uint64_t here = (uint64_t)(slot[i] - first_slot);
    if (here < (uint64_t)s->num_slots) next[here]++;
  }
  int32_t at = 0, row = 0;
  for (int64_t here = 0; here < s->num_slots; here++) {
    int32_t rows = next[here];
    if (rows) {
      plan.active[job->num_active] = (int32_t)here;
      plan.start[job->num_active++] = at;
    }
    next[here] = at;
    at += rows;
  }
  plan.start[job->num_active] = at;
  for (int64_t t = 0, i = 0; t < num_tokens; t++) {
    if (weight) plan.first[t] = row;
    for (int64_t k = 0; k < top_k; k++, i++) {
      uint64_t here = (uint64_t)(slot[i] - first_slot);
      if (here >= (uint64_t)s->num_slots) continue;
      int32_t entry = next[here]++;
      plan.source[entry] = (int32_t)t, plan.target[entry] = row;
      if (weight) plan.weight[row] = weight[i];
      row++;
    }
  }
  if (weight) plan.first[num_tokens] = row;
}

// y[t] = sum over k of weight[t, k] * expert slot[t, k] - first_slot (x[t]), in the order of k; slots that are not here count
// nothing. x [T, up_depth] of x's type (what is past D is finite); slot int64 [T, K]; y [T, D] of y_type.
NATIVE_API void experts_tokens(const ExpertShape *s, const uint8_t *weights, const void *x, const int64_t *slot,
                               const float *weight, int64_t first_slot, int64_t num_tokens, int64_t top_k, void *y, int y_type,
                               int threads) {
  tape_note(experts_tokens, s, weights, x, slot, weight, first_slot, num_tokens, top_k, y, y_type, threads);
  Job job = {};
  job.s = s, job.weights = weights, job.x = (const uint8_t *)x, job.y = (uint8_t *)y, job.y_type = y_type;
  if (num_tokens == 0) return;
  Plan plan = lay_out(&job, num_tokens * top_k, num_tokens, threads);
  plan_tokens(&job, plan, slot, weight, first_slot, num_tokens, top_k);
  job.run(threads);
}

// The same rows before they are weighted and summed: y [P, D] of x's type, one for each choice that is here.
static void choices(const ExpertShape *s, const uint8_t *weights, const void *x, const int64_t *slot, int64_t first_slot, int64_t num_tokens,
                    int64_t top_k, void *y, int threads) {
  Job job = {};
  job.s = s, job.weights = weights, job.x = (const uint8_t *)x, job.y = (uint8_t *)y, job.y_type = (int)s->x_type;
  if (num_tokens == 0) return;
  Plan plan = lay_out(&job, num_tokens * top_k, 0, threads);
  plan_tokens(&job, plan, slot, nullptr, first_slot, num_tokens, top_k);
  if (job.num_active) job.run(threads);
}

NATIVE_API void experts_choices(const ExpertShape *s, const uint8_t *weights, const void *x, const int64_t *slot, int64_t first_slot,
                                int64_t num_tokens, int64_t top_k, void *y, int threads) {
  tape_note(experts_choices, s, weights, x, slot, first_slot, num_tokens, top_k, y, threads);
  choices(s, weights, x, slot, first_slot, num_tokens, top_k, y, threads);
}

// num_tokens: where it is said how many there are when the call is played.
NATIVE_API void experts_arrived(const ExpertShape *s, const uint8_t *weights, const void *x, const int64_t *slot, int64_t first_slot,
                                const int64_t *num_tokens, int64_t top_k, void *y, int threads) {
  tape_note(experts_arrived, s, weights, x, slot, first_slot, num_tokens, top_k, y, threads);
  choices(s, weights, x, slot, first_slot, *num_tokens, top_k, y, threads);
}
