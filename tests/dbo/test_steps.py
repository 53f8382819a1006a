"""drain and weave: turns, values, and what happens to the others when one raises."""

from __future__ import annotations

import pytest

from dbo.steps import Steps, drain, weave


def counting(name: str, turns: int, log: list[str]) -> Steps[str]:
    try:
        for turn in range(turns):
            log.append(f"{name}{turn}")
            yield
        return name
    finally:
        log.append(f"{name} closed")


def failing(turns: int) -> Steps[str]:
    for _ in range(turns):
        yield
    raise KeyError("boom")


def test_drain_returns_the_value() -> None:
    log: list[str] = []
    assert drain(counting("a", 3, log)) == "a"
    assert log == ["a0", "a1", "a2", "a closed"]


def test_weave_gives_turns_and_keeps_order() -> None:
    log: list[str] = []
    assert drain(weave(counting("a", 1, log), counting("b", 3, log), counting("c", 2, log))) == ["a", "b", "c"]
    assert [entry for entry in log if "closed" not in entry] == ["a0", "b0", "c0", "b1", "c1", "b2"]


def test_weave_nests() -> None:
    log: list[str] = []
    value = drain(weave(weave(counting("a", 2, log), counting("b", 1, log)), counting("c", 2, log)))
    assert value == [["a", "b"], "c"]
    assert log[:3] == ["a0", "b0", "c0"]


def test_weave_of_nothing_and_of_steps_that_never_yield() -> None:
    assert drain(weave()) == []
    assert drain(weave(counting("a", 0, []))) == ["a"]


@pytest.mark.parametrize("turns", [0, 1, 2])
def test_an_exception_closes_the_siblings(turns: int) -> None:
    log: list[str] = []
    with pytest.raises(KeyError, match="boom"):
        drain(weave(counting("a", 9, log), failing(turns), counting("c", 9, log)))
    # A generator that never had its first turn has nothing to clean up.
    started = {entry[0] for entry in log}
    assert {f"{name} closed" for name in started} <= set(log)
    assert "a" in started


def test_closing_a_weave_closes_its_threads() -> None:
    log: list[str] = []
    woven = weave(counting("a", 9, log), counting("b", 9, log))
    next(woven)
    woven.close()
    assert {"a closed", "b closed"} <= set(log)


def test_a_failing_cleanup_does_not_park_the_others() -> None:
    def bad_cleanup() -> Steps[str]:
        try:
            while True:
                yield
        finally:
            raise OSError("cleanup")

    log: list[str] = []
    with pytest.raises(OSError, match="cleanup") as raised:  # kept: its traceback keeps the generators alive
        drain(weave(counting("a", 9, log), bad_cleanup(), failing(1), counting("d", 9, log)))
    assert raised.value.__context__ is not None and isinstance(raised.value.__context__.__context__, KeyError)
    assert {"a closed", "d closed"} <= set(log)
