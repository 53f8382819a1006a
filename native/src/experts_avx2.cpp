// Expert kernels with AVX2 and FMA.
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#include "experts.h"

#include <immintrin.h>
namespace {
enum { LANES = 8, GROUPS = 1 };
#include "experts_vector.h"
#include "spread.h"
#include "fp8_pairs.h"
#include "whole_avx2.h"
#include "quads_avx2.h"
constexpr ExpertOps of_f32 = with_fp8<float>(with_spread<float>(Ops<float>::table));
constexpr ExpertOps of_bf16 = with_whole(with_fp8<bf16>(with_spread<bf16>(Ops<bf16>::table)));
}  // namespace
const ExpertOps *const experts_avx2[2] = {&of_f32, &of_bf16};
#endif
