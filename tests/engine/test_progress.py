"""Plain lines, and the bar that takes their place on a terminal."""

from __future__ import annotations

import io

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
