// The softmax of prompts for bfloat16 with AVX512-BF16: powers of two, as exact as weights of bfloat16 need them.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,fma,prefer-vector-width=512")
#define AVX512_FILE
#include "experts.h"
#include "prefill.h"

#include <immintrin.h>
namespace {
enum { LANES = 16 };
#include "prefill_vector.h"

// 2^x, relative error 6e-6; NaN stays NaN.
INLINE __m512 power_of_two(__m512 x) {
  __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), r = _mm512_sub_ps(x, whole);
  __m512 p = _mm512_set1_ps(9.59024e-3f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.587024e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4023677e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9312805e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.f));
  return _mm512_scalef_ps(p, whole);
}

// `largest` is in powers of two here.
float softmax_of_pairs(const float *s, int64_t panel_stride, int64_t visible, int64_t depth, float scale, float *largest, float *sum, void *pv) {
  bf16 *p = (bf16 *)pv;
  if (visible <= 0) {
    memset(p, 0, depth * sizeof(bf16));
    return 1;
  }
  const __m512 least = _mm512_set1_ps(-__builtin_inff()), factor = _mm512_set1_ps(scale * 1.44269504f);
  __m512 most[4] = {least, least, least, least};
  int64_t panels = visible / PANEL, rest = visible % PANEL;
  const float *from = s;
  for (int64_t n = 0; n < panels; n++, from += panel_stride)
    for (int j = 0; j < 4; j++) most[j] = _mm512_max_ps(_mm512_loadu_ps(from + 16 * j), most[j]);
  __m512 last[4];
  for (int j = 0; j < 4; j++) {
    int64_t here = rest - 16 * j;
    __mmask16 mask = (__mmask16)(here >= 16 ? 0xffff : here <= 0 ? 0 : (1 << here) - 1);
    last[j] = _mm512_mask_loadu_ps(least, mask, from + 16 * j);
    most[j] = _mm512_max_ps(last[j], most[j]);
  }
  float before = *largest;
  float now = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3]))) * (scale * 1.44269504f);
  now = now > before ? now : before;
  const __m512 shift = _mm512_set1_ps(now);
  __m512 sums[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
  from = s;
  auto weigh = [&](const __m512 *x) __attribute__((always_inline)) {
    __m512 y[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) y[j] = power_of_two(_mm512_fmsub_ps(x[j], factor, shift)), sums[j] = _mm512_add_ps(sums[j], y[j]);
    _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(y[1], y[0]));
    _mm512_storeu_si512(p + 32, (__m512i)_mm512_cvtne2ps_pbh(y[3], y[2]));
    p += PANEL;
  };
  for (int64_t n = 0; n < panels; n++, from += panel_stride) {
    __m512 x[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) x[j] = _mm512_loadu_ps(from + 16 * j);
    weigh(x);
  }
  if (rest) weigh(last);  // what is not seen has the weight 0
  if (p < (bf16 *)pv + depth) memset(p, 0, ((bf16 *)pv + depth - p) * sizeof(bf16));
  float change = before == now ? 1.f : _mm512_cvtss_f32(power_of_two(_mm512_set1_ps(before - now)));
  *sum = *sum * change + _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3])));
  *largest = now;
  return change;
}

constexpr PrefillOps table = {pack_keys, pack_values<bf16>, softmax_of_pairs, fold, .69314718f};
}  // namespace
const PrefillOps *const prefill_avx512_bf16 = &table;
#endif
