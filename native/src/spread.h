// Tiles of weights that are as wide as x, or of bfloat16: rows are made float32 once for all columns, and a number of theirs is then
// read and broadcast by one instruction. Included inside a namespace of experts_avx2.cpp and experts_avx512.cpp, after experts_vector.h. Sums are
// added up in the order of k, as there, whatever the number of rows.

enum { SPREAD_K = 256, AHEAD_K = 16, LEAST_SPREAD = LANES == 16 ? 4 : 1 };  // k of rows that lie spread at a time; k between two looks ahead

// Groups of 16 columns at a time: as many sums as it takes that none waits for the one before it; with 32 registers all.
INLINE constexpr int groups_of(int rows) { return LANES == 16 || rows == 1 ? 4 : rows == 2 ? 2 : 1; }

template <class X> INLINE void spread_row(const X *from, int64_t n, float *to) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) store(to + i, load(from + i));
  for (; i < n; i++) to[i] = number(from + i);
}

// acc += n k of the rows, x [MR][SPREAD_K], times the panel of W from p on.
template <class W, int MR, int NV> INLINE void spread_products(const float *x, const uint8_t *p, int64_t n, const vi *mask, vf (&acc)[MR][NV]) {
  enum { ABREAST = sizeof(W) == 4 ? 1 : 2 };  // k whose weights lie together
  for (int64_t k = 0; k < n; k += ABREAST, x += ABREAST, p += 256)
#pragma GCC unroll 2
    for (int odd = 0; odd < ABREAST; odd++) {
      vf w[NV];
#pragma GCC unroll 8
      for (int j = 0; j < NV; j++) {
        vi bits = *(const vi *)(p + 4 * LANES * j);
        w[j] = ABREAST == 1 ? (vf)bits : odd ? (vf)(bits & *mask) : (vf)(bits << 16);
      }
#pragma GCC unroll 8
      for (int m = 0; m < MR; m++) {
        vf a = splat(x[m * SPREAD_K + odd]);
#pragma GCC unroll 8
        for (int j = 0; j < NV; j++) acc[m][j] += a * w[j];
      }
      asm volatile("" ::: "memory");  // the other half is read again: it would have no register
    }
}

// As `tile` of experts_vector.h, of weights of W.
template <class X, class W, bool SCALED, int MR> static void spread_tile(const void *const *a, const Block &block, float *c) {
  enum { GROUPS_NOW = groups_of(MR), NV = GROUPS_NOW * PARTS, PASSES = 4 / GROUPS_NOW };
  alignas(64) float x[MR * SPREAD_K];
  const uint8_t *weights = block.panel + (SCALED ? PANEL * 4 : 0), *ahead = block.ahead;
  const vi *mask = second_mask();
  const int lines = (block.lines + PASSES - 1) / PASSES;  // of those for two k so many in each pass
  for (int64_t first = 0; first < block.depth; first += SPREAD_K) {
    const int64_t n = block.depth - first < SPREAD_K ? block.depth - first : (int64_t)SPREAD_K;
    for (int m = 0; m < MR; m++) spread_row((const X *)a[m] + block.k + first, n, x + m * SPREAD_K);
    int left = block.lines;
    for (int group = 0; group < 4; group += GROUPS_NOW, left -= lines) {
      float *to = c + 16 * group;
      const int now = left < lines ? left : lines;
      vf acc[MR][NV] = {};
      if (!SCALED && block.k + first)
#pragma GCC unroll 8
        for (int m = 0; m < MR; m++)
#pragma GCC unroll 8
          for (int j = 0; j < NV; j++) acc[m][j] = load(to + m * PANEL + LANES * j);
      for (int64_t k = 0; k < n; k += AHEAD_K) {
        const int64_t some = n - k < AHEAD_K ? n - k : (int64_t)AHEAD_K;
        for (int64_t i = some / 2 * now; i > 0; i--, ahead += 64) __builtin_prefetch(ahead, 0, 2);
        spread_products<W, MR, NV>(x + k, weights + (first + k) * PANEL * sizeof(W) + 64 * group, some, mask, acc);
      }
#pragma GCC unroll 8
      for (int m = 0; m < MR; m++)
#pragma GCC unroll 8
        for (int j = 0; j < NV; j++) {
          float *at = to + m * PANEL + LANES * j;
          vf sum = {};
          if (SCALED && block.k) sum = load(at);
          store(at, SCALED ? sum + acc[m][j] * load((const float *)(block.panel + 64 * group) + LANES * j) : acc[m][j]);
        }
    }
  }
}

// From LEAST_SPREAD rows on.
template <class X, class W, bool SCALED, int N> static constexpr void take_spread(TileFn (&tiles)[MAX_ROWS + 1]) {
  tiles[N] = spread_tile<X, W, SCALED, N>;
  if constexpr (N > LEAST_SPREAD) take_spread<X, W, SCALED, N - 1>(tiles);
}
template <class X> static constexpr ExpertOps with_spread(ExpertOps ops) {
  take_spread<X, X, false, MAX_ROWS>(ops.plain);
  take_spread<X, X, true, MAX_ROWS>(ops.scaled);
  if constexpr (sizeof(X) == 4) take_spread<X, bf16, false, MAX_ROWS>(ops.of_bf16);
  return ops;
}
