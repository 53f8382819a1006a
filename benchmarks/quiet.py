"""How much of the machine others use while something is measured, and what its memory gives at that moment.

On shared hosts both change within minutes; a ratio of two engines means something only when neither differed.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType

TICK = os.sysconf("SC_CLK_TCK")
PROBE_BYTES = 1 << 28  # far more than any cache


def _busy() -> float:
    """CPU seconds that all processes of the machine, and its other guests (steal), have used."""
    user, nice, system, _idle, _wait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / TICK


def _own(root: int) -> float:
    """CPU seconds of the process, its living descendants, and the ended children that they have waited for."""
    children: dict[int, list[int]] = {}
    used: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:  # it has ended meanwhile
                continue
            children.setdefault(int(fields[1]), []).append(int(folder.name))
            used[int(folder.name)] = sum(map(int, fields[11:15]))
    total, todo = 0, [root]
    while todo:
        process = todo.pop()
        total += used.get(process, 0)
        todo += children.get(process, [])
    return total / TICK


class Watch:
    """`with Watch() as watch: ...`, then watch.foreign: cores that others kept busy meanwhile (2.0: two cores)."""

    foreign = 0.0

    def __enter__(self) -> Watch:
        self._began, self._busy, self._own = time.perf_counter(), _busy(), _own(os.getpid())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seconds = time.perf_counter() - self._began
        if seconds > 0.3:  # shorter than that, ticks of 10 ms say nothing
            self.foreign = max(0.0, (_busy() - self._busy) - (_own(os.getpid()) - self._own)) / seconds


def await_quiet(limit: float, longest: float) -> bool:
    """Wait until others keep less than `limit` cores busy for a second; False when that did not come in `longest` seconds."""
    deadline = time.monotonic() + longest
    while time.monotonic() < deadline:
        with Watch() as watch:
            time.sleep(1.0)
        if watch.foreign < limit:
            return True
    return False


def await_rest(limit: float, longest: float) -> bool:
    """Wait until everybody, our own processes too, keeps less than `limit` cores busy for half a second: threads of an engine
    may spin for a while after its work. False when that did not come in `longest` seconds."""
    deadline = time.monotonic() + longest
    while time.monotonic() < deadline:
        before, began = _busy(), time.monotonic()
        time.sleep(0.5)
        if (_busy() - before) / (time.monotonic() - began) < limit:
            return True
    return False


class Bandwidth:
    """Reads memory with every core."""

    def __init__(self) -> None:
        import torch

        self._data = torch.ones(PROBE_BYTES // 4)

    def now(self) -> float:
        """GB/s, the best of three reads."""
        best = float("inf")
        for _ in range(3):
            began = time.perf_counter()
            self._data.sum()
            best = min(best, time.perf_counter() - began)
        return PROBE_BYTES / best / 1e9
