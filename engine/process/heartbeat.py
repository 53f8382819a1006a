"""Signs of life that cost nothing, in mapped files: when a process last got on, and of a rank where it is and whom it
waits for (dbo/alive.py). launch/monitor.py and launch/waits.py read them.

`Heartbeat` is that of a rank that loads: a thread of its own writes it, and it stops when the process is dead, stopped,
or kept from running. `LoopBeat` is that of a rank that serves, and of the front: its loop writes it, and it stops when
the loop does.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from pathlib import Path
from typing import NamedTuple

from dbo import alive
from engine.process.places import create
from ep.recorder import Kind

BEAT_SECONDS = 0.25
_BEAT = struct.Struct("=d")
_SIGN = struct.Struct("=d2q" + 2 * "qdq")
_RESTS = (Kind.MEETING, Kind.IDLE)
_LAYERS = (Kind.ATTENTION, Kind.DISPATCH, Kind.EXPERTS, Kind.COMBINE)


class Track(NamedTuple):
    """What one thread of a rank does. step: of the epoch. since: when its wait began, by time.monotonic() of the
    reader; 0.0: it does not wait, as far as is known. ranks: for whom, by their own numbers; (): not known."""

    step: int
    layer: int
    kind: Kind
    since: float
    ranks: tuple[int, ...]

    @property
    def order(self) -> tuple[int, int, int, int]:
        """Of two ranks in one epoch the one that is further has the higher one."""
        if self.kind in _LAYERS:
            return self.step, 1, self.layer, self.kind
        return self.step, 2 * (self.kind > Kind.PREPARING), 0, self.kind

    @property
    def text(self) -> str:
        """Where that is, in words."""
        if self.kind is Kind.MEETING:
            return "meeting"
        layer = f"layer {self.layer} " if self.kind in _LAYERS else ""
        return f"step {self.step}, {layer}{self.kind.name.lower()}"


class Sign(NamedTuple):
    """live: the ranks of its epoch. tracks: of the thread that schedules and of the one that computes."""

    when: float
    epoch: int
    live: tuple[int, ...]
    agreeing: Track
    computing: Track


def last_beat(path: Path) -> float | None:
    """When that heartbeat last wrote, by time.monotonic() of this machine. None: it has not, or is just writing."""
    return _beat_of(sign_bytes(path))


def idle_beat(path: Path) -> float | None:
    """The same of a rank that computes nothing. None also: it computes."""
    payload = sign_bytes(path)
    sign = read_sign(payload)
    return None if sign is not None and sign.agreeing.kind not in _RESTS else _beat_of(payload)


def _beat_of(payload: bytes) -> float | None:
    payload = payload[: _BEAT.size]
    return (_BEAT.unpack(payload)[0] or None) if len(payload) == _BEAT.size else None


def sign_bytes(path: Path) -> bytes:
    """The sign as it is written; b"": there is none."""
    try:
        return path.read_bytes()[: alive.BYTES]
    except OSError:
        return b""


def read_sign(payload: bytes, ahead: float = 0.0) -> Sign | None:
    """What a process of this machine has written, or of one whose time.monotonic() is so many seconds ahead. None: it
    is no rank that has begun to meet others."""
    if len(payload) < _SIGN.size:
        return None
    when, epoch, mask, place, since, ranks, place_2, since_2, ranks_2 = _SIGN.unpack(payload[: _SIGN.size])
    if not when or not mask:
        return None
    live = _bits(mask)
    agreeing, computing = _track(place, since, ranks, live, ahead), _track(place_2, since_2, ranks_2, live, ahead)
    return Sign(when - ahead, epoch, live, agreeing, computing)


def _track(place: int, since: float, ranks: int, live: tuple[int, ...], ahead: float) -> Track:
    below = place & (1 << alive.STEP_BITS) - 1
    layer, kind = divmod(below, 1 << alive.LAYER_BITS)
    names = tuple(live[index] for index in _bits(ranks) if index < len(live))
    return Track((place >> alive.STEP_BITS) - 1, layer, Kind(kind), since - ahead if since else 0.0, names)


def _bits(mask: int) -> tuple[int, ...]:
    return tuple(bit for bit in range(mask.bit_length()) if mask >> bit & 1)


def beat_once(path: Path) -> None:
    file = create(path)
    try:
        os.pwrite(file, _BEAT.pack(time.monotonic()), 0)
    finally:
        os.close(file)


class Heartbeat:
    """Writes time.monotonic() as one native float64 to the start of `path`, at once and then every 0.25 s until
    `close`; and shows there whom the process waits for meanwhile."""

    def __init__(self, path: Path) -> None:
        self._sign = _Shown(path)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._sign.close()

    def _run(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            self._sign.beat()


class LoopBeat:
    """The same file, written at once and then by every `dbo.alive.mark` of this process, until `close`."""

    def __init__(self, path: Path) -> None:
        self._sign = _Shown(path)

    def mark(self) -> None:
        """It gets on."""
        alive.mark()

    def close(self) -> None:
        """The file stays as it is."""
        self._sign.close()


class _Shown:
    """The sign of this process (dbo/alive.py) in a file, from now on."""

    def __init__(self, path: Path) -> None:
        file = create(path)
        try:
            self._map = mmap.mmap(file, alive.BYTES)
        finally:
            os.close(file)
        self._view = memoryview(self._map)
        alive.show(self._view)

    def beat(self) -> None:
        _BEAT.pack_into(self._map, 0, time.monotonic())

    def close(self) -> None:
        alive.hide(self._view)
