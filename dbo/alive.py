"""The sign of life of a process that runs steps: when it last got on. engine/process/heartbeat.py shows it to other
processes.

A mark is made by the loop of a rank, by each layer of a step that is computed as it is written, and by a thread that
waits for other ranks, as long as that wait turns. A loop that hangs makes none.
"""

from __future__ import annotations

from time import monotonic

_when: memoryview[float] = memoryview(bytearray(8)).cast("d")


def mark() -> None:
    """It gets on. Any thread may say so; a tenth of a microsecond."""
    _when[0] = monotonic()


def show(when: memoryview[float] | None) -> None:
    """when: one float64 that marks are written to from now on, as seconds of time.monotonic(). None: no process
    looks."""
    global _when
    _when = memoryview(bytearray(8)).cast("d") if when is None else when
    mark()
