"""Signs of life that cost nothing: a time in a mapped file. launch/monitor.py reads them.

`Heartbeat` is that of a rank that loads: a thread of its own writes it, and it stops when the process is dead, stopped,
or kept from running. `LoopBeat` is that of a rank that serves: its loop writes it (dbo/alive.py), and it stops when the
loop does.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from pathlib import Path

from dbo import alive
from engine.process.places import create

BEAT_SECONDS = 0.25
_BEAT = struct.Struct("=d")


def last_beat(path: Path) -> float | None:
    """When that heartbeat last wrote, by time.monotonic() of this machine. None: it has not, or is just writing."""
    try:
        payload = path.read_bytes()[: _BEAT.size]
    except OSError:
        return None
    return (_BEAT.unpack(payload)[0] or None) if len(payload) == _BEAT.size else None


def beat_once(path: Path) -> None:
    file = create(path)
    try:
        os.pwrite(file, _BEAT.pack(time.monotonic()), 0)
    finally:
        os.close(file)


class Heartbeat:
    """Writes time.monotonic() as one native float64 to the start of `path`, at once and then every 0.25 s until
    `close`."""

    def __init__(self, path: Path) -> None:
        file = create(path)
        try:
            self._map = mmap.mmap(file, _BEAT.size)
        finally:
            os.close(file)
        self._beat()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._map.close()

    def _run(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            self._beat()

    def _beat(self) -> None:
        _BEAT.pack_into(self._map, 0, time.monotonic())


class LoopBeat:
    """The same file, written at once and then by every `dbo.alive.mark` of this process, until `close`."""

    def __init__(self, path: Path) -> None:
        file = create(path)
        try:
            self._map = mmap.mmap(file, _BEAT.size)
        finally:
            os.close(file)
        _BEAT.pack_into(self._map, 0, time.monotonic())
        self._when = memoryview(self._map).cast("d")
        alive.show(self._when)

    def close(self) -> None:
        """The file stays as it is."""
        alive.show(None)
        self._when.release()
        self._map.close()
