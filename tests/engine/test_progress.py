"""Plain lines, and the bar that takes their place on a terminal."""

from __future__ import annotations

import io

import pytest

from engine.process import progress as progress_module
from engine.process.progress import LoadProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_fast_load_is_one_line() -> None:
    stream = io.StringIO()
    progress = LoadProgress("rank 1", stream)
    for done in range(0, 101, 10):
        progress(done * 10**6, 100 * 10**6)
    progress.finish(60 * 10**6)
    (line,) = stream.getvalue().splitlines()
    assert line.startswith("rank 1: read 60.0 of 100.0 MB of weights in ")


def test_a_terminal_gets_a_bar() -> None:
    stream = Terminal()
    progress = LoadProgress("rank 0", stream)
    progress(50, 100)
    progress.finish(100)
    assert "rank 0: read" in stream.getvalue()
    assert "\x1b[" in stream.getvalue()
    assert "\x1b[?25l" not in stream.getvalue()  # the cursor, which a killed process could not show again


def test_lines_tell_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the rank that leads, however many there are."""
    monkeypatch.setattr(progress_module, "LINE_SECONDS", 0.0)
    stream = io.StringIO()
    progress, other = LoadProgress("rank 0", stream), LoadProgress("rank 1", stream, leads=False)
    progress._began -= 10.0
    progress(2 * 10**9, 3 * 10**9)
    other(10**9, 3 * 10**9)
    assert stream.getvalue() == "rank 0: weights: 2.0 of 3.0 GB, 5 s left\n"
