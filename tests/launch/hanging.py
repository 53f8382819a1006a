"""Processes of a server whose main thread hangs, works or spins on a signal, as a loop of theirs might."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# Python imports it at the start of every process. The handler runs in the main thread, wherever that is just then.
SITE = """
import signal, time

def sleep(*arguments):
    time.sleep(3600)

def nap(*arguments):
    end = time.monotonic() + 3600
    while time.monotonic() < end:
        time.sleep(0.01)

def compute(*arguments):
    end = time.thread_time() + 4.0
    while time.thread_time() < end:
        pass

def spin(*arguments):
    while True:
        pass

signal.signal(signal.SIGUSR1, sleep)
signal.signal(signal.SIGUSR2, nap)
signal.signal(signal.SIGALRM, compute)
signal.signal(signal.SIGVTALRM, spin)
"""
SLEEP, NAP, COMPUTE, SPIN = signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGVTALRM


@contextmanager
def hanging(folder: Path) -> Iterator[None]:
    """Processes that are started meanwhile hang when they are told to."""
    (folder / "sitecustomize.py").write_text(SITE)
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH")))))
        yield


def losses(log: str) -> list[str]:
    """What a supervisor has written of lost ranks."""
    return [line.partition("moesaic: ")[2] for line in log.splitlines() if line.startswith("moesaic: event=rank_lost")]
