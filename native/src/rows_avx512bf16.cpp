// Operations on rows of bfloat16 with AVX512-BF16, which rounds by one instruction.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,prefer-vector-width=512")
#define AVX512_FILE
#define AVX512_BF16_FILE
#include "rows.h"
namespace {
enum { LANES = 16 };
#include "rows_vector.h"
}  // namespace
const RowOps *const rows_avx512_bf16 = &Ops<bf16>::table;
#endif
