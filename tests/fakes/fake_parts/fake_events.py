"""Fake CUDA events on the CPU: what is queued runs at once, but nobody is told so before the test says so."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass
class FakeEvent:
    """Implements engine.device.Event. looks: how often it is asked before it says that it is over."""

    over: threading.Event = field(default_factory=threading.Event)
    looks: int = 1 << 30
    recorded: bool = False
    num_looks: int = 0

    def record(self) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        assert self.recorded and self.over.wait(10), "nobody has let it come to its end"

    def query(self) -> bool:
        assert self.recorded
        self.num_looks += 1
        if self.num_looks > self.looks:
            self.over.set()
        return self.over.is_set()


@dataclass
class FakeEvents:
    """Those of one device, in the order in which they were made. looks: of each."""

    looks: int = 1 << 30
    made: list[FakeEvent] = field(default_factory=list)

    def new(self) -> FakeEvent:
        self.made.append(FakeEvent(looks=self.looks))
        return self.made[-1]
