// Linear layers with AVX2 and FMA: products in float32.
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#include "linear.h"
namespace {
enum { LANES = 8 };
#include "linear_vector.h"
}  // namespace
const LinearOps linear_avx2[2] = {{multiply<float>, work_bytes<float>}, {multiply<bf16>, work_bytes<bf16>}};
#endif
