"""The disk with the checkpoint in fake time: it is slow, away for a while, or has other weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, cast

from engine.recovery.reading import StagedExpert
from eplb.repair import SlotUpdate
from tests.simulation.transport import Delays
from tests.simulation.world import World


class Disk:
    """away_until: reads fail. changed_until: other weights lie there, and the identity of the start tells (layers/identity.py).
    stalled_until: reads do not end before."""

    def __init__(self, world: World, delays: Delays) -> None:
        self.world = world
        self.delays = delays
        self.away_until = self.changed_until = self.stalled_until = 0.0

    @property
    def changed(self) -> bool:
        return self.world.now < self.changed_until

    @property
    def trouble(self) -> str:
        """Why nothing can be read now; "": it can."""
        if self.world.now < self.away_until:
            return "model.safetensors: cannot be read: No such file or directory"
        return "model.safetensors: changed since the start" if self.changed else ""


class SimReading:
    """engine.recovery.reading.Reading: one expert after another, tried again as long as it is wanted."""

    def __init__(self, disk: Disk, updates: Sequence[SlotUpdate], world: World) -> None:
        self.left = len(updates)
        self._disk = disk
        self._updates = deque(updates)
        self._world = world
        self._staged: deque[StagedExpert] = deque()
        self._dropped = False
        self._error = ""
        self._begin()

    @property
    def trouble(self) -> str:
        stalled = self._world.now + 2.0 < self._disk.stalled_until
        return self._error or ("reading an expert takes longer than 2 s" if stalled and self.left else "")

    def take(self, timeout: float) -> StagedExpert | None:
        if not self._staged:
            return None
        self.left -= 1
        return self._staged.popleft()

    def drop(self) -> None:
        self._dropped = True

    def _begin(self) -> None:
        if self._updates:
            took = self._world.between(*self._disk.delays.read)
            self._world.at(max(self._world.now + took, self._disk.stalled_until), self._end)

    def _end(self) -> None:
        if self._dropped:
            return
        self._error = self.refused()
        if self._error:
            self._world.at(self._world.now + self._world.between(0.05, 1.0), self._end)
            return
        update = self._updates.popleft()
        other = cast(Any, self._disk.changed)  # the model is told whether it gets other weights (StandIn.read_expert)
        self._staged.append(StagedExpert(update, other, 1))
        self._begin()

    def refused(self) -> str:
        return self._disk.trouble
