// The two limits of a CPU: how fast memory can be read, and how many products a second there can be.
#include "native.h"

#if defined(__x86_64__)
#include <immintrin.h>

namespace {
#include "tiles.h"
}

#define TARGET(what) __attribute__((target(what)))

TARGET("avx2") static int64_t read_part(const char *start, const char *end) {
  __m256i sum[4] = {};
  for (; start < end; start += 128) {
    _mm_prefetch(start + 8192, _MM_HINT_T0);
    _mm_prefetch(start + 8256, _MM_HINT_T0);
    for (int i = 0; i < 4; i++) sum[i] = _mm256_xor_si256(sum[i], _mm256_loadu_si256((const __m256i *)(start + 32 * i)));
  }
  __m256i all = _mm256_xor_si256(_mm256_xor_si256(sum[0], sum[1]), _mm256_xor_si256(sum[2], sum[3]));
  return _mm256_extract_epi64(all, 0) ^ _mm256_extract_epi64(all, 1);
}

enum { SUMS = 24 };

TARGET("avx512f,avx512bf16") static float products_bf16(int64_t rounds) {
  __m512 sum[SUMS];
  for (int i = 0; i < SUMS; i++) sum[i] = _mm512_set1_ps((float)i);
  __m512bh x = (__m512bh)_mm512_set1_epi32((int)rounds);
  for (int64_t r = 0; r < rounds; r++) {
#pragma GCC unroll 24
    for (int i = 0; i < SUMS; i++) sum[i] = _mm512_dpbf16_ps(sum[i], x, x);
    asm volatile("" : "+v"(x));
  }
  for (int i = 1; i < SUMS; i++) sum[0] += sum[i];
  return _mm512_cvtss_f32(sum[0]);
}

enum { TILE_PRODUCTS = 4, TILE_OPERATIONS = 2 * 16 * 16 * 32 };

static float products_tiles(int64_t rounds) {
  TileShapes shapes = {};
  shapes.palette = 1;
  for (int i = 0; i < 8; i++) shapes.row_bytes[i] = 64, shapes.rows[i] = 16;
  tile_shapes(shapes);
  alignas(64) float sums[256];
  tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>(), tile_zero<4>(), tile_zero<5>(), tile_zero<6>(), tile_zero<7>();
  for (int64_t r = 0; r < rounds; r++) tile_products<0, 4, 6>(), tile_products<1, 4, 7>(), tile_products<2, 5, 6>(), tile_products<3, 5, 7>();
  tile_store<0>(sums, 64);
  tile_release();
  return sums[0];
}

TARGET("avx512f") static float products_avx512(int64_t rounds) {
  __m512 sum[SUMS];
  for (int i = 0; i < SUMS; i++) sum[i] = _mm512_set1_ps((float)i);
  __m512 x = _mm512_set1_ps((float)rounds);
  for (int64_t r = 0; r < rounds; r++) {
#pragma GCC unroll 24
    for (int i = 0; i < SUMS; i++) sum[i] = _mm512_fmadd_ps(x, x, sum[i]);
    asm volatile("" : "+v"(x));
  }
  for (int i = 1; i < SUMS; i++) sum[0] += sum[i];
  return _mm512_cvtss_f32(sum[0]);
}

TARGET("avx2,fma") static float products_avx2(int64_t rounds) {
  __m256 sum[12];
  for (int i = 0; i < 12; i++) sum[i] = _mm256_set1_ps((float)i);
  __m256 x = _mm256_set1_ps((float)rounds);
  for (int64_t r = 0; r < 2 * rounds; r++) {
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++) sum[i] = _mm256_fmadd_ps(x, x, sum[i]);
    asm volatile("" : "+v"(x));
  }
  for (int i = 1; i < 12; i++) sum[0] += sum[i];
  return _mm256_cvtss_f32(sum[0]);
}
#endif

static volatile int64_t kept;

// Read `bytes` (a multiple of 128 for each thread) once.
NATIVE_API void probe_read(const char *start, int64_t bytes, int threads) {
#if defined(__x86_64__)
  int64_t each = bytes / threads / 128 * 128;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int i = 0; i < threads; i++) kept = read_part(start + i * each, start + (i + 1) * each);
#endif
}

// Products and sums of the widest kind, of bfloat16 pairs if `pairs`; returns the floating-point operations done by all threads.
NATIVE_API int64_t probe_products(int pairs, int64_t rounds, int threads) {
  int64_t each = 0;
#if defined(__x86_64__)
  int isa = native_isa();
  bool tiles = pairs && has_tiles(), dot = pairs && isa >= ISA_AVX512_BF16;
  each = tiles ? rounds * TILE_PRODUCTS * TILE_OPERATIONS : rounds * SUMS * (dot ? 64 : isa >= ISA_AVX512 ? 32 : 16);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int i = 0; i < threads; i++) {
    float got = tiles ? products_tiles(rounds) : dot ? products_bf16(rounds) : isa >= ISA_AVX512 ? products_avx512(rounds) : products_avx2(rounds);
    kept = (int64_t)(got != 0);
  }
#endif
  return each * threads;
}
