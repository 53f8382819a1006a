// Quantising weights with AVX2 and FMA.
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#include "quantize.h"
namespace {
enum { LANES = 8 };
#include "quantize_vector.h"
}  // namespace
const QuantizeOps *const quantize_avx2[2] = {&Quantize<float>::table, &Quantize<bf16>::table};
#endif
