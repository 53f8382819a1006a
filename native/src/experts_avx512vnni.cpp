// Rows of whole numbers with AVX512-VNNI on CPUs without bfloat16 arithmetic: the rest of their kernels is experts_avx512.cpp's.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,prefer-vector-width=512")
#define AVX512_FILE
#define WITH_VBMI 0
#include "experts.h"

#include <immintrin.h>
namespace {
enum { LANES = 16, GROUPS = 4 };
#include "experts_vector.h"
#include "whole_avx512.h"
constexpr ExpertOps table = with_whole(with_few_whole({}));
}  // namespace
const ExpertOps *const experts_avx512_vnni = &table;
#endif
