"""Which cores a rank runs on, as others are lost and come back."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from engine.process.cores import Cores


def in_a_thread(work: Callable[[], None]) -> None:
    """Cores are a thread's own, and what it does to them is gone with it."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def test_the_last_one_has_the_cores_of_all() -> None:
    every = sorted(os.sched_getaffinity(0))
    if len(every) < 2:
        pytest.skip("this process may run on one core")

    def work() -> None:
        cores = Cores(1, 1, 2)
        assert cores.share(2) == 1 and os.sched_getaffinity(0) == {every[1]}
        assert cores.share(1) == 2 and os.sched_getaffinity(0) == set(every[:2])
        assert cores.share(2) == 1 and os.sched_getaffinity(0) == {every[1]}

    in_a_thread(work)


def test_what_is_left_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = [set(range(3, 11))]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed[-1])
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: allowed.append(set(cores)))
    first, second = Cores(0, 2, 4), Cores(3, 2, 4)
    assert [first.share(living) for living in (4, 3, 2, 1, 4)] == [2, 2, 4, 8, 2]
    assert allowed[1:] == [{3, 4}, *[set(range(3, 11))] * 3, {3, 4}]
    assert second.share(4) == 2 and allowed[-1] == {9, 10}


def test_one_that_came_later_keeps_to_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: pytest.fail("it may run anywhere"))
    late = Cores(2, 1, 2)
    assert (late.share(3), late.share(1)) == (1, 1)
