// Matrix tiles: eight registers of 16 rows of 64 bytes, and products of two of them added to a third (Intel's AMX). Included inside a
// namespace. With TILE_MODEL they are plain loops, which any CPU runs: what is written with them is tested everywhere.
//
// A product of bfloat16: c[m][n] += a[m][2 r] * b[r][2 n] + a[m][2 r + 1] * b[r][2 n + 1] for all r, in float32. A row of b holds 16
// columns' numbers of k = 2 r and 2 r + 1 side by side: what a panel of experts.h has for 16 of its columns.
#pragma once

#define INLINE_TILE static inline __attribute__((always_inline))

// Rows of each tile. All are 64 bytes wide.
struct alignas(64) TileShapes {
  uint8_t palette, start, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

#ifndef TILE_MODEL
// The compiler's own functions do not say what memory they read: stores before them may come after.
INLINE_TILE void tile_shapes(const TileShapes &s) { asm volatile("ldtilecfg %0" ::"m"(s) : "memory"); }
INLINE_TILE void tile_release() { asm volatile("tilerelease"); }
template <int T> INLINE_TILE void tile_zero() { asm volatile("tilezero %%tmm%c0" ::"i"(T)); }
template <int T> INLINE_TILE void tile_load(const void *p, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
// The same of what need not stay in the first cache: faster where it comes from the second (docs/benchmarks.md, "Experts in 4 bits").
template <int T> INLINE_TILE void tile_load_far(const void *p, int64_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
template <int T> INLINE_TILE void tile_store(void *p, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
template <int C, int A, int B> INLINE_TILE void tile_products() { asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B)); }

#else
struct TileModel {
  TileShapes shapes;
  uint8_t data[8][16][64];
};
static thread_local TileModel tile_model;
// Calls, which many forms of a kernel have in common.
#define MODEL_TILE static __attribute__((noinline, unused))

INLINE_TILE void tile_shapes(const TileShapes &s) {
  memset(tile_model.data, 0, sizeof tile_model.data);
  tile_model.shapes = s;
}
INLINE_TILE void tile_release() { tile_model.shapes = {}; }
// An instruction whose tiles do not fit is illegal.
INLINE_TILE int tile_rows(int t) {
  if (tile_model.shapes.palette != 1 || tile_model.shapes.row_bytes[t] != 64 || tile_model.shapes.rows[t] == 0) __builtin_trap();
  return tile_model.shapes.rows[t];
}
template <int T> MODEL_TILE void tile_zero() {
  tile_rows(T);
  memset(tile_model.data[T], 0, sizeof tile_model.data[T]);
}
template <int T> MODEL_TILE void tile_load(const void *p, int64_t stride) {
  tile_zero<T>();
  for (int r = 0; r < tile_rows(T); r++) memcpy(tile_model.data[T][r], (const uint8_t *)p + r * stride, 64);
}
template <int T> INLINE_TILE void tile_load_far(const void *p, int64_t stride) { tile_load<T>(p, stride); }
template <int T> MODEL_TILE void tile_store(void *p, int64_t stride) {
  for (int r = 0; r < tile_rows(T); r++) memcpy((uint8_t *)p + r * stride, tile_model.data[T][r], 64);
}
template <int C, int A, int B> MODEL_TILE void tile_products() {
  if (tile_rows(C) != tile_rows(A) || tile_rows(B) != 16) __builtin_trap();
  for (int m = 0; m < tile_rows(C); m++)
    for (int n = 0; n < 16; n++) {
      float sum;
      memcpy(&sum, &tile_model.data[C][m][4 * n], 4);
      for (int r = 0; r < 16; r++)
        for (int i = 0; i < 2; i++) {
          uint16_t a, b;
          memcpy(&a, &tile_model.data[A][m][4 * r + 2 * i], 2);
          memcpy(&b, &tile_model.data[B][r][4 * n + 2 * i], 2);
          uint32_t wide[2] = {(uint32_t)a << 16, (uint32_t)b << 16};
          float x, y;
          memcpy(&x, &wide[0], 4), memcpy(&y, &wide[1], 4);
          sum += x * y;
        }
      memcpy(&tile_model.data[C][m][4 * n], &sum, 4);
    }
}
#endif
