// Linear attention: sequences and key heads shared among threads, arithmetic by instruction set (delta.h).
#include "delta.h"

#include "scratch.h"
#include "tape.h"
#include "team.h"

// out = what the heads of all tokens give. At most 16 taps.
NATIVE_API void delta_run(const DeltaCall *call, int threads) {
  if (call->starts) tape_refuse("delta_run");
  else tape_note(delta_run, call, threads);
#if defined(__x86_64__)
  const DeltaOps *ops = (vector_isa() >= ISA_AVX512 ? delta_avx512 : delta_avx2)[call->x_type];
  int64_t items = call->num_sequences * call->key_heads, tokens = call->starts ? call->starts[call->num_sequences] : call->num_sequences;
  if (tokens * call->heads * call->key_dim * call->value_dim < 1 << 16) threads = 1;
  int64_t each = (ops->room(*call) * (int64_t)sizeof(float) + 63) / 64 * 64;
  uint8_t *work = scratch(threads * each);
  // Of prompts the last sequences have most tokens: they come first, so that all end at about the same time. Of decodes a thread has heads
  // that lie one behind the other.
  int64_t pieces = call->starts ? items : team_pieces(threads, items);
  team(threads, pieces, [&](int64_t piece, int worker) {
    for (int64_t i = items * piece / pieces; i < items * (piece + 1) / pieces; i++) {
      int64_t item = call->starts ? items - 1 - i : i;
      ops->run(*call, item / call->key_heads, item % call->key_heads, (float *)(work + worker * each));
    }
  });
#endif
}
