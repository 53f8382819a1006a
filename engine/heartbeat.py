"""A sign of life that costs nothing: the time, written into a mapped file by a thread of its own.

It stops when the process is dead, stopped, or kept from running; launch/keeper.py reads it.
"""

from __future__ import annotations

import mmap
import struct
import threading
import time
from pathlib import Path

BEAT_SECONDS = 0.25


def last_beat(path: Path) -> float | None:
    """When that heartbeat last wrote, by time.monotonic() of this machine. None: it has not, or is just writing."""
    try:
        payload = path.read_bytes()
    except OSError:
        return None
    return float(struct.unpack("=d", payload)[0]) if len(payload) == 8 else None


class Heartbeat:
    """Writes time.monotonic() as one native float64 to the start of `path`, at once and then every 0.25 s until `close`."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(struct.pack("=d", time.monotonic()))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._map.close()

    def _run(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            struct.pack_into("=d", self._map, 0, time.monotonic())
