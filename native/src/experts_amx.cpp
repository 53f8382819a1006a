// Products of bands of rows and panels on matrix tiles (experts.h, tiles.h). A panel is read as it lies: 16 of its columns are a tile
// whose rows are 256 bytes apart.
#if defined(__x86_64__) || defined(TILE_MODEL)
#ifndef TILE_MODEL
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")
#endif
#include "experts.h"

namespace {
enum { LANES = 16 };
#include "tiles.h"
#include "vector.h"

enum { STEP = TILE_K * PANEL * 2, PAIR = PANEL * 4, NEAR_K = 1024 };  // bytes of 32 k and of a pair of them; k that stay near

// Tiles 0 to 3 are sums. Up to 16 rows: all four of a panel's groups of columns by the rows in tile 4, the panel in 5 to 7. More: two
// groups (0 and 1 of the first 16 rows, 2 and 3 of the others) by the rows in 4 and 5, the panel in 6 and 7.
INLINE void shape(int64_t rows) {
  int low = rows < TILE_ROWS ? (int)rows : (int)TILE_ROWS, high = rows > TILE_ROWS ? (int)rows - TILE_ROWS : 0;
  TileShapes s = {};
  s.palette = 1;
  for (int i = 0; i < 8; i++) s.row_bytes[i] = 64, s.rows[i] = TILE_ROWS;
  s.rows[0] = s.rows[1] = s.rows[4] = (uint8_t)low;
  s.rows[2] = s.rows[3] = (uint8_t)(high ? high : low);
  if (high) s.rows[5] = (uint8_t)high;
  tile_shapes(s);
}

// How many lines to bring nearer beside each product of a step.
INLINE int lines_of(Ahead *ahead) {
  if (ahead->at >= ahead->end) {
    if (!ahead->next) return 0;
    ahead->at = ahead->next, ahead->end = ahead->next + ahead->next_bytes, ahead->next = nullptr;
  }
  return (int)ahead->lines;
}

// A few at a time: as many as may be on their way would keep the tiles of the second cache waiting.
template <int NEARNESS> INLINE void bring(Ahead *ahead, int lines) {
  const uint8_t *at = ahead->at;
  for (int i = 0; i < lines; i++, at += 64) __builtin_prefetch(at, 0, NEARNESS);
  ahead->at = at;
}

// The pairs behind the last whole step, and zeros.
INLINE void last_step(const uint8_t *panel, int64_t depth, uint8_t *out) {
  int64_t bytes = depth % TILE_K / 2 * PAIR;
  memcpy(out, panel + depth / TILE_K * STEP, bytes);
  memset(out + bytes, 0, STEP - bytes);
}

INLINE void few_step(const uint8_t *a, int64_t stride, const uint8_t *b, Ahead *ahead, int lines) {
  tile_load<4>(a, stride);
  tile_load<5>(b, PAIR), tile_products<0, 4, 5>(), bring<3>(ahead, lines);
  tile_load<6>(b + 64, PAIR), tile_products<1, 4, 6>(), bring<3>(ahead, lines);
  tile_load<7>(b + 128, PAIR), tile_products<2, 4, 7>(), bring<3>(ahead, lines);
  tile_load<5>(b + 192, PAIR), tile_products<3, 4, 5>(), bring<3>(ahead, lines);
}

INLINE void many_step(const uint8_t *a, int64_t stride, const uint8_t *b, Ahead *ahead, int lines) {
  tile_load<4>(a, stride);
  tile_load<6>(b, PAIR), tile_products<0, 4, 6>(), bring<2>(ahead, lines);
  tile_load<7>(b + 64, PAIR), tile_products<1, 4, 7>(), bring<2>(ahead, lines);
  tile_load<5>(a + TILE_ROWS * stride, stride);
  tile_products<2, 5, 6>(), bring<2>(ahead, lines);
  tile_products<3, 5, 7>(), bring<2>(ahead, lines);
}

// Up to 16 rows; `more`: c has sums already. Rows are not looked at but for k0 to k1.
void few(const uint8_t *a, int64_t stride, const uint8_t *p, const uint8_t *last, int64_t k0, int64_t k1, bool more, Ahead *ahead, float *c) {
  if (more) tile_load<0>(c, PAIR), tile_load<1>(c + 16, PAIR), tile_load<2>(c + 32, PAIR), tile_load<3>(c + 48, PAIR);
  else tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  int64_t k = k0;
  for (; k + TILE_K <= k1; k += TILE_K) few_step(a + 2 * k, stride, p + k * PANEL * 2, ahead, lines_of(ahead));
  if (k < k1) few_step(a + 2 * k, stride, last, ahead, 0);
  tile_store<0>(c, PAIR), tile_store<1>(c + 16, PAIR), tile_store<2>(c + 32, PAIR), tile_store<3>(c + 48, PAIR);
}

// 17 to 32 rows.
void many(const uint8_t *a, int64_t stride, const uint8_t *p, const uint8_t *last, int64_t k0, int64_t k1, bool more, Ahead *ahead, float *c) {
  for (int half = 0; half < 2; half++, c += 32) {
    float *low = c + TILE_ROWS * PANEL;
    if (more) tile_load<0>(c, PAIR), tile_load<1>(c + 16, PAIR), tile_load<2>(low, PAIR), tile_load<3>(low + 16, PAIR);
    else tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
    int64_t k = k0;
    for (; k + TILE_K <= k1; k += TILE_K) many_step(a + 2 * k, stride, p + k * PANEL * 2 + half * 128, ahead, lines_of(ahead));
    if (k < k1) many_step(a + 2 * k, stride, last + half * 128, ahead, 0);
    tile_store<0>(c, PAIR), tile_store<1>(c + 16, PAIR), tile_store<2>(low, PAIR), tile_store<3>(low + 16, PAIR);
  }
}

// All rows, for k0 to k1.
INLINE void part(const uint8_t *a, int64_t stride, int64_t rows, const uint8_t *p, const uint8_t *last, int64_t k0, int64_t k1, bool more, Ahead *ahead, float *c) {
  for (int64_t m = 0; m < rows; m += 2 * TILE_ROWS) {
    int64_t here = rows - m < 2 * TILE_ROWS ? rows - m : 2 * (int64_t)TILE_ROWS;
    if (here != 2 * TILE_ROWS || m == 0) shape(here);
    if (here > TILE_ROWS) many(a + m * stride, stride, p, last, k0, k1, more, ahead, c + m * PANEL);
    else few(a + m * stride, stride, p, last, k0, k1, more, ahead, c + m * PANEL);
  }
}

void plain(const uint8_t *a, int64_t stride, int64_t rows, const uint8_t *panel, int64_t depth, bool more, Ahead *ahead, float *c) {
  alignas(64) uint8_t last[STEP];
  if (depth % TILE_K) last_step(panel, depth, last);
  int64_t step = rows > TILE_ROWS ? (int64_t)NEAR_K : depth;
  for (int64_t k = 0; k < depth; k += step) part(a, stride, rows, panel, last, k, k + step < depth ? k + step : depth, more || k > 0, ahead, c);
}

// Up to 32 rows times a block: c = sums times its scales, with `more` added to c.
INLINE void scaled_block(const uint8_t *a, int64_t stride, int64_t rows, const uint8_t *block, int64_t depth, bool more, Ahead *ahead, float *c) {
  alignas(64) uint8_t last[STEP];
  alignas(64) float sums[2 * TILE_ROWS * PANEL];
  const uint8_t *p = block + PANEL * 4;
  if (depth % TILE_K) last_step(p, depth, last);
  vf scale[4];
  for (int j = 0; j < 4; j++) scale[j] = load((const float *)block + 16 * j);
  part(a, stride, rows, p, last, 0, depth, false, ahead, sums);
  for (int64_t i = 0; i < rows; i++)
    for (int j = 0; j < 4; j++) {
      float *to = c + i * PANEL + 16 * j;
      store(to, load(sums + i * PANEL + 16 * j) * scale[j] + (more ? load(to) : (vf){}));
    }
}

void scaled(const uint8_t *a, int64_t stride, int64_t rows, const uint8_t *blocks, int64_t depth, bool more, Ahead *ahead, float *c) {
  for (int64_t k = 0; k < depth; k += K_BLOCK, blocks += PANEL * 4 + K_BLOCK * PANEL * 2)
    for (int64_t m = 0; m < rows; m += 2 * TILE_ROWS) {
      int64_t here = rows - m < 2 * TILE_ROWS ? rows - m : 2 * (int64_t)TILE_ROWS, n = depth - k < K_BLOCK ? depth - k : (int64_t)K_BLOCK;
      scaled_block(a + m * stride + k * 2, stride, here, blocks, n, more || k > 0, ahead, c + m * PANEL);
    }
}

void release() { tile_release(); }

constexpr BandOps table = {plain, scaled, release};
}  // namespace
const BandOps *const bands_amx = &table;
#endif
