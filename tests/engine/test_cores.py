"""Ranks on cores of their own."""

from __future__ import annotations

import os
import threading

from engine.process.cores import keep_to_cores


def cores_after(rank: int, threads: int) -> list[int]:
    """Of a thread that is started after that."""
    found: list[int] = []

    def look() -> None:
        found.extend(sorted(os.sched_getaffinity(0)))

    def begin() -> None:
        keep_to_cores(rank, threads)
        inner = threading.Thread(target=look)
        inner.start()
        inner.join(10)

    outer = threading.Thread(target=begin)  # a thread's cores are its own: those of the test stay as they are
    outer.start()
    outer.join(10)
    return found


def test_each_rank_has_its_own_cores() -> None:
    every = sorted(os.sched_getaffinity(0))
    assert [core for rank in range(len(every)) for core in cores_after(rank, 1)] == every
    assert cores_after(0, len(every)) == every


def test_who_finds_none_left_may_use_all() -> None:
    every = sorted(os.sched_getaffinity(0))
    assert cores_after(len(every), 1) == every
    assert cores_after(0, len(every) + 1) == every
