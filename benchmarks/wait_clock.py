"""How long a rank waits for its exchanges, and the same exchanges alone, for bench_dbo.py."""

from __future__ import annotations

import time
from typing import Any

import torch


class WaitClock:
    """How long this rank waits for the exchanges of tokens, and of what sizes they are."""

    def __init__(self, group: Any) -> None:
        self.seconds = 0.0
        self.sizes: list[Any] = []
        self._noting = self._running = False
        self._group = group
        self._gloo = type(group).__name__ == "GlooGroup"
        self._links = self._gloo and group.links
        if self._gloo:
            self._all_to_all = group.all_to_all
            group.all_to_all = self._noted
        else:
            wait = group.signals.wait

            def timed(*arguments: Any) -> Any:
                began = time.perf_counter()
                try:
                    return wait(*arguments)
                finally:
                    self.seconds += (time.perf_counter() - began) * self._running

            group.signals.wait = timed

    def begin(self, noting: bool) -> None:
        self.seconds, self._noting, self._running = -self._linked(), noting, True
        if noting:
            self.sizes = []

    def end(self) -> None:
        self.seconds += self._linked()
        self._noting = self._running = False

    def _linked(self) -> float:
        """Of exchanges of few tokens, which count for themselves."""
        return self._links.sockets.waited if self._links else 0.0

    def _noted(self, out: Any, rows: Any, room: Any, sent: Any, large: bool = False) -> Any:
        if self._noting:
            self.sizes.append((out.shape, rows.shape, out.dtype, room, sent, large))
        return _Timed(self, self._all_to_all(out, rows, room, sent, large))

    def replay(self, barrier: Any) -> float:
        """Seconds; 0 when there is nothing that could be done again."""
        if not self._gloo:
            return 0.0
        made = [(torch.zeros(o, dtype=d), torch.zeros(r, dtype=d), *how) for o, r, d, *how in self.sizes]
        barrier.all_gather_ints([0]).wait()
        began = time.perf_counter()
        for one in made:
            self._all_to_all(*one).wait()
        return time.perf_counter() - began


class _Timed:
    def __init__(self, clock: WaitClock, pending: Any) -> None:
        self._clock, self._pending = clock, pending

    def wait(self) -> Any:
        began = time.perf_counter()
        try:
            return self._pending.wait()
        finally:
            self._clock.seconds += (time.perf_counter() - began) * self._clock._running
