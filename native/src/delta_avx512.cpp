// Linear attention with AVX512.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")
#define AVX512_FILE
#include "delta.h"
namespace {
enum { LANES = 16 };
#define STREAM __builtin_ia32_movntps512
#include "delta_vector.h"
}  // namespace
const DeltaOps *const delta_avx512[2] = {&Ops<float>::table, &Ops<bf16>::table};
#endif
