// Products of bands of rows and panels on matrix tiles (experts.h, tiles.h). A panel is read as it lies: 16 of its columns are a tile
// whose rows are 256 bytes apart.
#if defined(__x86_64__) || defined(TILE_MODEL)
#ifndef TILE_MODEL
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,prefer-vector-width=512")
#define AVX512_FILE
#define AVX512_BF16_FILE
#endif
#include "experts.h"

#ifndef TILE_MODEL
#include <immintrin.h>
#endif

namespace {
enum { LANES = 16 };
#include "tiles.h"
#include "vector.h"

enum { STEP = TILE_K * PANEL * 2, PAIR = PANEL * 4 };  // bytes of 32 k and of a pair of them

// Tiles 0 to 3 are sums. Up to 16 rows: all four of a panel's groups of columns by the rows in tile 4, the panel in 5 to 7. More: two
// groups (0 and 1 of the first 16 rows, 2 and 3 of the others) by the rows in 4 and 5, the panel in 6 and 7. For 16 rows all are whole,
// as for 32. To change shapes takes as long as ten products.
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

// Beside product `number` of a step: weights that are read once are asked for shortly before; else what follows them is, from all over
// it, because a CPU that sees several places read at once has more lines on their way.
enum { AT_HAND = -1 };
template <int LINES, int NEARNESS> INLINE void bring(const uint8_t *at, int64_t gap, const uint8_t *b, int number) {
  if (LINES == AT_HAND)
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) __builtin_prefetch(b + Ahead::SHORTLY + number * 1024 + i * 64, 0, 3);
#pragma GCC unroll 16
  for (int i = 0; i < LINES; i++) __builtin_prefetch(at + (number * LINES + i) * gap, 0, NEARNESS);
}

// The pairs behind the last whole step, and zeros.
INLINE void last_step(const uint8_t *panel, int64_t depth, uint8_t *out) {
  int64_t bytes = depth % TILE_K / 2 * PAIR;
  memcpy(out, panel + depth / TILE_K * STEP, bytes);
  memset(out + bytes, 0, STEP - bytes);
}

template <int LINES> INLINE void few_step(const uint8_t *a, int64_t stride, const uint8_t *b, const uint8_t *at, int64_t gap) {
  tile_load<4>(a, stride);
  tile_load<5>(b, PAIR), tile_products<0, 4, 5>(), bring<LINES, 3>(at, gap, b, 0);
  tile_load<6>(b + 64, PAIR), tile_products<1, 4, 6>(), bring<LINES, 3>(at, gap, b, 1);
  tile_load<7>(b + 128, PAIR), tile_products<2, 4, 7>(), bring<LINES, 3>(at, gap, b, 2);
  tile_load<5>(b + 192, PAIR), tile_products<3, 4, 5>(), bring<LINES, 3>(at, gap, b, 3);
}

template <int LINES> INLINE void many_step(const uint8_t *a, int64_t stride, const uint8_t *b, const uint8_t *at, int64_t gap) {
  tile_load_far<4>(a, stride), tile_load_far<6>(b, PAIR), tile_load_far<7>(b + 64, PAIR), tile_load_far<5>(a + TILE_ROWS * stride, stride);
  tile_products<0, 4, 6>(), bring<LINES, 2>(at, gap, b, 0);
  tile_products<1, 4, 7>(), bring<LINES, 2>(at, gap, b, 1);
  tile_products<2, 5, 6>(), bring<LINES, 2>(at, gap, b, 2);
  tile_products<3, 5, 7>(), bring<LINES, 2>(at, gap, b, 3);
}

// Some rows, all columns; `more`: c has sums already. last: what is behind the last whole step.
struct Part {
  const uint8_t *a;
  int64_t stride;
  const uint8_t *p, *last;
  int64_t depth;
  bool more;
  Ahead *ahead;
  float *c;
};

// Up to 16 rows.
template <int LINES> INLINE void few(const Part &o) {
  float *c = o.c;
  if (o.more) tile_load<0>(c, PAIR), tile_load<1>(c + 16, PAIR), tile_load<2>(c + 32, PAIR), tile_load<3>(c + 48, PAIR);
  else tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  const uint8_t *at = o.ahead->at;
  const uint8_t *const end = o.ahead->end;
  const int64_t gap = o.ahead->gap, step = o.ahead->step;
  int64_t k = 0;
  for (; LINES && k + TILE_K <= o.depth && at < end; k += TILE_K, at += step) few_step<LINES>(o.a + 2 * k, o.stride, o.p + k * PANEL * 2, at, gap);
  for (; k + TILE_K <= o.depth; k += TILE_K) few_step<0>(o.a + 2 * k, o.stride, o.p + k * PANEL * 2, at, gap);
  if (k < o.depth) few_step<0>(o.a + 2 * k, o.stride, o.last, at, gap);
  o.ahead->at = at;
  tile_store<0>(c, PAIR), tile_store<1>(c + 16, PAIR), tile_store<2>(c + 32, PAIR), tile_store<3>(c + 48, PAIR);
}

// 17 to 32 rows.
template <int LINES> INLINE void many(const Part &o) {
  float *c = o.c;
  const uint8_t *at = o.ahead->at, *const end = o.ahead->end;
  const int64_t gap = o.ahead->gap, step = o.ahead->step;
  for (int half = 0; half < 2; half++, c += 32) {
    float *low = c + TILE_ROWS * PANEL;
    if (o.more) tile_load<0>(c, PAIR), tile_load<1>(c + 16, PAIR), tile_load<2>(low, PAIR), tile_load<3>(low + 16, PAIR);
    else tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
    int64_t k = 0;
    const uint8_t *p = o.p + half * 128;
    for (; LINES && k + TILE_K <= o.depth && at < end; k += TILE_K, at += step) many_step<LINES>(o.a + 2 * k, o.stride, p + k * PANEL * 2, at, gap);
    for (; k + TILE_K <= o.depth; k += TILE_K) many_step<0>(o.a + 2 * k, o.stride, p + k * PANEL * 2, at, gap);
    if (k < o.depth) many_step<0>(o.a + 2 * k, o.stride, o.last + half * 128, at, gap);
    tile_store<0>(c, PAIR), tile_store<1>(c + 16, PAIR), tile_store<2>(low, PAIR), tile_store<3>(low + 16, PAIR);
  }
  o.ahead->at = at;
}

#define WITH_LINES(FN, LINES, PART)          \
  switch (LINES) {                           \
    case 0: FN<0>(PART); break;              \
    case Ahead::ALL: FN<AT_HAND>(PART); break; \
    case 1: FN<1>(PART); break;              \
    case 2: FN<2>(PART); break;              \
    case 3: FN<3>(PART); break;              \
    case 4: FN<4>(PART); break;              \
    case 5: FN<5>(PART); break;              \
    case 8: FN<8>(PART); break;              \
    default: FN<16>(PART);                   \
  }

// All rows, for which the tiles have been shaped.
INLINE void part(Part o, int64_t rows) {
  const uint8_t *a = o.a;
  float *c = o.c;
  for (int64_t m = 0; m < rows; m += 2 * TILE_ROWS) {
    int64_t lines = o.ahead->at < o.ahead->end ? o.ahead->lines : 0;
    o.a = a + m * o.stride, o.c = c + m * PANEL;
    if (rows - m > TILE_ROWS) WITH_LINES(many, lines, o)
    else WITH_LINES(few, lines, o)
  }
}

// Rows that fill whole tiles, then the others: with 16 before them if there are as many that are alone, so that they share a step.
template <class Some> INLINE void whole_and_rest(int64_t rows, const Some &some) {
  const int64_t alone = rows % (2 * TILE_ROWS), whole = alone == TILE_ROWS ? rows : rows - alone;
  if (whole) shape(TILE_ROWS), some(0, whole);
  if (rows > whole) shape(rows - whole), some(whole, rows - whole);
}

void plain(const uint8_t *a, int64_t stride, int64_t rows, const uint8_t *panel, int64_t depth, bool more, Ahead *ahead, float *c) {
  alignas(64) uint8_t last[STEP];
  if (depth % TILE_K) last_step(panel, depth, last);
  whole_and_rest(rows, [&](int64_t m, int64_t here) __attribute__((always_inline)) {
    part({a + m * stride, stride, panel, last, depth, more, ahead, c + m * PANEL}, here);
  });
}

// x y + z, rounded once: the same wherever it is compiled into.
INLINE vf product_and(vf x, vf y, vf z) {
#ifdef TILE_MODEL
  return x * y + z;
#else
  return (vf)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
#endif
}

// Rows of a shape times a block: c = sums times its scales, with `more` added to c.
INLINE void scaled_block(const uint8_t *a, int64_t stride, int64_t rows, const uint8_t *block, int64_t depth, bool more, Ahead *ahead, float *c) {
  alignas(64) uint8_t last[STEP];
  alignas(64) float sums[2 * TILE_ROWS * PANEL];
  const uint8_t *p = block + PANEL * 4;
  if (depth % TILE_K) last_step(p, depth, last);
  vf scale[4];
  for (int j = 0; j < 4; j++) scale[j] = load((const float *)block + 16 * j);
  part({a, stride, p, last, depth, false, ahead, sums}, rows);
  for (int64_t i = 0; i < rows; i++)
    for (int j = 0; j < 4; j++) {
      float *to = c + i * PANEL + 16 * j;
      store(to, product_and(load(sums + i * PANEL + 16 * j), scale[j], more ? load(to) : (vf){}));
    }
}

void scaled(const uint8_t *a, int64_t stride, int64_t rows, const uint8_t *blocks, int64_t depth, bool more, Ahead *ahead, float *c) {
  whole_and_rest(rows, [&](int64_t first, int64_t here) {
    const uint8_t *block = blocks;
    for (int64_t k = 0; k < depth; k += K_BLOCK, block += PANEL * 4 + K_BLOCK * PANEL * 2)
      for (int64_t m = 0; m < here; m += 2 * TILE_ROWS) {
        int64_t count = here - m < 2 * TILE_ROWS ? here - m : 2 * (int64_t)TILE_ROWS, n = depth - k < K_BLOCK ? depth - k : (int64_t)K_BLOCK, row = first + m;
        scaled_block(a + row * stride + k * 2, stride, count, block, n, more || k > 0, ahead, c + row * PANEL);
      }
  });
}

// What is written past the caches is not read into them first.
void far(const float *c, int rows, void *const *y) {
  for (int m = 0; m < rows; m++)
    for (int at = 0; at < PANEL; at += 2 * LANES) {
      const vh low = bf16_of(load(c + m * PANEL + at)), high = bf16_of(load(c + m * PANEL + at + LANES));
#ifdef TILE_MODEL
      memcpy((bf16 *)y[m] + at, &low, sizeof low), memcpy((bf16 *)y[m] + at + LANES, &high, sizeof high);
#else
      _mm512_stream_si512((__m512i *)((bf16 *)y[m] + at), _mm512_inserti64x4(_mm512_castsi256_si512((__m256i)low), (__m256i)high, 1));
#endif
    }
}

void shape_for(int64_t rows) { shape(rows); }

void shaped(const uint8_t *a, int64_t stride, int64_t rows, const uint8_t *panel, int64_t depth, float *c) {
  alignas(64) uint8_t last[STEP];
  if (depth % TILE_K) last_step(panel, depth, last);
  Ahead nothing = {};
  const Part one = {a, stride, panel, last, depth, false, &nothing, c};
  if (rows > TILE_ROWS) many<0>(one);
  else few<0>(one);
}

// What was written past the caches is there for all.
void release() {
#ifndef TILE_MODEL
  _mm_sfence();
#endif
  tile_release();
}

constexpr BandOps table = {plain, scaled, far, shape_for, shaped, release};
}  // namespace
const BandOps *const bands_amx = &table;
#endif
