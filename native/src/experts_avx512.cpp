// Expert kernels with AVX512, without bfloat16 arithmetic.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")
#define AVX512_FILE
#include "experts.h"

#include <immintrin.h>
namespace {
enum { LANES = 16, GROUPS = 4 };
#include "experts_vector.h"
#include "spread.h"
#include "fp8_pairs.h"
constexpr ExpertOps of_f32 = with_fp8<float>(Ops<float>::table), of_bf16 = with_fp8<bf16>(with_spread<bf16>(Ops<bf16>::table));
}  // namespace
const ExpertOps *const experts_avx512[2] = {&of_f32, &of_bf16};
#endif
