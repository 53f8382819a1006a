// Linear attention with AVX2 and FMA.
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#include "delta.h"
namespace {
enum { LANES = 8 };
#define STREAM __builtin_ia32_movntps256
#include "delta_vector.h"
}  // namespace
const DeltaOps *const delta_avx2[2] = {&Ops<float>::table, &Ops<bf16>::table};
#endif
