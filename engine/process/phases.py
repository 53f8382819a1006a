"""How long the parts of a rank's start took: one line of the log says it when the rank is ready (docs/surviving.md)."""

from __future__ import annotations

import time
from collections.abc import Callable


class Phases:
    """A phase ends where the next one begins; the first begins when this is made."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._seconds: dict[str, float] = {}

    def end(self, name: str, of_it: dict[str, float] | None = None) -> None:
        """The phase that is going on is over, and had this name; of_it: seconds of it that are counted apart."""
        now = self._clock()
        apart = of_it or {}
        self._seconds |= apart
        self._seconds[name] = now - self._began - sum(apart.values())
        self._began = now

    @property
    def seconds(self) -> dict[str, float]:
        """Of each phase and of all, in milliseconds' steps."""
        rounded = {name: round(seconds, 3) for name, seconds in self._seconds.items()}
        return {**rounded, "total": round(sum(self._seconds.values()), 3)}
