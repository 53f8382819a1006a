"""How a rank that gets work wakes the others (engine/rank.py)."""

from __future__ import annotations

from typing import Protocol


class Doorbell(Protocol):
    """Wakes the other ranks (front/wire.py has the one between processes)."""

    def ring(self, generation: int) -> None: ...

    def heard(self, generation: int) -> bool:
        """Whether another rank has rung for this sleep; older rings are forgotten. Does not wait."""
        ...


class SharedDoorbell:
    """The doorbell of ranks that live in one thread: all of them hold the same object."""

    def __init__(self) -> None:
        self._rung = -1

    def ring(self, generation: int) -> None:
        self._rung = generation

    def heard(self, generation: int) -> bool:
        return self._rung == generation
