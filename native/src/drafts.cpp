// From a step that verifies drafts to the passes of the layer that drafts behind it, so that all of them are one tape.
#include "native.h"
#include "tape.h"

// What ctypes passes. A step of `sequences` runs of tokens, of which the first is known and the others are drafts.
struct FollowCall {
  int64_t sequences, passes, block_size;
  const int64_t *drawn, *given, *positions;  // of each token of the step: what was sampled after it, itself, and its place in its sequence
  const int64_t *starts, *rows;              // [sequences + 1] where runs begin; [sequences] their rows of the batch
  const int64_t *table;                      // blocks of each row of the batch [.., columns]
  int64_t columns, next_columns;
  int64_t *places;                                      // [sequences] the last token of each that counts: all drafts up to it were right
  int64_t *next_positions, *next_slots, *next_lens;     // [passes, sequences] of the tokens behind it
  int64_t *next_table;                                  // [sequences, next_columns] as far as the last pass reads
};

NATIVE_API void drafts_follow(const FollowCall *call) {
  tape_note(drafts_follow, call);
  const FollowCall &c = *call;
  for (int64_t s = 0; s < c.sequences; s++) {
    int64_t place = c.starts[s], last = c.starts[s + 1] - 1;
    while (place < last && c.drawn[place] == c.given[place + 1]) place++;
    c.places[s] = place;
    const int64_t *blocks = c.table + c.rows[s] * c.columns;
    for (int64_t pass = 0; pass < c.passes; pass++) {
      int64_t at = pass * c.sequences + s, position = c.positions[place] + 1 + pass;
      c.next_positions[at] = position, c.next_lens[at] = position + 1;
      c.next_slots[at] = blocks[position / c.block_size] * c.block_size + position % c.block_size;
    }
    int64_t used = c.passes ? (c.positions[place] + c.passes) / c.block_size + 1 : 0;
    for (int64_t n = 0; n < used; n++) c.next_table[s * c.next_columns + n] = blocks[n] > 0 ? blocks[n] : 0;
  }
}
