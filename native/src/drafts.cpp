// Steps that verify drafts: how they are laid out, and what leads from them to the passes of the layer that drafts behind them, so that
// all of them are one tape.
#include "native.h"
#include "tape.h"

// What is known of each row of the batch: its tokens [.., stride], how many of them are valid, and its blocks.
struct BatchRows {
  int32_t *token_ids;
  int64_t token_stride;
  int64_t *known;
  const int64_t *num_blocks;
  int64_t most_tokens;  // of a sequence
};

// What ctypes passes. A step of `sequences` runs of tokens, of which the first is known and the others are drafts.
struct LayOutCall {
  const BatchRows *batch;
  int64_t sequences, groups, block_size, columns, next_columns;
  const int64_t *rows, *starts, *counts, *drafts;  // of each sequence; drafts: of all, one after another
  const int64_t *const *tables;                    // of each token group: blocks of each row of the batch [.., columns]
  int64_t *const *next_tables;                     // of each token group: blocks of each token [.., next_columns], of which `used` count
  int64_t *fields, field_stride;                   // of each token: itself, its place in its sequence, then its slot of each group
  int64_t *lens;                                   // of each token: tokens that it sees
  int64_t *row_of, *behind, *first;                // of each token: its row, the place behind it; where each sequence begins, and the end
  int64_t used, room;                              // worked out; -1: a token is not known; room: places behind its tokens that each sequence has at least
};

NATIVE_API void drafts_lay_out(LayOutCall *call) {
  tape_refuse("drafts_lay_out");
  LayOutCall &c = *call;
  const BatchRows &batch = *c.batch;
  int64_t t = 0, longest = 0;
  const int64_t *draft = c.drafts;
  c.room = INT64_MAX;
  for (int64_t s = 0; s < c.sequences; s++) {
    const int64_t row = c.rows[s], start = c.starts[s], end = start + c.counts[s];
    int32_t *tokens = batch.token_ids + row * batch.token_stride;
    c.first[s] = t;
    if (start >= batch.known[row]) {
      c.used = -1;
      return;
    }
    for (int64_t place = start; place < end; place++, t++) {
      if (place > start) tokens[place] = (int32_t)*draft++;
      c.fields[t] = tokens[place], c.fields[c.field_stride + t] = place;
      for (int64_t g = 0; g < c.groups; g++)
        c.fields[(2 + g) * c.field_stride + t] = c.tables[g][row * c.columns + place / c.block_size] * c.block_size + place % c.block_size;
      c.lens[t] = c.behind[t] = place + 1, c.row_of[t] = row;
    }
    int64_t most = batch.num_blocks[row] * c.block_size;
    if (most > batch.most_tokens) most = batch.most_tokens;
    if (most - end < c.room) c.room = most - end;
    if (end > longest) longest = end;
  }
  c.first[c.sequences] = t;
  c.used = (longest + c.block_size - 1) / c.block_size;
  for (int64_t g = 0; g < c.groups; g++)
    for (int64_t i = 0; i < t; i++)
      for (int64_t n = 0; n < c.used; n++) {
        int64_t block = c.tables[g][c.row_of[i] * c.columns + n];
        c.next_tables[g][i * c.next_columns + n] = block > 0 ? block : 0;  // what is behind a window is not there
      }
}

// What ctypes passes. A step of `sequences` runs of tokens, of which the first is known and the others are drafts.
struct FollowCall {
  const BatchRows *batch;  // or null: it is told elsewhere what was sampled
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
    if (c.batch) {
      int32_t *tokens = c.batch->token_ids + c.rows[s] * c.batch->token_stride;
      for (int64_t t = c.starts[s]; t <= place; t++) tokens[c.positions[t] + 1] = (int32_t)c.drawn[t];
      c.batch->known[c.rows[s]] = c.positions[place] + 2;
    }
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
