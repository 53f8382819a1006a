// Few tokens between ranks that map each other's memory: what ep/backends/shm.py does with staging buffers and signals, in a call for
// each of its stages. What lies in the buffers, and the words, are the same, so that a rank may do either.
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "native.h"
#include "rows.h"
#include "tape.h"

struct ExchangePeer {
  uint8_t *leaving, *going;             // buffers at the peer: this rank's tokens, and rows for the peer's tokens
  const uint8_t *arriving, *coming;     // buffers here: the peer's tokens, and rows for this rank's
  int64_t *dispatch_out, *combine_out;  // words at the peer
  int64_t *dispatch_in, *combine_in;    // words here
  int64_t *asleep;                      // whether the peer sleeps on one of its words
};

struct ExchangeLane {
  int64_t rank, size, slots, dim, x_type;
  const ExchangePeer *peers;  // [size], this rank's own unused
};

NATIVE_API void rows_weigh(int x_type, const int64_t *slot, const float *weight, int64_t slots_per_part, const void *const *part,
                           int64_t parts, void *y, int64_t rows, int64_t top_k, int64_t dim, int threads);

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

// x [rows, dim], slot [rows, k], weight [rows, k] to every peer.
NATIVE_API void exchange_put(const ExchangeLane *lane, const void *x, const void *slot, const void *weight, int64_t rows, int64_t k, int64_t number) {
  tape_refuse("exchange_put");
  for (int64_t peer = 0; peer < lane->size; peer++) {
    if (peer == lane->rank) continue;
    const ExchangePeer *at = lane->peers + peer;
    memcpy(at->leaving, x, rows * row_bytes(lane));
    memcpy(at->leaving + slots_at(lane, rows), slot, rows * k * 8);
    memcpy(at->leaving + weights_at(lane, rows, k), weight, rows * k * 4);
    announce(at->dispatch_out, at->asleep, number, rows);
  }
}

// Whether the words of all peers have reached `number`, looking for spin_ns at most and giving the core away in between:
// values[size]. The values beside them: values[peer].
NATIVE_API void exchange_await(const ExchangeLane *lane, int combine, int64_t number, int64_t spin_ns, int64_t *values) {
  tape_refuse("exchange_await");
  int64_t end = 0;
  values[lane->size] = 1;
  for (int64_t peer = 0; peer < lane->size; peer++) {
    if (peer == lane->rank) continue;
    const int64_t *word = combine ? lane->peers[peer].combine_in : lane->peers[peer].dispatch_in;
    int64_t signal;
    while ((uint32_t)((uint32_t)(signal = __atomic_load_n(word, __ATOMIC_ACQUIRE)) - (uint32_t)number) >> 31) {
      int64_t now = now_ns();
      if (end == 0) end = now + spin_ns;
      if (now > end) {
        values[lane->size] = 0;
        return;
      }
      sched_yield();
    }
    values[peer] = signal >> 32;
  }
}

// The tokens of all ranks, counts[peer] of each, one after another; rows[peer]: how many choices of them are of slots here.
NATIVE_API void exchange_join(const ExchangeLane *lane, const void *x, const int64_t *slot, const float *weight, int64_t k, const int64_t *counts, uint8_t *all_x,
                              int64_t *all_slot, float *all_weight, int64_t *rows) {
  tape_refuse("exchange_join");
  uint64_t first = lane->rank * lane->slots;
  for (int64_t peer = 0; peer < lane->size; peer++) {
    const uint8_t *from = lane->peers[peer].arriving;
    int64_t count = counts[peer], here = 0;
    bool own = peer == lane->rank;
    memcpy(all_x, own ? x : from, count * row_bytes(lane));
    memcpy(all_slot, own ? (const void *)slot : from + slots_at(lane, count), count * k * 8);
    memcpy(all_weight, own ? (const void *)weight : from + weights_at(lane, count, k), count * k * 4);
    for (int64_t i = 0; i < count * k; i++) here += (uint64_t)all_slot[i] - first < (uint64_t)lane->slots;
    rows[peer] = here;
    all_x += count * row_bytes(lane), all_slot += count * k, all_weight += count * k;
  }
}

// y: the rows of the choices that are here, of all ranks' tokens in order.
NATIVE_API void exchange_give_back(const ExchangeLane *lane, const uint8_t *y, const int64_t *rows, int64_t number) {
  tape_refuse("exchange_give_back");
  for (int64_t peer = 0; peer < lane->size; peer++) {
    const ExchangePeer *at = lane->peers + peer;
    if (peer != lane->rank) {
      memcpy(at->going, y, rows[peer] * row_bytes(lane));
      announce(at->combine_out, at->asleep, number, 0);
    }
    y += rows[peer] * row_bytes(lane);
  }
}

// out [tokens, dim]: the weighted sums of what has come back; own: the rows of this rank's choices that are here.
NATIVE_API void exchange_sum(const ExchangeLane *lane, const int64_t *slot, const float *weight, int64_t tokens, int64_t k, const void *own, void *out, int threads) {
  tape_refuse("exchange_sum");
  const void *parts[64];
  for (int64_t peer = 0; peer < lane->size; peer++) parts[peer] = peer == lane->rank ? own : lane->peers[peer].coming;
  rows_weigh((int)lane->x_type, slot, weight, lane->slots, parts, lane->size, out, tokens, k, lane->dim, threads);
}
