"""Which cores a rank runs on."""

from __future__ import annotations

import os


class Cores:
    """Those of a rank whose machine has `threads` cores for each of its `ranks`. A rank has its own, next to those of
    the rank before; while others are away, those of all: what these would have computed it computes too. One that came
    later than the first `ranks` finds none left, and may use all that this process may."""

    def __init__(self, rank: int, threads: int, ranks: int) -> None:
        """rank: the how manyth of its machine."""
        self._threads, self._ranks = threads, ranks
        self._all = sorted(os.sched_getaffinity(0))[: ranks * threads]
        self._own = self._all[rank * threads : (rank + 1) * threads]

    def share(self, living: int) -> int:
        """This thread, and those that it starts from now on, run on this rank's cores when so many ranks live; the
        threads that it is to have."""
        if len(self._own) < self._threads:
            return self._threads
        alone = living < self._ranks
        os.sched_setaffinity(0, self._all if alone else self._own)
        return len(self._all) // max(1, living) if alone else self._threads
