// Few tokens between ranks, in a call for each stage of an exchange. What changes from exchange to exchange is in ExchangeState, not in
// arguments, so that the calls can be recorded (tape.h).
//
// Ranks that map each other's memory do what ep/backends/shm.py does with staging buffers and signals. What lies in the buffers, and the
// words, are the same, so that a rank may do either. Ranks of several machines do what ep/backends/collective.py does over a network, by
// messages (links.h): a token goes to the ranks that have some of its experts, and each sends back one row for it, weighted and summed.
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "links.h"
#include "native.h"
#include "rows.h"
#include "scratch.h"
#include "tape.h"

enum { EXCHANGE_RANKS = 64 };

struct ExchangePeer {
  uint8_t *leaving, *going;             // buffers at the peer (with links here): this rank's tokens, and rows for the peer's tokens
  const uint8_t *arriving, *coming;     // buffers here: the peer's tokens, and rows for this rank's
  int64_t *dispatch_out, *combine_out;  // words at the peer
  int64_t *dispatch_in, *combine_in;    // words here
  int64_t *asleep;                      // whether the peer sleeps on one of its words
};

// Of the exchange under way.
struct ExchangeState {
  int64_t number;     // exchanges begun
  int64_t arrived;    // tokens of all ranks
  int64_t late;       // whether the last look at the words gave up
  int64_t counts[EXCHANGE_RANKS], rows[EXCHANGE_RANKS];  // of each rank: its tokens, and how many choices of them are of slots here
};

struct ExchangeLane {
  int64_t rank, size, slots, dim, x_type;
  int64_t most;     // tokens of a rank for which there is room
  int64_t spin_ns;  // for which words are looked at before that is the caller's business, where others want the core
  const ExchangePeer *peers;  // [size], this rank's own unused
  ExchangeState *state;
  uint8_t *all_x;     // tokens of all ranks, one after another [most * size, dim]
  int64_t *all_slot;  // and their choices [most * size, k]
  float *all_weight;
  Links *links;   // null: ranks map each other's memory
  int64_t box;    // of the peers' tokens; the next one is of their results
  uint8_t *own;   // with links: sums of this rank's tokens over the slots here [most, dim]
  int64_t base;   // the first slot of rank 0; what is not of a slot of these ranks counts nothing
  const int64_t *given;  // where it is said how many tokens this rank brings; null: the calls say it
};

// Why a recorded exchange stops: it waits for the others' tokens, or for their results; one of them has sent too many tokens.
enum { LATE_DISPATCH = 0, LATE_COMBINE = 1, TOO_MANY = 2 };
enum { SLEEP_NS = 20000000 };  // with links: of a wait, before it is the caller's business
// Without: how long one waits at most on a core that no other thread wants, and how long it takes to give it away if one does.
enum { ALONE_NS = 2000000, SHARED_NS = 10000 };

static int64_t row_bytes(const ExchangeLane *lane) { return lane->dim * (lane->x_type == ROWS_F32 ? 4 : 2); }

// The sections of a buffer with tokens: rows, then slots (aligned), then weights.
static int64_t slots_at(const ExchangeLane *lane, int64_t rows) { return (rows * row_bytes(lane) + 7) / 8 * 8; }
static int64_t weights_at(const ExchangeLane *lane, int64_t rows, int64_t k) { return slots_at(lane, rows) + rows * k * 8; }

static void announce(int64_t *word, const int64_t *asleep, int64_t number, int64_t value) {
  __atomic_store_n(word, value << 32 | (number & 0xFFFFFFFF), __ATOMIC_RELEASE);
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  if (__atomic_load_n(asleep, __ATOMIC_RELAXED)) syscall(SYS_futex, word, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
}

static int64_t now_ns(void) {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static bool goes(const ExchangeLane *lane, int64_t peer, const int64_t *slot, int64_t k) {
  uint64_t first = lane->base + peer * lane->slots;
  for (int64_t i = 0; i < k; i++)
    if ((uint64_t)slot[i] - first < (uint64_t)lane->slots) return true;
  return false;
}

static void send_tokens(const ExchangeLane *lane, int64_t peer, const uint8_t *x, const int64_t *slot, const float *weight, int64_t rows, int64_t k) {
  const ExchangePeer *at = lane->peers + peer;
  int64_t count = 0, bytes = row_bytes(lane);
  for (int64_t t = 0; t < rows; t++) count += goes(lane, peer, slot + t * k, k);
  uint8_t *to_x = at->leaving, *to_slot = to_x + slots_at(lane, count), *to_weight = to_x + weights_at(lane, count, k);
  for (int64_t t = 0; t < rows; t++) {
    if (!goes(lane, peer, slot + t * k, k)) continue;
    memcpy(to_x, x + t * bytes, bytes), to_x += bytes;
    memcpy(to_slot, slot + t * k, k * 8), to_slot += k * 8;
    memcpy(to_weight, weight + t * k, k * 4), to_weight += k * 4;
  }
  int64_t number = lane->state->number;
  links_send(lane->links, peer, lane->box, at->leaving, to_weight - at->leaving, count << 32 | (number & 0xFFFFFFFF));
}

// The next exchange begins: x [rows, dim], slot [rows, k], weight [rows, k] to every peer.
NATIVE_API void exchange_put(const ExchangeLane *lane, const void *x, const void *slot, const void *weight, int64_t rows, int64_t k) {
  tape_note(exchange_put, lane, x, slot, weight, rows, k);
  int64_t number = ++lane->state->number;
  if (lane->given) rows = *lane->given;
  lane->state->counts[lane->rank] = rows;
  for (int64_t peer = 0; peer < lane->size; peer++) {
    if (peer == lane->rank) continue;
    const ExchangePeer *at = lane->peers + peer;
    if (lane->links) {
      send_tokens(lane, peer, (const uint8_t *)x, (const int64_t *)slot, (const float *)weight, rows, k);
      continue;
    }
    memcpy(at->leaving, x, rows * row_bytes(lane));
    memcpy(at->leaving + slots_at(lane, rows), slot, rows * k * 8);
    memcpy(at->leaving + weights_at(lane, rows, k), weight, rows * k * 4);
    announce(at->dispatch_out, at->asleep, number, rows);
  }
}

// Whether a word has not reached the exchange under way.
static bool behind(int64_t signal, const ExchangeState *state) {
  return (uint32_t)((uint32_t)signal - (uint32_t)state->number) >> 31;
}

// As below, receiving and sending meanwhile; no wait for anything else begins before what has been sent is on its way. A broken connection
// is the caller's business too.
static void await_links(const ExchangeLane *lane, int combine) {
  ExchangeState *state = lane->state;
  int64_t began = 0, waited = 0;
  for (;;) {
    bool done = links_go_on(lane->links);
    for (int64_t peer = 0; peer < lane->size; peer++) {
      if (peer == lane->rank) continue;
      int64_t signal = *(combine ? lane->peers[peer].combine_in : lane->peers[peer].dispatch_in);
      if (behind(signal, state)) done = false;
      else if (!combine) state->counts[peer] = signal >> 32;
    }
    int64_t now = now_ns();
    if (!began) began = now;
    waited = now - began;
    if (done) break;
    if (waited > SLEEP_NS || links_lost(lane->links) >= 0) {
      state->late = 1;
      tape_stop(state, combine ? LATE_COMBINE : LATE_DISPATCH);
      break;
    }
    if (waited < lane->spin_ns) sched_yield();
    else links_sleep(lane->links, SLEEP_NS);
  }
  links_waited(lane->links, waited);
}

// Looks at the words of all peers until they have reached this exchange, giving the core away in between; after a while without success
// that is `late`, and a tape that is played stops. Then the caller waits, and calls it again. Who has a core to itself looks for longer: to
// be woken takes about as long as the experts of a layer do.
NATIVE_API void exchange_await(const ExchangeLane *lane, int combine) {
  tape_note(exchange_await, lane, combine);
  ExchangeState *state = lane->state;
  int64_t began = 0, last = 0, most = ALONE_NS;
  state->late = 0;
  if (lane->links) return await_links(lane, combine);
  for (int64_t peer = 0; peer < lane->size; peer++) {
    if (peer == lane->rank) continue;
    const int64_t *word = combine ? lane->peers[peer].combine_in : lane->peers[peer].dispatch_in;
    int64_t signal;
    while (behind(signal = __atomic_load_n(word, __ATOMIC_ACQUIRE), state)) {
      int64_t now = now_ns();
      if (!began) began = last = now;
      if (now - last > SHARED_NS) most = lane->spin_ns;
      last = now;
      if (now - began > most) {
        state->late = 1;
        tape_stop(state, combine ? LATE_COMBINE : LATE_DISPATCH);
        return;
      }
      sched_yield();
    }
    if (!combine) state->counts[peer] = signal >> 32;
  }
}

// The tokens of all ranks, one after another, and their choices; state: how many, and how many choices of each rank's are of slots here.
NATIVE_API void exchange_join(const ExchangeLane *lane, const void *x, const int64_t *slot, const float *weight, int64_t k) {
  tape_note(exchange_join, lane, x, slot, weight, k);
  ExchangeState *state = lane->state;
  uint64_t first = lane->base + lane->rank * lane->slots;
  int64_t arrived = 0;
  for (int64_t peer = 0; peer < lane->size; peer++)
    if (state->counts[peer] > lane->most) return tape_stop(state, TOO_MANY);
  for (int64_t peer = 0; peer < lane->size; peer++) {
    const uint8_t *from = lane->peers[peer].arriving;
    int64_t count = state->counts[peer], here = 0;
    bool own = peer == lane->rank;
    int64_t *all_slot = lane->all_slot + arrived * k;
    memcpy(lane->all_x + arrived * row_bytes(lane), own ? x : from, count * row_bytes(lane));
    memcpy(all_slot, own ? (const void *)slot : from + slots_at(lane, count), count * k * 8);
    memcpy(lane->all_weight + arrived * k, own ? (const void *)weight : from + weights_at(lane, count, k), count * k * 4);
    for (int64_t i = 0; i < count * k; i++) here += (uint64_t)all_slot[i] - first < (uint64_t)lane->slots;
    state->rows[peer] = here;
    arrived += count;
  }
  state->arrived = arrived;
}

// Sums of the tokens of all ranks over the choices that are here, to each rank those of its tokens. y: as below.
static void send_sums(const ExchangeLane *lane, const uint8_t *y, int64_t k, int threads) {
  const ExchangeState *state = lane->state;
  const int64_t all = state->arrived, bytes = row_bytes(lane);
  const uint64_t first_slot = lane->base + lane->rank * lane->slots;
  const void **row = (const void **)scratch(all * k * (sizeof(void *) + sizeof(float)) + (all + 1) * sizeof(int64_t));
  int64_t *first = (int64_t *)(row + all * k);
  float *weight = (float *)(first + all + 1);
  int64_t here = 0;
  for (int64_t t = 0; t < all; t++) {
    first[t] = here;
    for (int64_t i = t * k; i < (t + 1) * k; i++)
      if ((uint64_t)lane->all_slot[i] - first_slot < (uint64_t)lane->slots)
        weight[here] = lane->all_weight[i], row[here] = y + here * bytes, here++;
  }
  first[all] = here;
  int64_t own = 0, at = 0;
  for (int64_t peer = 0; peer < lane->size; peer++) {
    int64_t count = state->counts[peer];
    if (peer == lane->rank) own = at;
    else {
      uint8_t *to = lane->peers[peer].going;
      weigh_bags((int)lane->x_type, row, weight, first + at, to, count, lane->dim, threads);
      links_send(lane->links, peer, lane->box + 1, to, count * bytes, state->number & 0xFFFFFFFF);
    }
    at += count;
  }
  weigh_bags((int)lane->x_type, row, weight, first + own, lane->own, state->counts[lane->rank], lane->dim, threads);
}

// Sums that another exchange has made: y [arrived, dim].
static void pass_sums(const ExchangeLane *lane, const uint8_t *y) {
  const ExchangeState *state = lane->state;
  for (int64_t peer = 0; peer < lane->size; peer++) {
    int64_t count = state->counts[peer], bytes = count * row_bytes(lane);
    bool own = peer == lane->rank;
    uint8_t *to = own ? lane->own : lane->peers[peer].going;
    memcpy(to, y, bytes);
    if (!own) links_send(lane->links, peer, lane->box + 1, to, bytes, state->number & 0xFFFFFFFF);
    y += bytes;
  }
}

// y: the rows of the choices that are here, of all ranks' tokens in order; each token has k choices. k 0, with links: a row per token.
NATIVE_API void exchange_give_back(const ExchangeLane *lane, const uint8_t *y, int64_t k, int threads) {
  tape_note(exchange_give_back, lane, y, k, threads);
  const ExchangeState *state = lane->state;
  if (lane->links) return k ? send_sums(lane, y, k, threads) : pass_sums(lane, y);
  for (int64_t peer = 0; peer < lane->size; peer++) {
    const ExchangePeer *at = lane->peers + peer;
    if (peer != lane->rank) {
      memcpy(at->going, y, state->rows[peer] * row_bytes(lane));
      announce(at->combine_out, at->asleep, state->number, 0);
    }
    y += state->rows[peer] * row_bytes(lane);
  }
}

// The ranks' rows of each token, in the order of ranks.
static void add_sums(const ExchangeLane *lane, const int64_t *slot, int64_t tokens, int64_t k, void *out, int threads) {
  const int64_t most = tokens * lane->size, bytes = row_bytes(lane);
  const void **row = (const void **)scratch(most * (sizeof(void *) + sizeof(float)) + (tokens + 1) * sizeof(int64_t));
  int64_t *first = (int64_t *)(row + most);
  float *ones = (float *)(first + tokens + 1);
  const uint8_t *next[EXCHANGE_RANKS];
  for (int64_t peer = 0; peer < lane->size; peer++) next[peer] = peer == lane->rank ? lane->own : lane->peers[peer].coming;
  int64_t rows = 0;
  for (int64_t t = 0; t < tokens; t++) {
    first[t] = rows;
    for (int64_t peer = 0; peer < lane->size; peer++) {
      bool own = peer == lane->rank, here = goes(lane, peer, slot + t * k, k);
      if (here) ones[rows] = 1, row[rows++] = next[peer];
      if (here || own) next[peer] += bytes;
    }
  }
  first[tokens] = rows;
  weigh_bags((int)lane->x_type, row, ones, first, out, tokens, lane->dim, threads);
}

// out [tokens, dim]: the weighted sums of what has come back; y: as above, with the rows of this rank's choices that are here.
NATIVE_API void exchange_sum(const ExchangeLane *lane, const int64_t *slot, const float *weight, int64_t tokens, int64_t k, const uint8_t *y, void *out,
                             int threads) {
  tape_note(exchange_sum, lane, slot, weight, tokens, k, y, out, threads);
  if (lane->given) tokens = *lane->given;
  if (lane->links) return add_sums(lane, slot, tokens, k, out, threads);
  const int64_t bytes = row_bytes(lane);
  const uint8_t *next[EXCHANGE_RANKS];
  for (int64_t peer = 0; peer < lane->rank; peer++) y += lane->state->rows[peer] * bytes;
  for (int64_t peer = 0; peer < lane->size; peer++) next[peer] = peer == lane->rank ? y : lane->peers[peer].coming;
  const void **row = (const void **)scratch(tokens * k * (sizeof(void *) + sizeof(float)) + (tokens + 1) * sizeof(int64_t));
  int64_t *first = (int64_t *)(row + tokens * k);
  float *shares = (float *)(first + tokens + 1);
  int64_t rows = 0;
  for (int64_t t = 0; t < tokens; t++) {
    first[t] = rows;
    for (int64_t i = t * k; i < (t + 1) * k; i++) {
      uint64_t at = slot[i] - lane->base;
      if (at >= (uint64_t)(lane->size * lane->slots)) continue;
      const uint8_t *&from = next[at / lane->slots];
      row[rows] = from, shares[rows++] = weight[i], from += bytes;
    }
  }
  first[tokens] = rows;
  weigh_bags((int)lane->x_type, row, shares, first, out, tokens, lane->dim, threads);
}

// What ctypes passes to exchange_slots: where the replicas of each expert are (ep/place.py).
struct SlotCall {
  int64_t buckets;  // into which hashes of 16 bits are cut
  const int64_t *cuts, *slots;  // [experts, buckets], [experts, buckets, 2]
  int64_t *cursor;  // the place in the stream of tokens; goes on
};

// slot [rows, k]: of each expert the replica that has the hash of its token's place in the stream.
NATIVE_API void exchange_slots(const SlotCall *call, const int64_t *expert, int64_t *slot, int64_t rows, int64_t k) {
  tape_note(exchange_slots, call, expert, slot, rows, k);
  enum { HASHES = 1 << 16, GOLDEN = 40503 };
  const int64_t width = HASHES / call->buckets, cursor = *call->cursor;
  for (int64_t t = 0; t < rows; t++) {
    int64_t hash = (cursor + t) % HASHES * GOLDEN % HASHES;
    for (int64_t i = t * k; i < (t + 1) * k; i++) {
      int64_t place = expert[i] * call->buckets + hash / width;
      slot[i] = call->slots[2 * place + (hash % width >= call->cuts[place])];
    }
  }
  *call->cursor = (cursor + rows) % HASHES;
}
