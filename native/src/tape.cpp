// Tapes: one block of memory each, calls one after another.
#include "tape.h"

#include "team.h"

#include <stdlib.h>
#include <string.h>

enum { ALIGNED = 16, FIRST_ROOM = 4096 };

struct Tape {
  uint8_t *bytes;
  int64_t used, room;
  const char *refused;  // the kernel that cannot be recorded, or null
};

namespace {

struct Head {
  void (*play)(const void *call);
  int64_t bytes;  // of the call, up to the next head
};
static_assert(sizeof(Head) % ALIGNED == 0, "calls follow heads");

thread_local Tape *recording = nullptr;

}  // namespace

Tape *tape_of_thread(void) { return recording; }

void *tape_room(Tape *tape, void (*play)(const void *call), int64_t bytes) {
  bytes = (bytes + ALIGNED - 1) / ALIGNED * ALIGNED;
  int64_t after = tape->used + (int64_t)sizeof(Head) + bytes;
  if (after > tape->room) {
    int64_t room = tape->room ? tape->room : FIRST_ROOM;
    while (room < after) room *= 2;
    uint8_t *moved = (uint8_t *)realloc(tape->bytes, room);
    if (!moved) abort();
    tape->bytes = moved, tape->room = room;
  }
  Head *head = (Head *)(tape->bytes + tape->used);
  *head = {play, bytes};
  tape->used = after;
  return head + 1;
}

void tape_refuse(const char *kernel) {
  if (recording) recording->refused = kernel;
}

NATIVE_API void tape_new(Tape **tape) { *tape = (Tape *)calloc(1, sizeof(Tape)); }

NATIVE_API void tape_free(Tape *tape) {
  if (!tape) return;
  free(tape->bytes);
  free(tape);
}

// From now on the calls of this thread are written down, until tape_end.
NATIVE_API void tape_begin(Tape *tape) { recording = tape; }

// refused: the kernel for which the tape cannot be played, or null.
NATIVE_API void tape_end(Tape *tape, const char **refused) {
  recording = nullptr;
  *refused = tape->refused;
}

// threads: as many as the kernels were recorded with.
NATIVE_API void tape_play(const Tape *tape, int threads) {
  auto play = [](const void *job) {
    const Tape *tape = (const Tape *)job;
    for (int64_t at = 0; at < tape->used;) {
      const Head *head = (const Head *)(tape->bytes + at);
      head->play(head + 1);
      at += (int64_t)sizeof(Head) + head->bytes;
    }
  };
  team_together(threads, play, tape);
}
