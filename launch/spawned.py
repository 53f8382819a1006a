"""Ranks in processes of their own, for LLM and AsyncLLM: front.wire.Ranks plus the care for those processes."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from pathlib import Path

from configs.engine import Plan
from front.messages import FrontToRank, NoneLeft, RankFailed, RankReady, RankToFront, Shutdown
from front.wire import ZmqRanks
from launch.early import Source
from launch.monitor import RankMonitor
from launch.processes import RANK_MODULE, Children, RuntimeDir

SHUTDOWN_GRACE = 10.0  # seconds for the ranks to leave the lockstep together
LOOK_SECONDS = 0.1  # how often a caller that waits for messages looks after the processes
STARTUP_TIMEOUT = 600.0  # seconds for a restarted rank to load


class SpawnedRanks:
    """Starts one process per rank; `close` ends them, and so does the death of this process, or that nothing has this
    object any more.

    `receive` looks after the processes too: a lost rank is told as RankLost and started again.
    """

    def __init__(self, plan: Plan, runtime_root: Path, source: Source | None = None) -> None:
        """source: a process that has been started early, and becomes the first rank."""
        self.bad_input = ""  # what a rank that could not load said of the files that it was given
        self._runtime = RuntimeDir(runtime_root)
        self._children = Children()
        if plan.device == "cpu":
            self._children.begin_early(RANK_MODULE, plan.architecture, source)
        elif source is not None:
            source.drop()
        self._loading = set(range(plan.data_parallel_size))
        self._looked = 0.0
        try:
            self._ranks = ZmqRanks(self._runtime.front, plan.data_parallel_size)
            self._end = weakref.finalize(self, _end, os.getpid(), self._children, self._ranks, self._runtime)
            self._monitor = RankMonitor(self._children, plan, self._runtime, STARTUP_TIMEOUT)
            self._monitor.start()
        except BaseException:
            self._children.end(grace=0.0)
            self._runtime.close()
            raise

    @property
    def size(self) -> int:
        return self._ranks.size

    def fileno(self) -> int:
        return self._ranks.fileno()

    def send(self, rank: int, message: FrontToRank) -> None:
        self._ranks.send(rank, message)

    def resize(self, count: int) -> None:
        """Processes start as `receive` looks after them."""
        self._ranks.resize(count)
        self._monitor.resize(count)

    def fence(self, rank: int, process: int) -> None:
        self._monitor.fence(process)

    def receive(self, timeout: float) -> list[RankToFront]:
        """May return with nothing before the time is up."""
        messages = self._ranks.receive(min(timeout, LOOK_SECONDS))
        for message in messages:
            if isinstance(message, RankReady):
                self._loading.discard(message.rank)
            elif isinstance(message, RankFailed) and self._loading and message.bad_input:
                self.bad_input = message.error
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return messages
        self._looked = time.monotonic()
        return messages + self._look()

    def _look(self) -> list[RankToFront]:
        self._monitor.restarts = not self._loading
        found: list[RankToFront] = [*self._monitor.look(self._children.exited(timeout=0.0))]
        waits = self._monitor.waits.report()
        if waits is not None:
            found.append(waits)
        hopeless = self._monitor.hopeless if not self._loading else ""
        return [*found, NoneLeft(hopeless)] if hopeless else found

    def close(self) -> None:
        if not self._end.alive:
            return
        for rank in range(self._ranks.size):
            with contextlib.suppress(ConnectionError):
                self._ranks.send(rank, Shutdown())
        self._monitor.kill_loading()
        self._children.end(0.0 if self._loading else SHUTDOWN_GRACE)  # while some load, the others wait for them
        self._end()


def _end(process: int, children: Children, ranks: ZmqRanks, runtime: RuntimeDir) -> None:
    """process: the one that made them; in a fork of it they are not to be ended."""
    if os.getpid() == process:
        children.end(grace=0.0)
        ranks.close()
        runtime.close()
