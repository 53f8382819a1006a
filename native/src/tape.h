// Calls of kernels, written down while they run, to be played again in the same order with the same arguments. What arguments point
// to belongs to the caller, who keeps it in its place; structs are copied.
#pragma once
#include <new>
#include <tuple>
#include <utility>

#include "native.h"

struct Tape;

// What this thread records on; null: it does not record.
Tape *tape_of_thread(void);
// Room for the next call on it; play runs the call again.
void *tape_room(Tape *tape, void (*play)(const void *call), int64_t bytes);
// The recording cannot be played: this kernel ran meanwhile, whose arguments change from step to step.
void tape_refuse(const char *kernel);

// Where a tape that is played stops, and goes on.
struct TapeStop {
  int64_t at;      // where it begins; then the call that cannot go on, or -1: all have been made
  const void *by;  // what that call says of itself, and why
  int64_t reason;
  int64_t mark;    // the last one that it passed
};
// The call that is played cannot go on before something has happened: it is made again when the tape is. Nothing where none is played.
void tape_stop(const void *by, int64_t reason);

// How an argument is kept: as it is, or what it points to if that is a struct.
template <class A> struct TapeArgument {
  typedef A Kept;
  static Kept keep(A a) { return a; }
  static A give(const Kept &kept) { return kept; }
};
template <class S, bool is_struct> struct TapePointer {
  typedef const S *Kept;
  static Kept keep(const S *a) { return a; }
  static const S *give(const Kept &kept) { return kept; }
};
template <class S> struct TapePointer<S, true> {
  typedef S Kept;
  static Kept keep(const S *a) { return *a; }
  static const S *give(const Kept &kept) { return &kept; }
};
template <class S> struct TapeArgument<const S *> : TapePointer<S, __is_class(S)> {};

template <class... A> struct TapeCall {
  void (*kernel)(A...);
  std::tuple<typename TapeArgument<A>::Kept...> kept;
  template <size_t... I> void play_with(std::index_sequence<I...>) const { kernel(TapeArgument<A>::give(std::get<I>(kept))...); }
  static void play(const void *call) { ((const TapeCall *)call)->play_with(std::index_sequence_for<A...>()); }
};

// The first line of every kernel that can be recorded.
template <class... A, class... B> inline void tape_note(void (*kernel)(A...), B... arguments) {
  typedef TapeCall<A...> Call;
  if (Tape *tape = tape_of_thread()) new (tape_room(tape, Call::play, sizeof(Call))) Call{kernel, {TapeArgument<A>::keep(arguments)...}};
}
