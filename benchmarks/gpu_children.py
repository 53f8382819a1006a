"""The processes that gpu_check.py starts for its parts: what they print as it comes, how they ended, and that they end.

Python takes seconds to import torch. So a process can be started ahead: it imports, and begins with its part (and touches the
GPU for the first time) when it is told to.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
JOIN_SECONDS = 2.0  # for the thread that reads what a process has printed, when that is gone
READY, GO = "ready", "go"

Row = dict[str, Any]


class Child:
    """A process in a session of its own, so that what it starts ends with it. Its standard error is a file."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed in `end`)
        path = f"{ROOT}{os.pathsep}{environment.get('PYTHONPATH', '')}"
        self._process = subprocess.Popen(
            [sys.executable, "-u", *command], cwd=ROOT, env={**environment, "PYTHONPATH": path}, text=True,
            errors="replace", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, start_new_session=True,
        )  # fmt: skip
        # By a thread, because a process in a session of its own may hold the pipe when the child is gone.
        self._found: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()
        self.said: list[str] = []  # what it printed besides rows
        self._first: list[str | None] = []  # what came instead of READY

    def _read(self, pipe: IO[str]) -> None:
        with pipe:
            for line in pipe:
                self._found.put(line.rstrip("\n"))
        self._found.put(None)

    def ready(self, deadline: float) -> bool:
        """Whether it says by then (time.monotonic) that it has imported what it needs; one that says something else, or ends, has
        begun in its own way."""
        try:
            line = self._found.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return False
        if line != READY:
            self._first.append(line)
        return True

    def go(self, seconds: float) -> None:
        """It may begin, and has so many seconds."""
        pipe = self._process.stdin
        assert pipe is not None
        with contextlib.suppress(OSError):  # it has ended already: its exit code says how
            print(GO, seconds, file=pipe, flush=True)

    def rows(self, deadline: float) -> Iterator[Row]:
        """Until it closes its output. TimeoutError at the deadline (time.monotonic)."""
        while True:
            try:
                line = (
                    self._first.pop() if self._first else self._found.get(timeout=max(0.0, deadline - time.monotonic()))
                )
            except queue.Empty:
                raise TimeoutError from None
            if line is None:
                return
            row = _row_of(line)
            if row is None:
                self.said.append(line)
            else:
                yield row

    def rows_by_now(self) -> list[Row]:
        """Without waiting."""
        found: list[Row] = []
        with contextlib.suppress(TimeoutError):
            found.extend(self.rows(0.0))  # what had come stays in the list when it says that nothing more has
        return found

    def wait(self, deadline: float) -> int | None:
        """The exit code. None: it is still there at the deadline."""
        try:
            return self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None

    def end(self, log: IO[str], name: str) -> str:
        """Kill it, and all that it has started. What it said goes to the log; the last line of that."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(JOIN_SECONDS)
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        self._errors.seek(0)
        errors = self._errors.read()
        self._errors.close()
        print(f"==== {name}", *self.said, errors, sep="\n", file=log, flush=True)
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        return lines[-1][:300] if lines else "it said nothing"


def _row_of(line: str) -> Row | None:
    if not line.startswith("{"):
        return None
    try:
        row = json.loads(line)
    except ValueError:  # cut off where the part was stopped
        return None
    return row if "name" in row else None


def told_to_go() -> float:
    """For the other side: say that all is imported, and wait until this process may begin; the seconds that it has."""
    print(READY, flush=True)
    word, seconds = sys.stdin.readline().split()
    assert word == GO
    return float(seconds)
