// Quantising weights with AVX512.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")
#define AVX512_FILE
#include "quantize.h"
namespace {
enum { LANES = 16 };
#include "quantize_vector.h"
}  // namespace
const QuantizeOps *const quantize_avx512[2] = {&Quantize<float>::table, &Quantize<bf16>::table};
#endif
