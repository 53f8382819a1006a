// Index scores with AVX2 and FMA.
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#include "experts.h"
#include "index.h"

#include <immintrin.h>
namespace {
enum { LANES = 8 };
inline __m256i bytes_at(const uint8_t *p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
#include "index_vector.h"
}  // namespace
const IndexOps *const index_avx2[2] = {&Ops<float>::table, &Ops<bf16>::table};
#endif
