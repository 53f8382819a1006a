// Index scores with AVX512.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")
#define AVX512_FILE
#include "experts.h"
#include "index.h"

#include <immintrin.h>
namespace {
enum { LANES = 16 };
inline __m512i bytes_at(const uint8_t *p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); }
#include "index_vector.h"
}  // namespace
const IndexOps *const index_avx512[2] = {&Ops<float>::table, &Ops<bf16>::table};
#endif
