// Linear layers whose weights are read as they lie, in GCC's vector types: products in float32. Included inside a namespace of one
// instruction set, after `enum { LANES = ... }`. A sum has LANES parts, each added up in the order of the inputs, whatever the number of
// rows: a row does not depend on its company.
#include "vector.h"

enum { LINE = 64, ROWS = 4, SUMS = 12, K_STEP = 1024, NEAR_WEIGHTS = 192 << 10 };

// Outputs of a tile of so many rows: the sums, the weights of a step and numbers of a row have room in 16 registers.
INLINE constexpr int outputs_of(int rows) { return rows == 1 ? 6 : rows == 2 ? 4 : 3; }

// A line of weights is so many vectors of float32. Of bfloat16: of its first numbers those at even places, then those at odd ones.
template <class X> INLINE constexpr int vectors_of() { return LINE / (int)sizeof(X) / LANES; }
INLINE vf vector_of(const float *line, int i, const vi *) { return load(line + i * LANES); }
INLINE vf vector_of(const bf16 *line, int i, const vi *mask) {
  vi bits = *(const vi *)(line + i / 2 * 2 * LANES);
  return i % 2 ? (vf)(bits & *mask) : (vf)(bits << 16);
}

// `left` numbers, at most a line, and zeros.
template <class X> struct Rest {
  alignas(LINE) X line[LINE / sizeof(X)] = {};
  Rest(const X *from, int64_t left) { memcpy(line, from, left * sizeof(X)); }
};

// Of MR rows all numbers in the order in which the products take them: to[vector][row][LANES].
template <class X> INLINE void spread(const X *x, int64_t stride, int mr, int64_t inputs, float *to) {
  const int64_t per_line = LINE / sizeof(X), lines = (inputs + per_line - 1) / per_line;
  for (int m = 0; m < mr; m++, x += stride)
    for (int64_t i = 0; i < lines; i++) {
      const int64_t left = inputs - i * per_line;
      if (left >= per_line) {
        for (int v = 0; v < vectors_of<X>(); v++) store(to + ((i * vectors_of<X>() + v) * mr + m) * LANES, vector_of(x + i * per_line, v, &second_bits));
      } else {
        Rest<X> rest(x + i * per_line, left);
        for (int v = 0; v < vectors_of<X>(); v++) store(to + ((i * vectors_of<X>() + v) * mr + m) * LANES, vector_of(rest.line, v, &second_bits));
      }
    }
}

// acc += a line of each output's weights, `offset` numbers on, times that of the rows. `gap` bytes further on lines are brought nearer.
template <int MR, int NO, class X> INLINE void products(const float *x, const X *const (&w)[NO], int64_t offset, int64_t gap, const vi *mask, vf (&acc)[MR][NO]) {
  enum { VECTORS = vectors_of<X>() };
#pragma GCC unroll 8
  for (int j = 0; j < NO; j++) __builtin_prefetch((const char *)(w[j] + offset) + gap, 0, 2);
#pragma GCC unroll 4
  for (int v = 0; v < VECTORS; v++) {
    vf b[NO];
#pragma GCC unroll 8
    for (int j = 0; j < NO; j++) b[j] = vector_of(w[j] + offset, v, mask);
#pragma GCC unroll 4
    for (int m = 0; m < MR; m++) {
      vf a = load(x + (v * MR + m) * LANES);
#pragma GCC unroll 8
      for (int j = 0; j < NO; j++) acc[m][j] += a * b[j];
    }
    asm volatile("" ::: "memory");  // what belongs to the next vector is read again: it would have no register
  }
}

// The sums of a tile, rounded, with their bias, to where they belong.
template <int MR, int NO, class X> INLINE void deliver(const LinearCall &call, int64_t m, int64_t o, int outputs, vf (&acc)[MR][NO]) {
  enum { PARTS = (MR * NO + LANES - 1) / LANES };
  vf flat[PARTS * LANES] = {};
#pragma GCC unroll 4
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
    for (int j = 0; j < NO; j++) flat[i * NO + j] = acc[i][j];
  float sum[PARTS * LANES];
  X y[PARTS * LANES];
#pragma GCC unroll 2
  for (int p = 0; p < PARTS; p++) store(sum + p * LANES, totals(flat + p * LANES));
  for (int i = 0; call.bias && i < MR; i++)
    for (int j = 0; j < outputs; j++) sum[i * NO + j] += number((const X *)call.bias + o + j);
#pragma GCC unroll 2
  for (int p = 0; p < PARTS; p++) store(y + p * LANES, load(sum + p * LANES));
#pragma GCC unroll 4
  for (int i = 0; i < MR; i++) {
    if constexpr (sizeof(X) == sizeof(bf16)) {
      if (call.best) {
        note_best(call, m + i, y + i * NO, outputs, o);
        continue;
      }
    }
    if (outputs == NO) memcpy((X *)call.y + (m + i) * call.y_stride + o, y + i * NO, NO * sizeof(X));
    else memcpy((X *)call.y + (m + i) * call.y_stride + o, y + i * NO, outputs * sizeof(X));
  }
}

// Rows m to m + MR, which are spread at x, times outputs first to last. turn of `turns`: which share of what comes next, `ahead` numbers
// of weights further on, these rows bring nearer.
template <int MR, class X>
static void some_rows(const LinearCall &call, int64_t m, int64_t first, int64_t last, const float *x, vf *sums, int64_t k_step, int64_t ahead, int64_t turn, int64_t turns) {
  enum { NO = outputs_of(MR), PER_LINE = LINE / sizeof(X) };
  const vi *mask = second_mask();
  for (int64_t k = 0; k < call.inputs; k += k_step) {
    const int64_t end = k + k_step < call.inputs ? k + k_step : call.inputs;
    int64_t tile = 0;
    for (int64_t o = first; o < last; o += NO, tile++) {
      const int outputs = last - o < NO ? (int)(last - o) : (int)NO;
      const X *w[NO];
#pragma GCC unroll 8
      for (int j = 0; j < NO; j++) w[j] = (const X *)call.w + (o + (j < outputs ? j : outputs - 1)) * call.w_stride;
      const int64_t gap = tile % turns == turn ? (ahead ? ahead : 2 * NO * call.w_stride) * (int64_t)sizeof(X) : 0;
      vf acc[MR][NO] = {}, *kept = sums + tile * MR * NO;
      if (k)
#pragma GCC unroll 4
        for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
          for (int j = 0; j < NO; j++) acc[i][j] = kept[i * NO + j];
      int64_t at = k;
      const float *xs = x + k * MR;
      for (; at + PER_LINE <= end; at += PER_LINE, xs += PER_LINE * MR) products<MR, NO, X>(xs, w, at, gap, mask, acc);
      if (at < end) {
        alignas(LINE) X line[NO][PER_LINE] = {};
        const X *rest[NO];
#pragma GCC unroll 8
        for (int j = 0; j < NO; j++) memcpy(line[j], w[j] + at, (end - at) * sizeof(X)), rest[j] = line[j];
        products<MR, NO, X>(xs, rest, 0, 0, mask, acc);
      }
      if (end == call.inputs) {
        deliver<MR, NO, X>(call, m, o, outputs, acc);
        continue;
      }
#pragma GCC unroll 4
      for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
        for (int j = 0; j < NO; j++) kept[i * NO + j] = acc[i][j];
    }
  }
}

// Outputs that stay in the second cache while all rows pass by.
template <class X> INLINE int64_t outputs_at_once(const LinearCall &call) {
  int64_t most = NEAR_WEIGHTS / (call.inputs * (int64_t)sizeof(X)) / SUMS * SUMS;
  return most < SUMS ? (int64_t)SUMS : most;
}

template <class X> static int64_t work_bytes(const LinearCall &call) {
  int64_t rows = call.rows < ROWS ? call.rows : (int64_t)ROWS, sums = call.inputs > K_STEP && call.rows > ROWS ? outputs_at_once<X>(call) * ROWS * LANES : 0;
  return ((call.inputs + LINE / 2 - 1) / (LINE / 2) * (LINE / 2) * rows + sums) * 4;
}

template <class X> static void multiply(const LinearCall &call, int64_t first, int64_t last, uint8_t *work) {
  const bool few = call.rows <= ROWS;
  const int64_t at_once = few ? last - first : outputs_at_once<X>(call), turns = (call.rows + ROWS - 1) / ROWS;
  const int64_t k_step = few ? call.inputs : (int64_t)K_STEP, sums = call.inputs > k_step ? outputs_at_once<X>(call) * ROWS * LANES : 0;
  float *x = (float *)work + sums;
  for (int64_t o = first; o < last; o += at_once) {
    const int64_t end = o + at_once < last ? o + at_once : last, ahead = few ? 0 : at_once * call.w_stride;
    int64_t turn = 0;
    for (int64_t m = 0; m < call.rows; turn++) {
      const int64_t left = call.rows - m, mr = left <= ROWS ? left : left < 2 * ROWS ? (left + 1) / 2 : (int64_t)ROWS;
      spread((const X *)call.x + m * call.x_stride, call.x_stride, (int)mr, call.inputs, x);
      switch (mr) {
        case 1: some_rows<1, X>(call, m, o, end, x, (vf *)work, k_step, ahead, turn, turns); break;
        case 2: some_rows<2, X>(call, m, o, end, x, (vf *)work, k_step, ahead, turn, turns); break;
        case 3: some_rows<3, X>(call, m, o, end, x, (vf *)work, k_step, ahead, turn, turns); break;
        default: some_rows<4, X>(call, m, o, end, x, (vf *)work, k_step, ahead, turn, turns);
      }
      m += mr;
    }
  }
}
