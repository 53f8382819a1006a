// Operations on rows in GCC's vector types. Included inside a namespace of one instruction set, after `enum { LANES = ... }`.
#include "vector.h"

// What x becomes when torch stores it between two operations.
INLINE vf rounded(vf x, const float *) { return x; }
INLINE vf rounded(vf x, const bf16 *) { return (vf)(__builtin_convertvector(bf16_of(x), vi) << 16); }
INLINE float rounded(float x, const float *) { return x; }
INLINE float rounded(float x, const bf16 *type) { return rounded(splat(x), type)[0]; }

template <class X> INLINE float inverse_rms(const X *x, int64_t dim, float eps) {
  vf sum[2] = {};
  int64_t i = 0;
  for (; i + 2 * LANES <= dim; i += 2 * LANES)
    for (int j = 0; j < 2; j++) {
      vf a = load(x + i + j * LANES);
      sum[j] += a * a;
    }
  float rest = 0;
  for (; i < dim; i++) rest += number(x + i) * number(x + i);
  return 1 / __builtin_sqrtf((total(sum[0] + sum[1]) + rest) / dim + eps);
}

template <class X> INLINE void scale_row(const X *x, const X *weight, X *y, int64_t dim, float factor) {
  int64_t i = 0;
  for (; i + LANES <= dim; i += LANES) store(y + i, rounded(load(x + i) * factor, x) * load(weight + i));
  for (; i < dim; i++) put(y + i, rounded(number(x + i) * factor, x) * number(weight + i));
}

template <class X> static void norm(const void *xv, void *residualv, const void *weight, void *y, int64_t dim, float eps) {
  const X *x = (const X *)xv;
  X *residual = (X *)residualv;
  if (x) {
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) store(residual + i, load(residual + i) + load(x + i));
    for (; i < dim; i++) put(residual + i, number(residual + i) + number(x + i));
  }
  scale_row(residual, (const X *)weight, (X *)y, dim, inverse_rms(residual, dim, eps));
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

template <class X> static void heads(const HeadsCall &call, int64_t row) {
  int64_t dim = call.dim, num_qk = call.num_heads + call.num_kv_heads;
  X *x = (X *)call.x + row * (num_qk + call.num_kv_heads) * dim;
  const X *cos = (const X *)call.cos + row * dim, *sin = (const X *)call.sin + row * dim;
  X *k_cache = (X *)call.k_cache + call.slots[row] * call.k_stride, *v_cache = (X *)call.v_cache + call.slots[row] * call.v_stride;
  for (int64_t head = 0; head < num_qk; head++) {
    X *own = x + head * dim;
    if (call.norm) scale_row(own, (const X *)call.norm + head * dim, own, dim, inverse_rms(own, dim, call.eps));
    rotate(own, cos, sin, head < call.num_heads ? own : k_cache + (head - call.num_heads) * dim, dim);
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

template <class X> static void silu_mul(const void *gate_up, void *yv, int64_t width) {
  const X *gate = (const X *)gate_up, *up = gate + width;
  X *y = (X *)yv;
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) {
    vf x = load(gate + i), silu = x / (1.f + exp_of(-x));
    store(y + i, rounded(x == x ? silu : x, gate) * load(up + i));
  }
  for (; i < width; i++) {
    vf x = splat(number(gate + i)), silu = x / (1.f + exp_of(-x));
    put(y + i, rounded(x[0] == x[0] ? silu[0] : x[0], gate) * number(up + i));
  }
}

// The sum of exp(x - largest).
INLINE float exponentials(const float *x, int64_t n, float largest) {
  vf sums = {};
  float sum = 0;
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) sums += exp_of(load(x + i) - largest);
  for (; i < n; i++) sum += exp_of(splat(x[i] - largest))[0];
  return sum + total(sums);
}

// Put (x, place) among the best, which are at most k and in falling order.
INLINE void insert(float x, int64_t place, int64_t k, int64_t *count, int64_t *index, float *value) {
  if (*count == k && !(x > value[k - 1])) return;
  int64_t at = *count < k ? (*count)++ : k - 1;
  for (; at > 0 && x > value[at - 1]; at--) value[at] = value[at - 1], index[at] = index[at - 1];
  value[at] = x, index[at] = place;
}

// work: n numbers. Of equal numbers the first is taken; indices are valid and distinct whatever the numbers.
template <class X>
static void softmax_topk(const void *logitsv, int64_t n, int64_t k, bool renormalize, int64_t *index, float *weight, float *work) {
  const X *logits = (const X *)logitsv;
  int64_t i = 0, count = 0;
  for (; i + LANES <= n; i += LANES) store(work + i, load(logits + i));
  for (; i < n; i++) work[i] = number(logits + i);
  for (i = 0; i < n; i++) insert(work[i], i, k, &count, index, weight);
  float largest = weight[0], sum = renormalize ? 0 : exponentials(work, n, largest);
  for (i = 0; i < k; i += LANES) {
    int64_t here = k - i < LANES ? k - i : LANES;
    vf x = splat(largest);
    memcpy(&x, weight + i, 4 * here);
    x = exp_of(x - largest);
    memcpy(weight + i, &x, 4 * here);
  }
  for (i = 0; renormalize && i < k; i++) sum += weight[i];
  for (i = 0; i < k; i++) weight[i] /= sum;
}

static void grouped_topk(const GroupedCall &call, int64_t row, float *work) {
  const float *logits = call.logits + row * call.experts;
  int64_t n = call.experts, each = n / call.groups, i = 0, count = 0, *index = call.index + row * call.k;
  float *score = work, *biased = work + n, *group = work + 2 * n, *weight = call.weight + row * call.k;
  if (call.bias && !call.softmax) {
    for (; i + LANES <= n; i += LANES) store(score + i, 1.f / (1.f + exp_of(-load(logits + i))));
    for (; i < n; i++) score[i] = (1.f / (1.f + exp_of(splat(-logits[i]))))[0];
  } else {
    float largest = logits[0];
    for (i = 1; i < n; i++) largest = logits[i] > largest ? logits[i] : largest;
    float sum = exponentials(logits, n, largest);
    for (i = 0; i + LANES <= n; i += LANES) store(score + i, exp_of(load(logits + i) - largest) / sum);
    for (; i < n; i++) score[i] = exp_of(splat(logits[i] - largest))[0] / sum;
  }
  for (i = 0; i < n; i++) biased[i] = call.bias ? score[i] + call.bias[i] : score[i];
  int64_t counted = call.bias ? 2 : 1;  // of a group's best
  for (int64_t g = 0; g < call.groups && call.kept < call.groups; g++) {
    float best[2];
    int64_t unused[2], found = 0;
    for (i = 0; i < each; i++) insert(biased[g * each + i], i, counted, &found, unused, best);
    group[g] = best[0] + (counted > 1 ? best[1] : 0);
  }
  for (int64_t g = 0; g < call.groups; g++) {
    int64_t better = 0;  // groups that come before this one
    for (int64_t other = 0; call.kept < call.groups && other < call.groups; other++)
      better += group[other] > group[g] || (other < g && !(group[other] < group[g]));
    if (better >= call.kept) continue;
    for (i = 0; i < each; i++) insert(biased[g * each + i], g * each + i, call.k, &count, index, weight);
  }
  float sum = 1e-20f;
  for (i = 0; i < call.k; i++) weight[i] = score[index[i]], sum += weight[i];
  sum = sum > call.smallest ? sum : call.smallest;
  float factor = call.renormalize ? call.scale / sum : call.scale;
  for (i = 0; i < call.k; i++) weight[i] *= factor;
}

template <class X> static void add(const void *xv, void *yv, int64_t dim) {
  const X *x = (const X *)xv;
  X *y = (X *)yv;
  int64_t i = 0;
  for (; i + LANES <= dim; i += LANES) store(y + i, load(y + i) + load(x + i));
  for (; i < dim; i++) put(y + i, number(y + i) + number(x + i));
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

template <int count, class X> INLINE void some_dots(const X *x, const float *w, int64_t inputs, float *y) {
  vf sum[count] = {};
  int64_t i = 0;
  for (; i + LANES <= inputs; i += LANES) {
    vf a = load(x + i);
    for (int o = 0; o < count; o++) sum[o] += a * load(w + o * inputs + i);
  }
  for (int o = 0; o < count; o++) {
    float rest = 0;
    for (int64_t j = i; j < inputs; j++) rest += number(x + j) * w[o * inputs + j];
    y[o] = total(sum[o]) + rest;
  }
}

template <class X> static void dots(const void *xv, const float *w, int64_t inputs, int64_t outputs, float *y) {
  const X *x = (const X *)xv;
  int64_t o = 0;
  for (; o + 8 <= outputs; o += 8) some_dots<8>(x, w + o * inputs, inputs, y + o);
  for (; o < outputs; o++) some_dots<1>(x, w + o * inputs, inputs, y + o);
}

template <class X> static void scale(void *yv, float factor, int64_t dim) {
  X *y = (X *)yv;
  int64_t i = 0;
  for (; i + LANES <= dim; i += LANES) store(y + i, load(y + i) * factor);
  for (; i < dim; i++) put(y + i, number(y + i) * factor);
}

template <class X> struct Ops {
  static constexpr RowOps table = {norm<X>, heads<X>, latent<X>, silu_mul<X>, softmax_topk<X>, grouped_topk, add<X>, weigh<X>, rope<X>, dots<X>, scale<X>};
};
