// Kernels for the attention of prompts with AVX2 and FMA.
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#include "experts.h"
#include "prefill.h"
namespace {
enum { LANES = 8 };
#include "prefill_vector.h"
}  // namespace
const PrefillOps *const prefill_avx2[2] = {&Ops<float>::table, &Ops<bf16>::table};
#endif
