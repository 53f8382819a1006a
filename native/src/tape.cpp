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
thread_local TapeStop *playing = nullptr;

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

void tape_stop(const void *by, int64_t reason) {
  if (playing) playing->by = by, playing->reason = reason;
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

// It has come to this place of the step.
NATIVE_API void tape_mark(int64_t place) {
  tape_note(tape_mark, place);
  if (playing) playing->mark = place;
}

// From stop->at on. threads: as many as the kernels were recorded with.
NATIVE_API void tape_play(const Tape *tape, int threads, TapeStop *stop) {
  struct Job {
    const Tape *tape;
    TapeStop *stop;
  } job = {tape, stop};
  stop->by = nullptr;
  auto play = [](const void *given) {
    const Job *job = (const Job *)given;
    const Tape *tape = job->tape;
    TapeStop *stop = job->stop;
    playing = stop;
    int64_t at = stop->at;
    while (at < tape->used) {
      const Head *head = (const Head *)(tape->bytes + at);
      head->play(head + 1);
      if (stop->by) break;
      at += (int64_t)sizeof(Head) + head->bytes;
    }
    stop->at = stop->by ? at : -1;
    playing = nullptr;
  };
  team_together(threads, play, &job);
}
