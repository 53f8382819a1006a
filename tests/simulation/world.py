"""Fake time, and what happens in it: one queue of events, one thread, nothing random but one seeded generator."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any


class Over(Exception):
    """The schedule has ended; passes through the supervisor's loop, which everything runs in."""


class Violation(AssertionError):
    """Something that must never happen has happened. One line."""


class World:
    """now: seconds of fake time. `trace` is None, or takes one line for every event worth telling."""

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.num_events = 0
        self.interrupted = False  # somebody who waits in `run` is to look up
        self._trace = trace
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def clock(self) -> float:
        return self.now

    def at(self, when: float, call: Callable[..., None], *arguments: Any) -> None:
        self._count += 1
        now = self.now
        heapq.heappush(self._queue, (when if when > now else now, self._count, call, arguments))

    def run(self, until: float) -> None:
        """Everything that happens up to `until`, or until somebody interrupts."""
        queue, pop = self._queue, heapq.heappop
        while queue and queue[0][0] <= until and not self.interrupted:
            self.now, _, call, arguments = pop(queue)
            self.num_events += 1
            call(*arguments)
        if not self.interrupted:
            self.now = until
        self.interrupted = False

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self.random.random()

    @property
    def tells(self) -> bool:
        return self._trace is not None

    def tell(self, text: str) -> None:
        if self._trace is not None:
            self._trace(f"{self.now:9.4f}  {text}")
