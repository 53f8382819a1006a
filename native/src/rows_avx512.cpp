// Operations on rows with AVX512.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")
#define AVX512_FILE
#include "rows.h"
namespace {
enum { LANES = 16 };
#include "rows_vector.h"
}  // namespace
const RowOps *const rows_avx512[2] = {&Ops<float>::table, &Ops<bf16>::table};
#endif
