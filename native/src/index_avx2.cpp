// Index scores with AVX2 and FMA.
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#include "experts.h"
#include "index.h"
namespace {
enum { LANES = 8 };
#include "index_vector.h"
}  // namespace
const IndexOps *const index_avx2[2] = {&Ops<float>::table, &Ops<bf16>::table};
#endif
