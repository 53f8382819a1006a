// Operations on rows with AVX2 and FMA.
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#include "rows.h"
namespace {
enum { LANES = 8 };
#include "rows_vector.h"
}  // namespace
const RowOps *const rows_avx2[2] = {&Ops<float>::table, &Ops<bf16>::table};
#endif
