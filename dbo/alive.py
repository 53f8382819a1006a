"""The sign of life of a process that runs steps: when it last got on, where it is, and whom it waits for.
engine/process/heartbeat.py shows it to other processes, and reads it there.

A mark is made by the loop of a rank, by each layer of a step that runs eager, and by a thread that waits for other
ranks, as long as that wait turns. A loop that hangs makes none.

The sign is WORDS words of 8 bytes, each with one writer at a time: when the last mark was made, the epoch and its
ranks, and two tracks, because two threads may wait at once: AGREEING of the one that schedules, COMPUTING of the one
that computes. A track is where it is (step + 1, layer and kind: a number of ep.recorder.Kind), since when it waits (0:
it does not), and for whom. Nothing is written of a wait before its thread has gone to sleep for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import monotonic

WORDS = 9
BYTES = 8 * WORDS
WHEN, EPOCH, LIVE = 0, 1, 2
AGREEING, COMPUTING = 3, 6  # the first words of the tracks
AGREEMENT = "agreement"  # the name of the group of ranks whose waits are on the first track
PLACE, SINCE, RANKS = 0, 1, 2  # words of a track; the second is a float64, as the first of all is
STEP_BITS, LAYER_BITS = 24, 8  # below the step, and below the layer

_STEP = -1 << STEP_BITS
_shown = memoryview(bytearray(BYTES))
_words: memoryview[int] = _shown.cast("q")
_times: memoryview[float] = _shown.cast("d")


def mark() -> None:
    """It gets on. Any thread may say so; a tenth of a microsecond."""
    _times[WHEN] = monotonic()


def meets(epoch: int, live: Iterable[int], kind: int) -> None:
    """An epoch begins with the ranks `live`, by their own numbers; a wait tells its ranks by their place among
    them."""
    _words[EPOCH] = epoch
    _words[LIVE] = mask(live)
    for track in (AGREEING, COMPUTING):
        place(track, -1, kind)


def place(track: int, step: int, kind: int) -> None:
    """It is there now. step: of the epoch, equal on all ranks."""
    _words[track] = step + 1 << STEP_BITS | kind


def at(kind: int, layer: int) -> None:
    """The step that is computed has come there."""
    _words[COMPUTING] = _words[COMPUTING] & _STEP | layer << LAYER_BITS | kind


def waits(track: int, since: float, ranks: int) -> None:
    """It has slept in a wait. since: when that began, by time.monotonic(). ranks: a bit for each that is missing, by
    their place in the epoch; 0: that is not known."""
    _words[track + RANKS] = ranks
    _times[track + SINCE] = since


def goes_on(track: int) -> None:
    """That wait is over."""
    _times[track + SINCE] = 0.0


def mask(ranks: Iterable[int]) -> int:
    """A bit for each."""
    return sum(1 << rank for rank in ranks)


def show(sign: memoryview) -> None:
    """All is written to its first BYTES bytes from now on, also what has been said of the epoch."""
    global _shown, _words, _times
    words = sign[:BYTES].cast("q")
    words[EPOCH:] = _words[EPOCH:]
    _shown, _words, _times = sign, words, sign[:BYTES].cast("d")
    mark()


def hide(sign: memoryview) -> None:
    """No process looks at it any more."""
    if sign is _shown:
        show(memoryview(bytearray(BYTES)))
