// Attention kernels with AVX2 and FMA.
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#include "attention.h"

#include <immintrin.h>
namespace {
enum { LANES = 8 };
#include "attention_vector.h"
#include "attention_avx2.h"
constexpr AttentionOps of_f32 = {scores<float>, softmax<float>, weigh<float>, finish<float>, 8, 4};
constexpr AttentionOps of_bf16 = {scores<bf16>, softmax<bf16>, weigh_halves, finish<bf16>, KEY_TILE, KEY_TILE};
}  // namespace
const AttentionOps *const attention_avx2[2] = {&of_f32, &of_bf16};
#endif
