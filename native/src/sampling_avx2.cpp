// Sampling kernels with AVX2 and FMA.
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#include "sampling.h"
namespace {
enum { LANES = 8 };
#include "sampling_vector.h"
}  // namespace
const SampleOps *const sampling_avx2[2] = {&Ops<float>::table, &Ops<bf16>::table};
#endif
