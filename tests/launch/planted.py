"""Faults planted into the processes of a real server: what is written into a rank's file is done there when it gets SIGUSR1."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# Python imports it at the start of every process. The handler runs in the main thread, wherever that is just then.
SITE = """
import ctypes, signal, time

def plant(number, frame):
    from engine.rank import Rank
    while not isinstance(frame.f_locals.get("rank"), Rank):
        frame = frame.f_back
    rank = frame.f_locals["rank"]
    exec(open({folder!r} + "/plant").read(), {{"rank": rank, "time": time, "ctypes": ctypes}})

signal.signal(signal.SIGUSR1, plant)
"""

# The main thread sleeps.
SLEEP = "time.sleep(3600)"
# The next step's pass is left out: the rank goes on to agree on the one after it.
SKIP = """
def skip(*arguments):
    del rank._compute
    rank._scheduler.rollback()
    return rank._take_early()
    yield
rank._compute = skip
"""
# It speaks of another placement from now on.
PLACEMENT = "rank._team.agreement.placement ^= 1"
# The thread that computes sleeps before its next step.
DEVICE = "rank._runner._threads.submit(time.sleep, 3600)"
# The thread that computes is in a native call that does not come back, and takes no other's core.
NATIVE = "rank._runner._threads.submit(ctypes.CDLL(None).pause)"
# It does not come to the next meeting.
AWAY = """
class Never:
    def done(self): return False
    def drop(self): pass
meet = rank._team._meet
rank._team._meet = lambda *arguments: Never()
"""


@contextmanager
def planting(folder: Path) -> Iterator[None]:
    """Processes that are started meanwhile can be told what to do."""
    (folder / "sitecustomize.py").write_text(SITE.format(folder=str(folder)))
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH")))))
        yield


def plant(folder: Path, process: int, what: str) -> None:
    (folder / "plant").write_text(what)
    os.kill(process, signal.SIGUSR1)
