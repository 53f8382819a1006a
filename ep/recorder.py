"""What one rank did when: a bounded record of slices of time. Standard library only, because the front reads it too.

Everything is laid out beforehand, so that recording a slice costs about a microsecond and can never take more memory
than was given. Times are nanoseconds of time.perf_counter_ns(), which all processes of one machine share on Linux.
"""

from __future__ import annotations

import enum
import itertools
import struct
from collections.abc import Iterator
from time import perf_counter_ns
from typing import NamedTuple


class Kind(enum.IntEnum):
    """Of a lane: what a layer's exchange is made of, and ATTENTION, all that is computed between a combine and the next
    dispatch. Of the rank: SCHEDULING, AGREEMENT, MEETING (the others, at the beginning of an epoch) and IDLE of the
    thread that schedules; the others of the one that computes."""

    ATTENTION = 0
    DISPATCH = 1
    WAIT_DISPATCH = 2
    EXPERTS = 3
    COMBINE = 4
    WAIT_COMBINE = 5
    SCHEDULING = 6
    AGREEMENT = 7
    PREPARING = 8
    FORWARD = 9
    BALANCING = 10
    SAMPLING = 11
    DRAFTING = 12
    MEETING = 13
    IDLE = 14


class Event(NamedTuple):
    """A slice of time. step: the schedule's number; of an AGREEMENT the agreed one, equal on all ranks. amount: tokens,
    rows that arrived for EXPERTS, the epoch for AGREEMENT. layer, lane: 0 where they mean nothing."""

    start: int
    end: int
    step: int
    amount: int
    layer: int
    kind: Kind
    lane: int


_EVENT = struct.Struct("<qqqihBB")
EVENT_BYTES = _EVENT.size


class Recorder:
    """At most `capacity` events; what comes later is only counted. Any thread may record.

    step, resumed: of the thread that computes: the number of its step, and since when it does what is not recorded yet.
    """

    __slots__ = ("_bytes", "_capacity", "_next", "resumed", "step")

    def __init__(self, capacity: int) -> None:
        assert capacity > 0
        self.step = 0
        self.resumed = perf_counter_ns()
        self._bytes = bytearray(capacity * EVENT_BYTES)
        self._capacity = capacity
        self._next = itertools.count()  # its next() is one operation, which threads cannot divide

    def add(self, kind: Kind, start: int, end: int, step: int, amount: int = 0, layer: int = 0, lane: int = 0) -> None:
        place = next(self._next)
        if place < self._capacity:
            _EVENT.pack_into(self._bytes, place * EVENT_BYTES, start, end, step, amount, layer, kind, lane)

    def finish(self) -> tuple[bytes, int]:
        """Everything recorded, and how many events found no place. Nothing is recorded any more."""
        total = next(self._next)
        self._capacity, capacity = 0, self._capacity
        return bytes(memoryview(self._bytes)[: min(total, capacity) * EVENT_BYTES]), max(0, total - capacity)


def events_of(recorded: bytes) -> Iterator[Event]:
    """What `Recorder.finish` gave. ValueError when it is cut off or no record."""
    if len(recorded) % EVENT_BYTES:
        raise ValueError(f"a record of {len(recorded)} bytes is cut off: an event has {EVENT_BYTES}")
    for start, end, step, amount, layer, kind, lane in _EVENT.iter_unpack(recorded):
        yield Event(start, end, step, amount, layer, Kind(kind), lane)
