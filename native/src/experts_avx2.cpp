// Expert kernels with AVX2 and FMA.
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#include "experts.h"

#include <immintrin.h>
namespace {
enum { LANES = 8, GROUPS = 1 };
#include "experts_vector.h"
#include "whole_avx2.h"

#define NARROW_WHOLE(F) {0, half_pairs<F, 1>, half_pairs<F, 2>, half_pairs<F, 3>, half_pairs<F, 4>}
#define WIDE_WHOLE(ZERO) {0, wide_pairs<ZERO, 1>, wide_pairs<ZERO, 2>, wide_pairs<ZERO, 3>, wide_pairs<ZERO, 4>, wide_pairs<ZERO, 5>, wide_pairs<ZERO, 6>}
constexpr ExpertOps of_bf16() {
  const TileFn halves[3][MAX_WHOLE_ROWS + 1] = {NARROW_WHOLE(W_MXFP4), NARROW_WHOLE(W_INT4), NARROW_WHOLE(W_INT4_ZERO)};
  const TileFn bytes[MAX_WHOLE_ROWS + 1] = {0, byte_pairs<1>, byte_pairs<2>, byte_pairs<3>, byte_pairs<4>};
  const WidenFn widen[5] = {nullptr, widen_whole<W_INT8>, widen_whole<W_MXFP4>, widen_whole<W_INT4>, widen_whole<W_INT4_ZERO>};
  const TileFn wide[2][MAX_ROWS + 1] = {WIDE_WHOLE(false), WIDE_WHOLE(true)};
  ExpertOps ops = Ops<bf16>::table;
  ops.whole = whole_numbers;
  for (int n = 1; n <= MAX_WHOLE_ROWS; n++) {
    ops.bytes[n] = bytes[n];
    for (int format = 0; format < 3; format++) ops.narrow[W_MXFP4 - W_FP8 + format][n] = halves[format][n];
  }
  for (int format = 0; format < 5; format++) ops.widen_whole[format] = widen[format];
  for (int n = 1; n <= MAX_ROWS; n++) ops.wide_whole[0][n] = wide[0][n], ops.wide_whole[1][n] = wide[1][n];
  return ops;
}
constexpr ExpertOps bf16_table = of_bf16();
}  // namespace
const ExpertOps *const experts_avx2[2] = {&Ops<float>::table, &bf16_table};
#endif
