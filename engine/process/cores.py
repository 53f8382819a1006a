"""Which cores a rank runs on."""

from __future__ import annotations

import os


def keep_to_cores(rank: int, threads: int) -> None:
    """This thread, and those that it starts from now on, run on the cores of this rank: `threads` of those that the
    process may use, next to those of the rank before. A rank that came later finds none left, and may use all."""
    first = rank * threads
    own = sorted(os.sched_getaffinity(0))[first : first + threads]
    if len(own) == threads:
        os.sched_setaffinity(0, own)
