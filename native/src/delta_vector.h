// Linear attention in GCC's vector types. Included inside a namespace of one instruction set, after `enum { LANES = ... }`
// and the macro STREAM, which stores a register past the caches.
//
// For m tokens whose decays are d_1 .. m, with D_i their product up to i, and a state S: what S holds under the keys is read at once,
// R_i = (k_i D_i)^T S, and so is (q_i D_i)^T S; then, token by token, x_i = beta_i (v_i - R_i - sum_{j<i} (k_i . k_j D_i / D_j) x_j); then
// S becomes D_m S + sum_i (k_i D_m / D_i) x_i^T. Quotients of decays are products of those between, so nothing overflows.
#include "delta_inputs.h"

enum { TOGETHER = 4, SLAB = 16, WIDE = LANES == 16 ? 2 : 1, ROW = LANES == 16 ? 8 : 4 };
// Tokens; of a slab; registers of a state's row that are taken at once with several tokens, and with one.

// Past the caches: a state is not read before the next step, and to write it there its old bytes would have to be fetched first.
INLINE void store_far(float *p, vf x) {
  typedef float plain __attribute__((vector_size(4 * LANES)));
  STREAM(p, (plain)x);
}

struct Sizes {
  int64_t key_pad, value_pad, group, mixed;  // mixed: numbers of a token behind the convolution, as they lie in `work`
  Sizes(const DeltaCall &c)
      : key_pad((c.key_dim + LANES - 1) / LANES * LANES), value_pad((c.value_dim + LANES - 1) / LANES * LANES), group(c.heads / c.key_heads),
        mixed(2 * key_pad + group * value_pad) {}
};

static int64_t room(const DeltaCall &c) {
  Sizes s(c);
  return SLAB * (s.mixed + 4 * s.key_pad + s.value_pad) + SLAB / TOGETHER * s.key_pad +
         (c.starts || c.value_dim % LANES ? s.group * c.key_dim * s.value_pad : 0);
}

// What a group of tokens needs of the keys and queries; rows of key_pad numbers.
struct Pairs {
  float key[TOGETHER][TOGETHER], query[TOGETHER][TOGETHER], beta[TOGETHER];
  const float *read_key, *read_query, *moved_key, *kept;  // k D_i, q D_i, k D_m / D_i; D_m
};

// A call of its own for each size: inside a larger function the compiler runs out of registers.
template <int M, int NB, bool FAR>
__attribute__((noinline)) static void columns(const Pairs &p, int64_t key_dim, int64_t key_pad, const float *from, float *to, int64_t stride,
                                              const float *v, int64_t v_stride, float *out, int64_t out_stride) {
  const float *read_key = p.read_key, *read_query = p.read_query, *moved_key = p.moved_key, *all_kept = p.kept;
  vf x[M][NB] = {}, y[M][NB] = {};
  for (int64_t k = 0; k < key_dim; k++) {
    vf s[NB];
    for (int j = 0; j < NB; j++) s[j] = load(from + k * stride + j * LANES);
    for (int i = 0; i < M; i++) {
      vf key = splat(read_key[i * key_pad + k]), query = splat(read_query[i * key_pad + k]);
      for (int j = 0; j < NB; j++) x[i][j] += key * s[j], y[i][j] += query * s[j];
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < M; i++)
#pragma GCC unroll 8
    for (int j = 0; j < NB; j++) {
      vf missing = load(v + i * v_stride + j * LANES) - x[i][j];
#pragma GCC unroll 4
      for (int h = 0; h < i; h++) missing -= p.key[i][h] * x[h][j];
      x[i][j] = p.beta[i] * missing;
#pragma GCC unroll 4
      for (int h = 0; h <= i; h++) y[i][j] += p.query[i][h] * x[h][j];
      store(out + i * out_stride + j * LANES, y[i][j]);
    }
  for (int64_t k = 0; k < key_dim; k++) {
    vf s[NB], kept = splat(all_kept[k]);
    if (FAR)  // the next head's state; while this one is written nothing would be read
      for (int j = 0; j < NB * LANES; j += 16) __builtin_prefetch(from + (key_dim + k) * stride + j, 0, 2);
    for (int j = 0; j < NB; j++) s[j] = kept * load(from + k * stride + j * LANES);
    for (int i = 0; i < M; i++) {
      vf key = splat(moved_key[i * key_pad + k]);
      for (int j = 0; j < NB; j++) s[j] += key * x[i][j];
    }
    for (int j = 0; j < NB; j++) {
      if (FAR) store_far(to + k * stride + j * LANES, s[j]);
      else store(to + k * stride + j * LANES, s[j]);
    }
  }
}

template <int NB>
static void some_tokens(int count, const Pairs &p, int64_t key_dim, int64_t key_pad, const float *from, float *to, int64_t stride, const float *v,
                        int64_t v_stride, float *out, int64_t out_stride) {
  switch (count) {
    case 1: return columns<1, NB, false>(p, key_dim, key_pad, from, to, stride, v, v_stride, out, out_stride);
    case 2: return columns<2, NB, false>(p, key_dim, key_pad, from, to, stride, v, v_stride, out, out_stride);
    case 3: return columns<3, NB, false>(p, key_dim, key_pad, from, to, stride, v, v_stride, out, out_stride);
    default: return columns<4, NB, false>(p, key_dim, key_pad, from, to, stride, v, v_stride, out, out_stride);
  }
}

template <class X> struct Run {
  const DeltaCall &c;
  Sizes size;
  int64_t sequence, key_head, first, count, key_size, channels;
  int64_t applied, firm, decays_width;  // the tokens from `applied` on are the step's; of the first `firm` the state is kept
  float *mixed, *read_key, *read_query, *moved_key, *decays, *kept, *heads_out, *copies;

  Run(const DeltaCall &call, int64_t of_sequence, int64_t of_key_head, float *work) : c(call), size(call), sequence(of_sequence), key_head(of_key_head) {
    first = c.starts ? c.starts[sequence] : sequence;
    count = c.starts ? c.starts[sequence + 1] - first : 1;
    applied = c.applied ? c.applied[sequence] : 0;
    count += applied, first -= applied;  // so that `first + token` is a row of the step
    firm = count - (c.guesses ? c.guesses[sequence] : 0);
    decays_width = c.heads * (c.channel_decay ? c.key_dim : 1);
    key_size = c.key_heads * c.key_dim, channels = 2 * key_size + c.heads * c.value_dim;
    mixed = work;
    read_key = mixed + SLAB * size.mixed, read_query = read_key + SLAB * size.key_pad, moved_key = read_query + SLAB * size.key_pad;
    decays = moved_key + SLAB * size.key_pad, heads_out = decays + SLAB * size.key_pad;
    kept = heads_out + SLAB * size.value_pad, copies = kept + SLAB / TOGETHER * size.key_pad;
  }

  // A row of the step's, or of what was kept.
  const X *input(int64_t token, const void *rows, int64_t stride, const void *kept, int64_t width) const {
    if (token >= applied) return (const X *)rows + (first + token) * stride;
    return (const X *)kept + (c.reads[sequence] * c.most_kept + token) * width;
  }
  const X *row_of(int64_t token) const {  // of the sequence's tokens; those before them are in its tail
    if (token >= 0) return input(token, c.qkv, c.qkv_stride, c.kept_qkv, channels);
    return (const X *)c.tails + (c.reads[sequence] * (c.taps - 1) + c.taps - 1 + token) * channels;
  }
  // Each stretch of channels that belongs to the key head, and where it lies behind the convolution.
  template <class Stretch> void stretches(const Stretch &stretch) const {
    stretch(key_head * c.key_dim, c.key_dim, (int64_t)0);
    stretch(key_size + key_head * c.key_dim, c.key_dim, size.key_pad);
    for (int64_t g = 0; g < size.group; g++)
      stretch(2 * key_size + (key_head * size.group + g) * c.value_dim, c.value_dim, 2 * size.key_pad + g * size.value_pad);
  }

  // Queries, keys and values of n tokens from `token` on.
  void convolve_slab(int64_t token, int64_t n) const {
    const X *from[SLAB + 16], *row[SLAB + 16];
    for (int64_t t = 0; t < n + c.taps - 1; t++) from[t] = row_of(token + t - c.taps + 1);
    stretches([&](int64_t channel, int64_t numbers, int64_t at) {
      for (int64_t t = 0; t < n + c.taps - 1; t++) row[t] = from[t] + channel;
      (c.taps == 4 ? convolve<4, X> : convolve<0, X>)(row, c.conv + channel, channels, c.taps, n, numbers, mixed + at, size.mixed);
    });
    for (int64_t t = 0; t < n; t++) {
      float *query = mixed + t * size.mixed, *key = query + size.key_pad;
      scale(query, size.key_pad, 1 / (__builtin_sqrtf(dot(query, query, size.key_pad) + 1e-6f) * __builtin_sqrtf((float)c.key_dim)));
      scale(key, size.key_pad, 1 / __builtin_sqrtf(dot(key, key, size.key_pad) + 1e-6f));
    }
  }

  // What `token` brings from memory, while others are computed: its rows lie too far apart for the processor to foresee.
  // Not a call: of one that only fetches the compiler says that it does nothing.
  __attribute__((always_inline)) inline void fetch(int64_t token) const {
    if (token >= count) return;
    auto lines = [](const auto *p, int64_t numbers) __attribute__((always_inline)) {
      for (int64_t i = 0; i < numbers; i += 64 / (int64_t)sizeof *p) __builtin_prefetch(p + i);
    };
    const X *row = row_of(token);
    stretches([&](int64_t channel, int64_t numbers, int64_t) { lines(row + channel, numbers); });
    int64_t head = key_head * size.group, width = c.channel_decay ? c.key_dim : 1;
    lines(input(token, c.decay, c.decay_stride, c.kept_decay, decays_width) + head * width, size.group * width);
    lines(input(token, c.beta, c.beta_stride, c.kept_beta, c.heads) + head, size.group);
    if (token >= applied) lines((const X *)c.gate + (first + token) * c.gate_stride + head * c.value_dim, size.group * c.value_dim);
  }

  void find_decays(int64_t token, int64_t n, int64_t head) const {
    for (int64_t t = 0; t < n; t++) {
      const X *x = input(token + t, c.decay, c.decay_stride, c.kept_decay, decays_width);
      float *to = decays + t * size.key_pad, rate = c.rate[head];
      if (!c.channel_decay) {
        vf d = decay_of(splat(number(x + head) + c.dt_bias[head]), rate, c.lower_bound);
        for (int64_t i = 0; i < size.key_pad; i += LANES) store(to + i, d);
        continue;
      }
      x += head * c.key_dim;
      const float *bias = c.dt_bias + head * c.key_dim;
      for (int64_t i = 0; i < c.key_dim; i += LANES) {
        int64_t left = c.key_dim - i;
        vf sum = left >= LANES ? load(x + i) + load(bias + i) : some(x + i, left) + some(bias + i, left);
        store(to + i, decay_of(sum, rate, c.lower_bound));
      }
    }
  }

  // Of m tokens, the t-th of the slab first.
  void pair(int64_t t, int64_t m, Pairs *p) const {
    int64_t width = size.key_pad;
    p->read_key = read_key + t * width, p->read_query = read_query + t * width, p->moved_key = moved_key + t * width;
    float *all = kept + t / TOGETHER * width;
    p->kept = all;
    vf key[TOGETHER][TOGETHER] = {}, query[TOGETHER][TOGETHER] = {};
    for (int64_t i = 0; i < width; i += LANES) {
      vf so_far = splat(1.f), k[TOGETHER], q[TOGETHER], d[TOGETHER];
      for (int64_t a = 0; a < m; a++) {
        const float *row = mixed + (t + a) * size.mixed;
        q[a] = load(row + i), k[a] = load(row + width + i), d[a] = load(decays + (t + a) * width + i);
        so_far *= d[a];
        store(read_key + (t + a) * width + i, k[a] * so_far), store(read_query + (t + a) * width + i, q[a] * so_far);
        vf since = splat(1.f);
        for (int64_t b = a; b >= 0; b--) {
          query[a][b] += q[a] * k[b] * since;
          if (b < a) key[a][b] += k[a] * k[b] * since;
          since *= d[b];
        }
      }
      store(all + i, so_far);
      vf after = splat(1.f);
      for (int64_t a = m - 1; a >= 0; a--) store(moved_key + (t + a) * width + i, k[a] * after), after *= d[a];
    }
    for (int64_t a = 0; a < m; a++)
      for (int64_t b = 0; b <= a; b++) p->key[a][b] = total(key[a][b]), p->query[a][b] = total(query[a][b]);
  }

  void gated_norm(int64_t token, int64_t head, const float *o) const {
    int64_t dim = c.value_dim;
    const X *gate = (const X *)c.gate + (first + token) * c.gate_stride + head * dim;
    X *out = (X *)c.out + ((first + token) * c.heads + head) * dim;
    float squares = 0;
    vf sum = {};
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) sum += load(o + i) * load(o + i);
    for (; i < dim; i++) squares += o[i] * o[i];
    float factor = 1 / __builtin_sqrtf((total(sum) + squares) / dim + c.eps);
    for (i = 0; i < dim; i += LANES) {
      int64_t left = dim - i;
      vf z = left >= LANES ? load(gate + i) : some(gate + i, left), w = left >= LANES ? load(c.norm + i) : some(c.norm + i, left);
      vf opened = sigmoid_of(z);
      vf y = load(o + i) * factor * w * (c.sigmoid_gate ? opened : z * opened);
      X part[LANES];
      store(left >= LANES ? out + i : part, y);
      if (left < LANES) memcpy(out + i, part, left * sizeof(X));
    }
  }

  // Of n tokens from `token` on, all that one head needs; what it gives goes through the norm. each(what its tokens need, its values) moves the state.
  template <class Each> void head_slab(int64_t token, int64_t n, int64_t group, const Each &each) const {
    int64_t head = key_head * size.group + group;
    find_decays(token, n, head);
    Pairs pairs[SLAB / TOGETHER];
    for (int64_t t = 0; t < n; t += TOGETHER) {
      int64_t m = n - t < TOGETHER ? n - t : (int64_t)TOGETHER;
      Pairs *p = pairs + t / TOGETHER;
      pair(t, m, p);
      for (int64_t a = 0; a < m; a++)
        p->beta[a] = sigmoid_of(splat(number(input(token + t + a, c.beta, c.beta_stride, c.kept_beta, c.heads) + head)))[0];
    }
    each(pairs, mixed + 2 * size.key_pad + group * size.value_pad);
    for (int64_t t = 0; t < n; t++)
      if (token + t >= applied) gated_norm(token + t, head, heads_out + t * size.value_pad);
  }

  // A decode reads one record and writes another.
  void decode() const {
    int64_t numbers = c.key_dim * c.value_dim, stride = c.value_dim;
    convolve_slab(0, 1);
    for (int64_t g = 0; g < size.group; g++) {
      int64_t head = key_head * size.group + g;
      const float *from = c.states + (c.reads[sequence] * c.heads + head) * numbers;
      float *to = c.states + (c.writes[sequence] * c.heads + head) * numbers;
      bool far = from != to && ((uintptr_t)to | (uintptr_t)(4 * stride)) % (4 * LANES) == 0;
      head_slab(0, 1, g, [&](const Pairs *p, const float *v) {
        int64_t at = 0;
        auto stretch = [&](int64_t width, auto tokens) {
          for (; at + width <= c.value_dim; at += width)
            tokens(*p, c.key_dim, size.key_pad, from + at, to + at, stride, v + at, size.mixed, heads_out + at, size.value_pad);
        };
        if (far) stretch(ROW * LANES, columns<1, ROW, true>), stretch(LANES, columns<1, 1, true>), __builtin_ia32_sfence();
        else stretch(ROW * LANES, columns<1, ROW, false>), stretch(LANES, columns<1, 1, false>);
      });
    }
  }

  // Several tokens work on a copy of the state, in which the columns that are taken together lie together: in the state itself they
  // would compete for a few lines of the nearest cache.
  template <class Block> void blocks(const Block &block) const {
    int64_t at = 0;
    for (; at + WIDE * LANES <= size.value_pad; at += WIDE * LANES) block(at, (int64_t)WIDE * LANES);
    for (; at < size.value_pad; at += LANES) block(at, (int64_t)LANES);
  }
  template <bool IN> void copy(float *state, float *own) const {
    blocks([&](int64_t at, int64_t width) {
      int64_t count = c.value_dim - at < width ? c.value_dim - at : width;
      for (int64_t k = 0; k < c.key_dim; k++) {
        float *far = state + k * c.value_dim + at, *near = own + at * c.key_dim + k * width;
        memcpy(IN ? near : far, IN ? far : near, count * 4);
        if (IN) memset(near + count, 0, (width - count) * 4);
      }
    });
  }

  void prompt() const {
    int64_t numbers = c.key_dim * c.value_dim, padded = c.key_dim * size.value_pad;
    auto state = [&](const int64_t *record, int64_t g) { return c.states + (record[sequence] * c.heads + key_head * size.group + g) * numbers; };
    for (int64_t g = 0; g < size.group; g++) copy<true>(state(c.reads, g), copies + g * padded);
    slabs(0, firm, padded);
    for (int64_t g = 0; g < size.group; g++) copy<false>(state(c.writes, g), copies + g * padded);
    slabs(firm, count, padded);
  }

  void slabs(int64_t begin, int64_t end, int64_t padded) const {
    for (int64_t token = begin; token < end; token += SLAB) {
      int64_t n = end - token < SLAB ? end - token : (int64_t)SLAB;
      convolve_slab(token, n);
      int64_t next = token + SLAB, part = (WIDE * LANES * TOGETHER + size.value_pad * size.group - 1) / (size.value_pad * size.group);
      for (int64_t g = 0; g < size.group; g++)
        head_slab(token, n, g, [&](const Pairs *pairs, const float *v) {
          blocks([&](int64_t at, int64_t width) {
            float *own = copies + g * padded + at * c.key_dim;
            for (int64_t t = 0; t < n; t += TOGETHER) {
              for (int64_t i = 0; i < part && next < token + 2 * SLAB; i++) fetch(next++);
              (width == LANES ? some_tokens<1> : some_tokens<WIDE>)(n - t < TOGETHER ? (int)(n - t) : (int)TOGETHER, pairs[t / TOGETHER], c.key_dim,
                                                                     size.key_pad, own, own, width, v + t * size.mixed + at, size.mixed,
                                                                     heads_out + t * size.value_pad + at, size.value_pad);
            }
          });
        });
    }
  }

  void keep_guesses() const {
    int64_t width = c.channel_decay ? c.key_dim : 1;
    for (int64_t i = 0; firm + i < count; i++) {
      int64_t row = c.writes[sequence] * c.most_kept + i;
      const X *from = row_of(firm + i);
      stretches([&](int64_t channel, int64_t numbers, int64_t) {
        memcpy((X *)c.kept_qkv + row * channels + channel, from + channel, numbers * sizeof(X));
      });
      int64_t head = key_head * size.group, token = first + firm + i;
      memcpy((X *)c.kept_beta + row * c.heads + head, (const X *)c.beta + token * c.beta_stride + head, size.group * sizeof(X));
      memcpy((X *)c.kept_decay + row * decays_width + head * width, (const X *)c.decay + token * c.decay_stride + head * width,
             size.group * width * sizeof(X));
    }
  }

  void all() const {
    if (count == 1 && c.value_dim % LANES == 0) decode();
    else prompt();
    X *tail = (X *)c.tails + c.writes[sequence] * (c.taps - 1) * channels;
    for (int64_t w = 0; w < c.taps - 1; w++) {  // in this order the record may be the one that was read
      const X *row = row_of(firm - c.taps + 1 + w);
      stretches([&](int64_t channel, int64_t numbers, int64_t) { memmove(tail + w * channels + channel, row + channel, numbers * sizeof(X)); });
    }
    keep_guesses();
  }
};

template <class X> static void run(const DeltaCall &call, int64_t sequence, int64_t key_head, float *work) {
  uint32_t state = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(state | 0x8040);  // what has decayed to a denormal number is 0: arithmetic with those is a hundred times slower
  Run<X>(call, sequence, key_head, work).all();
  __builtin_ia32_ldmxcsr(state);
}

template <class X> struct Ops {
  static constexpr DeltaOps table = {run<X>, room};
};
