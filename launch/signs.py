"""Is a process at work whose loop has made no mark for a while (dbo/alive.py)? The kernel knows.

One long operation (a large matrix product, experts read from a slow disk, a compiler that was called, a library that
keeps the interpreter to itself while it polls) takes processor time or waits for a disk. A loop that hangs in a sleep
or a lock, or a thread that was stopped, does not. Linux only; elsewhere nothing is known.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

WORK_SHARE = 0.1  # of a core: what a process at work takes at least, unless it has to wait for one, or for a disk ...
BUSY_SHARE = 0.25  # ... and then its main thread is found so in this part of the looks
STARVED_SHARE = 0.02  # of a core, that it gets even so; a loop that naps and looks again and again takes less
WINDOW_SECONDS = 1.0  # over which all of them are counted

_TICK = os.sysconf("SC_CLK_TCK")


class Signs(NamedTuple):
    seconds: float  # processor time of the process and of its children that live, so far
    runs: bool  # its main thread does, or wants to
    reads: bool = False  # its main thread waits for a disk


Look = Callable[[int], Signs | None]  # at a process, by its id; None: nothing can be seen


def signs_of(process: int) -> Signs | None:
    fields = _fields(process)
    if fields is None:
        return None
    seconds = _seconds(fields) + sum(_seconds(_fields(child)) for child in _children(process))
    return Signs(seconds, fields[0] == "R", fields[0] == "D")


def state_of(process: int) -> str:
    """The state letter of its main thread; "": nothing can be seen."""
    fields = _fields(process)
    return "" if fields is None else fields[0]


def _fields(process: int) -> list[str] | None:
    """proc_pid_stat(5) from the state on; the name before it, in brackets, may hold anything."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _seconds(fields: list[str] | None) -> float:
    return 0.0 if fields is None else (int(fields[11]) + int(fields[12])) / _TICK


def _children(process: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


class Window(Struct):
    """Some looks at a process whose loop stands still, from the first one on."""

    began: float
    seconds: float  # of the processor, before it
    num_looks: int = 0
    num_runs: int = 0
    num_reads: int = 0
    share: float = 0.0  # of a core, since then

    def look(self, signs: Signs, now: float) -> None:
        self.num_looks += 1
        self.num_runs += signs.runs
        self.num_reads += signs.reads
        self.share = (signs.seconds - self.seconds) / max(now - self.began, 0.01)

    @property
    def at_work(self) -> bool:
        few = BUSY_SHARE * self.num_looks
        starved = self.num_runs + self.num_reads > few and self.share >= STARVED_SHARE
        return self.share >= WORK_SHARE or self.num_reads > few or starved
