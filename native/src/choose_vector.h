// Which numbers of a row are its largest, and their weights: routers. Included by rows_vector.h.

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

#ifdef AVX512_FILE
enum { MOST_IN_REGISTERS = 16 * LANES };

// The k largest of n numbers, at most MOST_IN_REGISTERS, in falling order, the first of equals first: what `insert` makes of them one by
// one. False: some are no numbers, and nothing was done. x has room for a multiple of LANES.
INLINE bool best_of(const float *x, int64_t n, int64_t k, int64_t *index, float *value) {
  const __m512 least = _mm512_set1_ps(-__builtin_inff());
  __mmask16 left[MOST_IN_REGISTERS / LANES], strange = 0;
  int64_t count = (n + LANES - 1) / LANES;
  for (int64_t i = 0; i < count; i++) {
    left[i] = n - i * LANES >= LANES ? (__mmask16)0xffff : (__mmask16)((1 << (n - i * LANES)) - 1);
    strange |= _mm512_mask_cmp_ps_mask(left[i], _mm512_loadu_ps(x + i * LANES), least, _CMP_UNORD_Q);
  }
  if (strange) return false;
  for (int64_t j = 0; j < k; j++) {
    __m512 most = least;
    for (int64_t i = 0; i < count; i++) most = _mm512_mask_max_ps(most, left[i], most, _mm512_loadu_ps(x + i * LANES));
    value[j] = _mm512_reduce_max_ps(most);
    for (int64_t i = 0; i < count; i++) {
      __mmask16 found = _mm512_mask_cmp_ps_mask(left[i], _mm512_loadu_ps(x + i * LANES), _mm512_set1_ps(value[j]), _CMP_EQ_OQ);
      if (!found) continue;
      int at = __builtin_ctz(found);
      index[j] = i * LANES + at, left[i] &= (__mmask16)~(1 << at);
      break;
    }
  }
  return true;
}
#else
enum { MOST_IN_REGISTERS = 0 };
INLINE bool best_of(const float *, int64_t, int64_t, int64_t *, float *) { return false; }
#endif

// work: n numbers. Of equal numbers the first is taken; indices are valid and distinct whatever the numbers.
template <class X>
static void softmax_topk(const void *logitsv, int64_t n, int64_t k, bool renormalize, int64_t *index, float *weight, float *work) {
  const X *logits = (const X *)logitsv;
  int64_t i = 0, count = 0;
  for (; i + LANES <= n; i += LANES) store(work + i, load(logits + i));
  for (; i < n; i++) work[i] = number(logits + i);
  bool chosen = n <= MOST_IN_REGISTERS && best_of(work, n, k, index, weight);
  for (i = 0; !chosen && i < n; i++) insert(work[i], i, k, &count, index, weight);
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
