// Expert kernels with AVX2 and FMA.
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#include "experts.h"
namespace {
enum { LANES = 8, GROUPS = 1 };
#include "experts_vector.h"
}  // namespace
const ExpertOps *const experts_avx2[2] = {&Ops<float>::table, &Ops<bf16>::table};
#endif
