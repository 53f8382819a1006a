// Linear layers with AVX512: products in float32.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")
#define AVX512_FILE
#include "linear.h"
namespace {
enum { LANES = 16 };
#include "linear_vector.h"
}  // namespace
const LinearOps linear_avx512[2] = {{multiply<float>, work_bytes<float>}, {multiply<bf16>, work_bytes<bf16>}};
#endif
