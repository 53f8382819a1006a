// The two matrices of every expert of a rank, in one pass over rows sorted by expert: y = down(gated(gate x, up x)), where
// gated(g, u) = g * sigmoid(alpha * g) * (u + offset) of g below and u within a limit; silu(g) * u has no limit and alpha 1.
//
// An expert's weights are packed into panels of 64 output columns, so that a panel is read from its first byte to its last:
//   up panels    ceil(F/32) of them over D: columns are 16 of gate, 16 of up, 16 of gate, 16 of up
//   down panels  ceil(D/64) of them over F: columns as they are
// A panel of float32 has 64 numbers for each k, one of bfloat16 64 pairs (k, k + 1), also where rows are float32. A panel of 8-bit weights has for each
// block of 128 k 64 scales (float32), then for each pair (k, k + 1) 128 bytes, ordered so that two byte unpackings make them
// pairs of bfloat16. A byte is sign and magnitude: e4m3 as it is, INT8 with its sign in the top bit.
// A panel of 4-bit weights has for each block of 128 k the scales of 4 groups of 32 k, 64 each, of 16 bits (MXFP4: bfloat16, powers of
// two; others: float16), then with zero points as many of those (float16), then for each 8 k 4 groups of 16 columns, 4 bytes for each:
// the codes of k, k + 2, k + 4 and k + 6 from the lowest bits on, then those between them. A code is e2m1 (MXFP4), or 8 more than a
// number from -8 to 7 (INT4), from which the zero point is subtracted before it is scaled. With few rows they are multiplied
// in registers and sums scaled; else they are widened with their scales, rounded to x's type, and then as plain as any.
// Columns and k beyond the matrix are zero. Behind the panels of an expert with biases there are theirs: 64 numbers of float32 for
// each panel, in its columns' order. moe_kernels/panels.py says the same in torch.
#pragma once
#include "native.h"

enum { PANEL = 64, K_BLOCK = 128, MAX_ROWS = 6, MAX_NARROW_ROWS = 6, MAX_BAND = 96, FEW_ROWS = 24, BYTE_BLOCK = PANEL * 4 + K_BLOCK * PANEL };
enum { WIDE_K = 1024 };  // k of a panel of fewer bits that are widened at a time, for all rows, where there are matrix tiles
enum { K_GROUP = 32, GROUP_SCALES = K_BLOCK / K_GROUP * PANEL * 2, HALF_STEP = 8, HALF_STEP_BYTES = PANEL * HALF_STEP / 2 };
enum { NEAR_AHEAD = 4096 };  // bytes of weights before they are needed when few rows ask for them into the nearest cache
enum { WHOLE_BYTES = 72, MAX_WHOLE_ROWS = 4 };  // of 32 numbers of a row as whole numbers, with their scale and sum; sums are two
// Where whole numbers serve for any number of rows: a block of weights taken apart for them.
enum { WHOLE_BLOCK = 2 * K_BLOCK / K_GROUP * PANEL * 4 + K_BLOCK * PANEL * 2 };
// One of bytes. Scales for each 32 k first, what rows' sums are multiplied by behind them, then 16 columns after 16, four k after four.
struct QuadBlock {
  float by[K_BLOCK / K_GROUP][PANEL], more[K_BLOCK / K_GROUP][PANEL];
  uint8_t quads[4][K_BLOCK / 4][64];
};
static_assert(sizeof(QuadBlock) <= WHOLE_BLOCK);
enum XType { X_F32 = 0, X_BF16 = 1 };
// Plain: of x's type. INT4_INT8 is of experts only: gate and up have zero points, down has 8 bits. BF16 is of rows of float32: each weight
// becomes float32 in a register, and sums are those of the same weights in float32, bit by bit.
enum Format { W_PLAIN = 0, W_FP8 = 1, W_INT8 = 2, W_MXFP4 = 3, W_INT4 = 4, W_INT4_ZERO = 5, W_INT4_INT8 = 6, W_BF16 = 7 };
static inline int64_t up_format(int64_t format) { return format == W_INT4_INT8 ? (int64_t)W_INT4_ZERO : format; }
static inline int64_t down_format(int64_t format) { return format == W_INT4_INT8 ? (int64_t)W_INT8 : format; }

// Bytes of a block of 4-bit weights before their codes.
static inline constexpr int64_t half_scales(int64_t format) { return format == W_INT4_ZERO ? 2 * GROUP_SCALES : (int64_t)GROUP_SCALES; }

// What ctypes passes; filled by experts_shape.
struct ExpertShape {
  int64_t x_type, format, num_slots, hidden, width;  // given: D and F
  int64_t up_panels, down_panels, up_depth, down_depth, up_bytes, down_bytes, slot_bytes, hidden_stride;  // worked out
  int64_t has_bias, bias_at;    // given; worked out: where in a slot they begin
  float alpha, limit, offset;   // given: of gated
};

// Between the two matrices. bias: of the 64 columns, or null.
struct Gating {
  float alpha, limit, offset;
  const float *bias;
};

// The part of a panel that is multiplied at a time: it stays in the nearest cache while the rows of a band pass by.
struct Block {
  const uint8_t *panel;  // where it begins: its scales, if there are, then its weights
  int64_t k, depth;      // its first k, and how many
  const uint8_t *ahead;  // what to bring nearer meanwhile: for each pair of k so many cache lines from here on,
  int lines, rest;       // and so many bytes more
};

// c[rows][64] += a[row][k..k + depth) times a block; the first block of a panel (k = 0) sets c.
typedef void (*TileFn)(const void *const *a, const Block &block, float *c);
// A block of `depth` k of weights of fewer bits, made what many rows are multiplied by.
typedef void (*WidenFn)(const uint8_t *block, int64_t depth, uint8_t *out);

// What the driver needs from an instruction set, for one type of x.
struct ExpertOps {
  TileFn plain[MAX_ROWS + 1];                // weights of x's type
  TileFn scaled[MAX_ROWS + 1];               // 8-bit weights that `widen` has made x's type, with their scales
  TileFn narrow[5][MAX_NARROW_ROWS + 1];     // weights of fewer bits, from FP8 on, widened in registers
  WidenFn widen[5];                          // from FP8 on, to numbers of x's type; of 8 bits behind their scales
  // `depth` numbers as `narrow` of 4 bits or `bytes` reads them, for weights of `format`; null: as they are.
  void (*whole)(const void *row, int64_t depth, int64_t format, uint8_t *out);
  TileFn bytes[MAX_WHOLE_ROWS + 1];          // INT8 and rows of whole numbers
  void (*gated)(const float *c, int rows, void *const *h, const Gating &gating);      // 64 columns to 32 of x's type
  void (*weigh)(const void *rows, int64_t stride, const float *weight, int64_t n, float *sum);  // sum = weighted sum of 64 columns of n rows of x's type
  void (*store)(const float *c, int64_t stride, int rows, void *const *y, int columns);  // as x's type
  // Where whole numbers serve for any number of rows, with the same sums: from FP8 on, which has none.
  WidenFn widen_whole[5];
  const TileFn *wide_whole[5];
  TileFn of_bf16[MAX_ROWS + 1];  // rows of float32 and weights of bfloat16
};

// What a thread asks to be brought nearer while it multiplies: beside each of the four products of a step so many lines, `gap` bytes
// apart, from `at` on, which goes on by `step`, up to `end`. ALL: instead what is SHORTLY bytes behind the step's weights.
struct Ahead {
  enum { ALL = -1, SHORTLY = 2560 };
  const uint8_t *at, *end;
  int64_t gap, step, lines;
  static Ahead shortly() { return {nullptr, (const uint8_t *)UINTPTR_MAX, 0, 0, ALL}; }
  // Nearly all of `bytes` from p on (null: nothing) in the course of so many steps, from as many places at once as there are lines
  // beside a step.
  static Ahead all(const uint8_t *p, int64_t bytes, int64_t steps) {
    if (!p) return {};
    int64_t lines = 1;
    while (lines < 16 && 256 * lines * steps < bytes - bytes / 8) lines *= 2;
    int64_t gap = (bytes + 256 * lines - 1) / (256 * lines) * 64;
    return {p, p + gap, gap, 64, lines};
  }
  // One line after another.
  static Ahead in_order(const uint8_t *p, int64_t bytes, int64_t lines) { return {p, p + bytes, 64, 256 * lines, lines}; }
};

// Up to MAX_BAND rows of bfloat16 at once on matrix tiles: c[rows][64] = rows times a panel. A row begins `stride` bytes behind the one
// before, and behind its `depth` numbers there are zeros up to a multiple of TILE_K.
enum { TILE_ROWS = 16, TILE_K = 32 };
struct BandOps {
  typedef void (*Fn)(const uint8_t *a, int64_t stride, int64_t rows, const uint8_t *weights, int64_t depth, bool more, Ahead *ahead, float *c);
  Fn plain;   // the first k of a panel of bfloat16, or with `more` those after them
  Fn scaled;  // of a panel of 8-bit weights: blocks that `widen` has made bfloat16, with their scales
  void (*far)(const float *c, int rows, void *const *y);  // 64 columns of sums as bfloat16, to places that are aligned to 64 bytes and not near
  // For products of the same up to 32 rows one after another: tiles for so many rows, then `plain` of all k that takes these for granted.
  void (*shape)(int64_t rows);
  void (*shaped)(const uint8_t *a, int64_t stride, int64_t rows, const uint8_t *panel, int64_t depth, float *c);
  void (*release)();  // a thread has done its part: without tiles in use it is cheaper to interrupt
};
extern const BandOps *const bands_amx;

extern const ExpertOps *const experts_avx2[2], *const experts_avx512[2];  // by XType
extern const ExpertOps *const experts_avx512_bf16, *const experts_avx512_whole;  // of bfloat16 x only; the latter: whole numbers for any number of rows
extern const ExpertOps *const experts_avx512_vnni;  // of bfloat16 x only: nothing but whole numbers
const ExpertOps *experts_whole(int isa);  // of bfloat16 x, with whole numbers for any number of rows; null: not here
const ExpertOps *experts_ops(int64_t x_type);   // those of the instruction set in use
const BandOps *experts_bands(int64_t x_type);  // null: there are no matrix tiles for such rows

// How `left` rows are cut into parts of nearly equal height.
static inline int64_t cut_rows(int64_t left, int64_t most) { return left <= most ? left : left < 2 * most ? (left + 1) / 2 : most; }

// c[rows][64] = a[row][0..depth) times the panel whose blocks block_at(k, depth) tells, with the lines for all tiles together.
// What comes from memory is asked for one block before it is needed: were it a whole panel, its lines on their way would hold up
// those that a tile takes from the next cache.
template <class BlockAt>
static inline void multiply_band(const TileFn *tiles, int64_t most, const void *const *a, int64_t rows, int64_t depth, int64_t step, float *c,
                                 const BlockAt &block_at) {
  int64_t num_tiles = 0;
  for (int64_t m = 0; m < rows; m += cut_rows(rows - m, most)) num_tiles++;
  for (int64_t k = 0; k < depth; k += step) {
    Block block = block_at(k, k + step < depth ? step : depth - k);
    int64_t lines = block.lines, left = num_tiles;
    for (int64_t m = 0; m < rows;) {
      int64_t height = cut_rows(rows - m, most);
      block.lines = (int)((lines + left - 1) / left);
      tiles[height](a + m, block, c + m * PANEL);
      block.ahead += block.depth * 32 * block.lines;
      lines -= block.lines, left--, m += height;
    }
    for (int64_t at = 0; at < block.rest; at += 64) __builtin_prefetch(block.ahead + at, 0, 3);
  }
}

// Rows of x's type: row i is at start + (index ? index[i] : i) * stride. padded: behind a row's numbers there are zeros up to a multiple
// of TILE_K.
struct RowsAt {
  const uint8_t *start;
  int64_t stride;
  const int32_t *index;
  bool padded;
  bool whole;  // they are as ExpertOps::whole has made them
  const uint8_t *operator[](int64_t i) const { return start + (index ? index[i] : i) * stride; }
};

// Rows of x's type, and panels of `format`.
struct Multiplier {
  const ExpertOps *ops;
  const BandOps *bands;  // or null
  int64_t x_type, format, narrow_rows;  // the last: with up to so many rows weights of fewer bits are widened in registers
  int64_t lead = 1;  // of panels: beside one on matrix tiles that which comes so many after it is brought nearer

  enum { GATHERED = 1 << 20, MOST_GATHERED = 4 * MAX_BAND, MOST_DIRECT = 2 * MAX_BAND, MOST_WIDENED = 5 * MAX_BAND };  // bytes and rows that stay in the second cache
  enum { NEAR_ROWS = 64, FAR_BYTES = 4 << 20 };  // whose sums stay in the nearest cache; what passes by may push out of the last one
  int64_t item() const { return x_type == X_F32 ? 4 : 2; }
  bool plain() const { return format == W_PLAIN || format == W_BF16; }
  int64_t plain_item() const { return format == W_BF16 ? 2 : item(); }
  bool halves() const { return format >= W_MXFP4 && !plain(); }
  int64_t scale_bytes() const { return halves() ? half_scales(format) : (int64_t)PANEL * 4; }  // of a block
  int64_t block_bytes() const { return scale_bytes() + (halves() ? K_BLOCK * PANEL / 2 : K_BLOCK * PANEL); }
  int64_t panel_bytes(int64_t depth) const {
    if (plain()) return depth * PANEL * plain_item();
    int64_t blocks = (depth + K_BLOCK - 1) / K_BLOCK;
    return blocks * scale_bytes() + (halves() ? (depth + HALF_STEP - 1) / HALF_STEP * HALF_STEP_BYTES : depth * PANEL);
  }
  // A gathered row: not a power of two, of which many would share a few places of a cache.
  static int64_t gathered_stride(int64_t depth) { return (depth + TILE_K - 1) / TILE_K * TILE_K * 2 + 64; }
  // To widen a panel once more for more rows costs more than what the second cache lacks.
  int64_t gathered_rows(int64_t depth) const {
    int64_t rows = GATHERED / gathered_stride(depth), most = plain() ? (int64_t)MOST_GATHERED : (int64_t)MOST_WIDENED;
    return rows > most ? most : rows < TILE_K ? (int64_t)TILE_K : rows;
  }
  // What a thread needs to work in, a multiple of 64: weights that are widened, sums of rows that take several parts of a panel, then
  // rows (at most `rows` of `depth`) that lie together.
  int64_t wide_block() const { return all_whole() ? (int64_t)WHOLE_BLOCK : K_BLOCK * PANEL * item() + (halves() ? 0 : PANEL * 4); }
  int64_t wide_bytes() const { return plain() ? 0 : (bands ? WIDE_K / K_BLOCK : 1) * wide_block(); }
  int64_t sums_bytes(int64_t depth, int64_t rows) const { return plain() || depth <= WIDE_K || rows <= MAX_BAND ? 0 : rows * PANEL * 4; }
  int64_t work_bytes(int64_t depth, int64_t rows) const {
    int64_t most = gathered_rows(depth), here = rows < most ? rows : most;
    int64_t bytes = wide_bytes() + (bands ? sums_bytes(depth, here) + here * gathered_stride(depth) : 0);
    int64_t narrow = whole(1) && !all_whole() ? (rows < narrow_rows ? rows : narrow_rows) * whole_stride(depth) : 0;
    return bytes > narrow ? bytes : narrow;
  }
  // Whether so many rows are multiplied as whole numbers, and what one of them takes then. Without matrix tiles, unless all are,
  // products of pairs of bfloat16 serve for 8 bits: equal to those of many rows.
  bool whole(int64_t rows) const { return all_whole() || (ops->whole && rows <= narrow_rows && (halves() || (format == W_INT8 && bands))); }
  // Whether any number of rows are; then they come so (whole_rows).
  bool all_whole() const { return format > W_FP8 && !plain() && ops->widen_whole[format - W_FP8]; }
  static int64_t whole_stride(int64_t depth) { return (depth + K_GROUP - 1) / K_GROUP * WHOLE_BYTES; }

  // Rows `first` to `last` times panels `low` to `high`, which at(n) tells; from at(high) on it is what follows them, or null. Then
  // then(n, c, first row, rows) takes the results.
  template <class At, class Then>
  void panels(const RowsAt &a, int64_t first, int64_t last, int64_t depth, int64_t low, int64_t high, const At &at, uint8_t *work, const Then &then) const {
    if (!bands || (format != W_PLAIN && last - first <= narrow_rows)) {
      RowsAt here = a;
      if (whole(last - first) && !a.whole) {  // once for all panels
        const int64_t stride = whole_stride(depth);
        for (int64_t m = first; m < last; m++) ops->whole(a[m], depth, format, work + (m - first) * stride);
        here = {work - first * stride, stride, nullptr, true, true};
      }
      // Rows that are more than the caches hold pass by all panels in parts.
      const int64_t part = (last - first) * depth * item() > FAR_BYTES ? (int64_t)MAX_BAND : last - first;
      for (int64_t m = first; m < last; m += cut_rows(last - m, part))
        for (int64_t n = low; n < high; n++)
          panel(at(n), depth, at(n + 1), work, m, m + cut_rows(last - m, part), here, [&](float *c, int64_t i, int rows) { then(n, c, i, rows); });
      return;
    }
    bool direct = !a.index && (a.padded || depth % TILE_K == 0);
    int64_t most = gathered_rows(depth), stride = gathered_stride(depth);
    if (direct && format == W_PLAIN && most > MOST_DIRECT) most = MOST_DIRECT;
    for (int64_t i = first; i < last;) {
      int64_t rows = last - i < most ? last - i : most;
      RowsAt here = {a[direct ? i : 0], a.stride, nullptr, true, false};
      if (!direct) here = gather(a, i, rows, depth, work + wide_bytes() + sums_bytes(depth, rows), stride);
      for (int64_t n = low; n < high; n++)
        band(here, rows, at(n), depth, i + rows == last ? at(n + lead) : n + 1 < high ? at(n + 1) : at(low), work,
             [&](float *c, int64_t m, int64_t count) { then(n, c, i + m, (int)count); });
      i += rows;
    }
  }

 private:
  static RowsAt gather(const RowsAt &a, int64_t first, int64_t rows, int64_t depth, uint8_t *to, int64_t stride) {
    int64_t bytes = depth * 2, padded = (depth + TILE_K - 1) / TILE_K * TILE_K * 2;
    for (int64_t m = 0; m < rows; m++) {
      for (int64_t at = 0; m + 1 < rows && at < bytes; at += 64) __builtin_prefetch(a[first + m + 1] + at, 0, 3);
      __builtin_memcpy(to + m * stride, a[first + m], bytes);
      __builtin_memset(to + m * stride + bytes, 0, padded - bytes);
    }
    return {to, stride, nullptr, true, false};
  }

  // `depth` k of a panel, from a block's first on, as numbers of x's type.
  void widen(const uint8_t *p, int64_t depth, uint8_t *wide) const {
    for (int64_t k = 0; k < depth; k += K_BLOCK, p += block_bytes(), wide += wide_block())
      (all_whole() ? ops->widen_whole : ops->widen)[format - W_FP8](p, depth - k < K_BLOCK ? depth - k : (int64_t)K_BLOCK, wide);
  }

  // The first `rows` of `a` times one panel, on matrix tiles. What is not plain is widened once for all of them: 8 bits for
  // few rows a block at a time, which stays in the nearest cache.
  template <class Then>
  void band(const RowsAt &a, int64_t rows, const uint8_t *p, int64_t depth, const uint8_t *next, uint8_t *work, const Then &then) const {
    alignas(64) float near[MAX_BAND * PANEL];
    const int64_t group = format == W_PLAIN ? (int64_t)NEAR_ROWS : (int64_t)MAX_BAND;
    float *sums = (float *)(work + wide_bytes());
    int64_t strips = rows / (2 * TILE_ROWS) * 2 + (rows % (2 * TILE_ROWS) + TILE_ROWS - 1) / TILE_ROWS, size = block_bytes();
    const int64_t steps = strips * ((depth + TILE_K - 1) / TILE_K);
    Ahead ahead = format == W_PLAIN && rows <= TILE_ROWS ? Ahead::shortly() : Ahead::all(next, panel_bytes(depth), steps);
    BandOps::Fn multiply = format == W_PLAIN || halves() ? bands->plain : bands->scaled;
    int64_t step = format == W_PLAIN ? depth : !halves() && rows <= TILE_ROWS ? (int64_t)K_BLOCK : (int64_t)WIDE_K;
    for (int64_t k = 0; k < depth; k += step) {
      int64_t n = depth - k < step ? depth - k : step;
      const uint8_t *weights = format == W_PLAIN ? p : work;
      const uint8_t *block = p + k / K_BLOCK * size;
      if (format != W_PLAIN) widen(block, n, work);
      // To widen a block asks for the first half of what follows.
      if (step == K_BLOCK) ahead = Ahead::in_order(block + size * 3 / 2, size / 2, (size / 128 + 16 * strips - 1) / (16 * strips));
      for (int64_t m = 0; m < rows; m += group) {
        int64_t count = rows - m < group ? rows - m : group;
        float *c = step < depth && rows > group ? sums + m * PANEL : near;
        multiply(a[m] + k * 2, a.stride, count, weights, n, k > 0, &ahead, c);
        if (k + n == depth) then(c, m, count);
      }
    }
  }

  int64_t most_narrow() const { return halves() || ops->widen_whole[W_INT8 - W_FP8] ? narrow_rows : (int64_t)2 * MAX_NARROW_ROWS; }

  // Rows `first` to `last` times one panel; then(c, first row, rows) takes the results. next: the panel that follows.
  template <class Then>
  void panel(const uint8_t *p, int64_t depth, const uint8_t *next, uint8_t *wide, int64_t first, int64_t last, const RowsAt &rows_at, const Then &then) const {
    alignas(64) float c[MAX_BAND * PANEL];
    const void *a[MAX_BAND];
    // FP8 gives the same sums both ways; INT8 with matrix tiles and 4 bits do not.
    bool bytes = !plain(), narrow = bytes && last - first <= most_narrow(), widened = bytes && !narrow;
    const TileFn *tiles = narrow ? rows_at.whole && !halves() ? ops->bytes : ops->narrow[format - W_FP8] : widened && !halves() ? ops->scaled : format == W_BF16 ? ops->of_bf16 : ops->plain;
    if (widened && all_whole()) tiles = ops->wide_whole[format - W_FP8];
    // For many rows products take longest: a panel that comes from the second cache is no matter, sums put away and taken up are.
    int64_t step = bytes || last - first <= FEW_ROWS ? (int64_t)K_BLOCK : depth;
    int64_t size = bytes ? block_bytes() : step * PANEL * plain_item();
    const int64_t most = rows_at.whole && narrow ? (int64_t)MAX_WHOLE_ROWS : narrow ? (int64_t)MAX_NARROW_ROWS : (int64_t)MAX_ROWS;
    // Blocks from one to that which is brought nearer: small ones are done before a line has come from memory.
    const int64_t apart = narrow && (rows_at.whole || halves()) ? 3 : 1, end = (depth + step - 1) / step * step;
    for (int64_t i = first; i < last;) {
      int64_t rows = cut_rows(last - i, MAX_BAND);
      for (int64_t m = 0; m < rows; m++) a[m] = rows_at[i + m];
      const uint8_t *following = i + rows == last ? next : step < depth ? p : nullptr;
      multiply_band(tiles, most, a, rows, depth, step, c, [&](int64_t k, int64_t n) {
        const uint8_t *at = p + k / step * size, *ahead = at + apart * size;
        if (k + apart * step >= end) ahead = following ? following + (k + apart * step - end) / step * size : nullptr;
        if (widened) widen(at, n, wide), at = wide;
        return Block{at, k, n, ahead, ahead ? (int)(size / step / 32) : 0, ahead && bytes ? (int)scale_bytes() : 0};
      });
      then(c, i, (int)rows);
      i += rows;
    }
  }
};

// `rows` of them as whole numbers, one after another at `to`, for panels of `format`; all threads make them.
RowsAt whole_rows(const ExpertOps *ops, const RowsAt &a, int64_t rows, int64_t depth, int64_t format, uint8_t *to, int threads);
