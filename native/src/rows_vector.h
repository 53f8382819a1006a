// Operations on rows in GCC's vector types. Included inside a namespace of one instruction set, after `enum { LANES = ... }`.
#include "vector.h"

// What x becomes when torch stores it between two operations.
INLINE vf rounded(vf x, const float *) { return x; }
INLINE vf rounded(vf x, const bf16 *) { return (vf)(wide(bf16_of(x)) << 16); }
INLINE float rounded(float x, const float *) { return x; }
INLINE float rounded(float x, const bf16 *type) { return rounded(splat(x), type)[0]; }

// Where there is x, it is added to `of` first.
template <bool adds, class X> INLINE float inverse_rms(const X *x, X *of, int64_t dim, float eps) {
  vf sum[2] = {};
  int64_t i = 0;
  for (; i + 2 * LANES <= dim; i += 2 * LANES)
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      X *at = of + i + j * LANES;
      vf a = load(at);
      if (adds) a = rounded(a + load(x + i + j * LANES), x), store(at, a);
      sum[j] += a * a;
    }
  float rest = 0;
  for (; i < dim; i++) {
    if (adds) put(of + i, number(of + i) + number(x + i));
    rest += number(of + i) * number(of + i);
  }
  return 1 / __builtin_sqrtf((total(sum[0] + sum[1]) + rest) / dim + eps);
}
template <class X> INLINE float inverse_rms(const X *x, int64_t dim, float eps) { return inverse_rms<false, X>(nullptr, (X *)x, dim, eps); }

template <class X> INLINE void scale_row(const X *x, const X *weight, X *y, int64_t dim, float factor) {
  int64_t i = 0;
  for (; i + LANES <= dim; i += LANES) store(y + i, rounded(load(x + i) * factor, x) * load(weight + i));
  for (; i < dim; i++) put(y + i, rounded(number(x + i) * factor, x) * number(weight + i));
}

template <class X> static void norm(const void *xv, void *residualv, const void *weight, void *y, int64_t dim, float eps) {
  X *residual = (X *)residualv;
  float factor = xv ? inverse_rms<true>((const X *)xv, residual, dim, eps) : inverse_rms(residual, dim, eps);
  scale_row(residual, (const X *)weight, (X *)y, dim, factor);
}

// y may be x.
template <class X> INLINE void rotate(const X *x, const X *cos, const X *sin, X *y, int64_t dim) {
  int64_t half = dim / 2, i = 0;
  for (; i + LANES <= half; i += LANES) {
    vf low = load(x + i), high = load(x + half + i);
    vf one = rounded(high * load(sin + i), x) + low * load(cos + i);
    vf two = rounded(low * load(sin + half + i), x) + high * load(cos + half + i);
    store(y + i, one), store(y + half + i, two);
  }
  for (; i < half; i++) {
    float low = number(x + i), high = number(x + half + i);
    float one = rounded(high * number(sin + i), x) + low * number(cos + i);
    float two = rounded(low * number(sin + half + i), x) + high * number(cos + half + i);
    put(y + i, one), put(y + half + i, two);
  }
}

// Some heads of a row, `dim` numbers each, normed (where `factor`, of each, is not null) and rotated: what belongs to the angles is
// read once for all of them. y may be x.
template <class X>
INLINE void norm_rotate(const X *x, const float *factor, const X *weight, const X *cos, const X *sin, X *y, int64_t count, int64_t dim) {
  int64_t half = dim / 2, i = 0;
  for (; i + LANES <= half; i += LANES) {
    const vf cos_low = load(cos + i), sin_low = load(sin + i), cos_high = load(cos + half + i), sin_high = load(sin + half + i);
    for (int64_t at = i, head = 0; head < count; head++, at += dim) {
      vf low = load(x + at), high = load(x + at + half);
      if (factor) {
        low = rounded(rounded(low * factor[head], x) * load(weight + at), x);
        high = rounded(rounded(high * factor[head], x) * load(weight + at + half), x);
      }
      store(y + at, rounded(high * sin_low, x) + low * cos_low);
      store(y + at + half, rounded(low * sin_high, x) + high * cos_high);
    }
  }
  for (; i < half; i++)
    for (int64_t at = i, head = 0; head < count; head++, at += dim) {
      float low = number(x + at), high = number(x + at + half);
      if (factor) {
        low = rounded(rounded(low * factor[head], x) * number(weight + at), x);
        high = rounded(rounded(high * factor[head], x) * number(weight + at + half), x);
      }
      float one = rounded(high * number(sin + i), x) + low * number(cos + i);
      float two = rounded(low * number(sin + half + i), x) + high * number(cos + half + i);
      put(y + at, one), put(y + at + half, two);
    }
}

template <class X> static void heads(const HeadsCall &call, int64_t row) {
  enum { SOME = 16 };
  int64_t dim = call.dim, num_qk = call.num_heads + call.num_kv_heads;
  X *x = (X *)call.x + row * (num_qk + call.num_kv_heads) * dim;
  const X *cos = (const X *)call.cos + row * dim, *sin = (const X *)call.sin + row * dim, *norm = (const X *)call.norm;
  X *k_cache = (X *)call.k_cache + call.slots[row] * call.k_stride, *v_cache = (X *)call.v_cache + call.slots[row] * call.v_stride;
  for (int64_t head = 0, count; head < num_qk; head += count) {
    int64_t end = head < call.num_heads ? call.num_heads : num_qk;
    count = end - head < SOME ? end - head : (int64_t)SOME;
    X *own = x + head * dim, *to = head < call.num_heads ? own : k_cache + (head - call.num_heads) * dim;
    float factor[SOME];
    for (int64_t i = 0; norm && i < count; i++) factor[i] = inverse_rms(own + i * dim, dim, call.eps);
    if (norm) norm_rotate(own, factor, norm + head * dim, cos, sin, to, count, dim);
    else norm_rotate(own, (const float *)nullptr, norm, cos, sin, to, count, dim);
  }
  memcpy(v_cache, x + num_qk * dim, call.num_kv_heads * dim * sizeof(X));
}

template <class X> static void latent(const LatentCall &call, int64_t row) {
  int64_t rope_dim = call.rope_dim, key_dim = call.nope_dim + rope_dim;
  const X *cos = (const X *)call.cos + row * rope_dim, *sin = (const X *)call.sin + row * rope_dim;
  const X *x = (const X *)call.latent + row * call.latent_stride;
  X *entry = (X *)call.cache + call.slots[row] * call.cache_stride, *q = (X *)call.q + row * call.q_stride + call.nope_dim;
  scale_row(x, (const X *)call.norm, entry, call.latent_dim, inverse_rms(x, call.latent_dim, call.eps));
  rotate(x + call.latent_dim, cos, sin, entry + call.latent_dim, rope_dim);
  for (int64_t head = 0; head < call.num_heads; head++) rotate(q + head * key_dim, cos, sin, q + head * key_dim, rope_dim);
}

// y = (x - mean) / sqrt(variance + eps) * weight + bias, rounded once.
template <class X> INLINE void layer_norm(const X *x, const X *weight, const X *bias, X *y, int64_t dim, float eps) {
  vf sum = {}, squares = {};
  float rest = 0, rest_squares = 0;
  int64_t i = 0;
  for (; i + LANES <= dim; i += LANES) sum += load(x + i);
  for (; i < dim; i++) rest += number(x + i);
  float mean = (total(sum) + rest) / dim;
  for (i = 0; i + LANES <= dim; i += LANES) squares += (load(x + i) - mean) * (load(x + i) - mean);
  for (; i < dim; i++) rest_squares += (number(x + i) - mean) * (number(x + i) - mean);
  float factor = 1 / __builtin_sqrtf((total(squares) + rest_squares) / dim + eps);
  for (i = 0; i + LANES <= dim; i += LANES) store(y + i, (load(x + i) - mean) * factor * load(weight + i) + load(bias + i));
  for (; i < dim; i++) put(y + i, (number(x + i) - mean) * factor * number(weight + i) + number(bias + i));
}

// Rounded to the nearest e4m3, ties to even. |x| is at most 448.
INLINE uint8_t e4m3_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  uint32_t sign = bits >> 24 & 0x80, size = bits & 0x7fffffff;
  if (size < 0x3c800000) {  // below 2^-6: multiples of 2^-9, which adding 2^14 rounds to
    float magnitude, shift = 16384.f;
    memcpy(&magnitude, &size, 4);
    magnitude += shift;
    memcpy(&size, &magnitude, 4);
    return (uint8_t)(sign | (size & 0xff));
  }
  size += 0x7ffff + (size >> 20 & 1);
  return (uint8_t)(sign | ((size >> 20) - (120 << 3)));
}

// As mla/index_keys.py: the scale is a power of two.
template <class X> INLINE void pack_fp8(const X *x, int64_t dim, uint8_t *row) {
  float largest = 0;
  for (int64_t i = 0; i < dim; i++) {
    float size = __builtin_fabsf(number(x + i));
    largest = size > largest ? size : largest;
  }
  float scale = largest / 448.f;
  scale = scale > 0x1p-100f ? scale : 0x1p-100f;
  uint32_t bits;
  memcpy(&bits, &scale, 4);
  bits = (bits + 0x7fffff) & 0x7f800000;
  memcpy(&scale, &bits, 4);
  for (int64_t i = 0; i < dim; i++) row[i] = e4m3_of(number(x + i) / scale);
  memcpy(row + dim, &scale, 4);
}

template <class X> static void index_key(const IndexKeyCall &call, int64_t row, void *work) {
  const X *cos = (const X *)call.cos + row * call.rope_dim, *sin = (const X *)call.sin + row * call.rope_dim;
  const X *key = (const X *)call.key + row * call.key_stride;
  uint8_t *entry = call.cache + call.slots[row] * call.cache_bytes;
  X *normed = call.fp8 ? (X *)work : (X *)entry, *q = (X *)call.q + row * call.q_stride;
  layer_norm(key, (const X *)call.norm, (const X *)call.bias, normed, call.dim, call.eps);
  rotate(normed, cos, sin, normed, call.rope_dim);
  if (call.fp8) pack_fp8(normed, call.dim, entry);
  for (int64_t head = 0; head < call.num_heads; head++) rotate(q + head * call.dim, cos, sin, q + head * call.dim, call.rope_dim);
}

// x / y, y from 1 on.
INLINE vf over(vf x, vf y) {
#ifdef AVX512_BF16_FILE  // all but the last bits, which bfloat16 does not have
  __m512 inverse = _mm512_rcp14_ps((__m512)y);
  return x * (vf)_mm512_mul_ps(inverse, _mm512_fnmadd_ps((__m512)y, inverse, _mm512_set1_ps(2.f)));
#else
  return x / y;
#endif
}

template <class X> static void silu_mul(const void *gate_up, void *yv, int64_t width) {
  const X *gate = (const X *)gate_up, *up = gate + width;
  X *y = (X *)yv;
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) {
    vf x = load(gate + i), silu = over(x, 1.f + exp_of(-x));
    store(y + i, rounded(x == x ? silu : x, gate) * load(up + i));
  }
  for (; i < width; i++) {
    vf x = splat(number(gate + i)), silu = over(x, 1.f + exp_of(-x));
    put(y + i, rounded(x[0] == x[0] ? silu[0] : x[0], gate) * number(up + i));
  }
}

#include "choose_vector.h"

template <class X> static void sigmoid_gate(const void *gatev, bool one, void *yv, int64_t width) {
  const X *gate = (const X *)gatev;
  X *y = (X *)yv;
  auto opened = [&](vf x) { return rounded(1.f / (1.f + exp_of(-x)), y); };
  vf all = opened(splat(number(gate)));
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) store(y + i, load(y + i) * (one ? all : opened(load(gate + i))));
  for (; i < width; i++) put(y + i, number(y + i) * (one ? all : opened(splat(number(gate + i))))[0]);
}

template <class X> static void add(const void *xv, void *yv, int64_t dim) {
  const X *x = (const X *)xv;
  X *y = (X *)yv;
  int64_t i = 0;
  for (; i + LANES <= dim; i += LANES) store(y + i, load(y + i) + load(x + i));
  for (; i < dim; i++) put(y + i, number(y + i) + number(x + i));
}

static void halve(const float *x, bf16 *y, int64_t dim) {
  int64_t i = 0;
  for (; i + LANES <= dim; i += LANES) store(y + i, load(x + i));
  for (; i < dim; i++) put(y + i, x[i]);
}

template <class X> static void weigh(const void *const *rows, const float *weight, int64_t n, void *yv, int64_t dim) {
  X *y = (X *)yv;
  int64_t i = 0;
  for (; i + LANES <= dim; i += LANES) store(y + i, weighted(n, weight, [&](int64_t j) { return load((const X *)rows[j] + i); }));
  if (i == dim) return;
  X rest[LANES] = {};
  store(rest, weighted(n, weight, [&](int64_t j) {
    memcpy(rest, (const X *)rows[j] + i, (dim - i) * sizeof(X));
    return load(rest);
  }));
  memcpy(y + i, rest, (dim - i) * sizeof(X));
}

template <class X> static void rope(int64_t position, const float *frequency, float scale, void *cosv, void *sinv, int64_t planes) {
  X *cos = (X *)cosv, *sin = (X *)sinv;
  for (int64_t i = 0; i < planes; i++) {
    float angle = (float)position * frequency[i], c = __builtin_cosf(angle) * scale, s = __builtin_sinf(angle) * scale;
    put(cos + i, c), put(cos + planes + i, c), put(sin + i, -s), put(sin + planes + i, s);
  }
}

// `live` of LANES / rows outputs, of so many rows.
template <int rows, bool all, class X>
INLINE void some_dots(const X *x, int64_t x_stride, const float *w, int64_t inputs, int live, float *y, int64_t y_stride) {
  enum { COUNT = LANES / rows };
  vf sum[LANES] = {};
  int64_t i = 0;
  for (; i + LANES <= inputs; i += LANES)
#pragma GCC unroll 16
    for (int o = 0; o < COUNT; o++) {
      if (!all && o >= live) break;
      vf b = load(w + o * inputs + i);
#pragma GCC unroll 4
      for (int r = 0; r < rows; r++) sum[r * COUNT + o] += load(x + r * x_stride + i) * b;
    }
  vf found = totals(sum);
  for (int r = 0; r < rows; r++)
    for (int o = 0; o < live; o++) {
      float rest = 0;
      for (int64_t j = i; j < inputs; j++) rest += number(x + r * x_stride + j) * w[o * inputs + j];
      y[r * y_stride + o] = found[r * COUNT + o] + rest;
    }
}

template <int rows, class X>
static void row_dots(const X *x, int64_t x_stride, const float *w, int64_t inputs, int64_t outputs, float *y, int64_t y_stride) {
  enum { COUNT = LANES / rows };
  int64_t o = 0;
  for (; o + COUNT <= outputs; o += COUNT) some_dots<rows, true>(x, x_stride, w + o * inputs, inputs, COUNT, y + o, y_stride);
  if (o < outputs) some_dots<rows, false>(x, x_stride, w + o * inputs, inputs, (int)(outputs - o), y + o, y_stride);
}

template <class X>
static void dots(const void *xv, int64_t x_stride, int64_t rows, const float *w, int64_t inputs, int64_t outputs, float *y, int64_t y_stride) {
  const X *x = (const X *)xv;
  for (; rows >= 4; rows -= 4, x += 4 * x_stride, y += 4 * y_stride) row_dots<4>(x, x_stride, w, inputs, outputs, y, y_stride);
  for (; rows >= 2; rows -= 2, x += 2 * x_stride, y += 2 * y_stride) row_dots<2>(x, x_stride, w, inputs, outputs, y, y_stride);
  if (rows) row_dots<1>(x, x_stride, w, inputs, outputs, y, y_stride);
}

template <class X> static int64_t best(const void *xv, int64_t n) {
  const X *x = (const X *)xv;
  vf most = splat(-__builtin_inff());
  vi place = {}, at;
  for (int j = 0; j < LANES; j++) at[j] = j;
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES, at += (int)LANES) {
    vf a = load(x + i);
    vi more = a > most;
    most = more ? a : most, place = more ? at : place;
  }
  float largest = -__builtin_inff();
  int64_t found = 0;
  for (int j = 0; j < LANES; j++)
    if (most[j] > largest || (most[j] == largest && place[j] < found)) largest = most[j], found = place[j];
  for (; i < n; i++)
    if (number(x + i) > largest) largest = number(x + i), found = i;
  return found;
}

template <class X> struct Ops {
  static constexpr RowOps table = {norm<X>, heads<X>, latent<X>, index_key<X>, silu_mul<X>, sigmoid_gate<X>, softmax_topk<X>, grouped_topk, add<X>, weigh<X>, rope<X>, dots<X>, best<X>, halve};
};
