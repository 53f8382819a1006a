// Index scores with AVX512.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")
#include "experts.h"
#include "index.h"
namespace {
enum { LANES = 16 };
#include "index_vector.h"
}  // namespace
const IndexOps *const index_avx512[2] = {&Ops<float>::table, &Ops<bf16>::table};
#endif
