"""Ranks in processes of their own, for LLM and AsyncLLM: engine.wire.Ranks plus the care for those processes."""

from __future__ import annotations

import contextlib
from pathlib import Path

from configs.engine import Plan
from engine.messages import FrontToRank, RankToFront, Shutdown
from engine.wire import ZmqRanks
from launch.processes import Children, RuntimeDir, start_ranks

SHUTDOWN_GRACE = 10.0  # seconds for the ranks to leave the lockstep together


class SpawnedRanks:
    """Starts one process per rank; `close` ends them, and so does the death of this process."""

    def __init__(self, plan: Plan, runtime_root: Path) -> None:
        self._runtime = RuntimeDir(runtime_root)
        self._children = Children()
        try:
            self._ranks = ZmqRanks(f"ipc://{self._runtime.path}/front.ipc", plan.data_parallel_size)
            start_ranks(self._children, plan, self._runtime)
        except BaseException:
            self._children.end(grace=0.0)
            self._runtime.close()
            raise
        self._lost: str | None = None

    @property
    def size(self) -> int:
        return self._ranks.size

    def fileno(self) -> int:
        return self._ranks.fileno()

    def send(self, rank: int, message: FrontToRank) -> None:
        self._ranks.send(rank, message)

    def receive(self, timeout: float) -> list[RankToFront]:
        return self._ranks.receive(timeout)

    def lost(self) -> str | None:
        """What happened to the first rank whose process has ended; None while all live."""
        if self._lost is None:
            for child in self._children.exited(timeout=0.0):
                self._lost = f"{child.name} ended: {child.exit_text()}"
                break
        return self._lost

    def close(self) -> None:
        for rank in range(self._ranks.size):
            with contextlib.suppress(ConnectionError):
                self._ranks.send(rank, Shutdown())
        self._children.end(SHUTDOWN_GRACE if self._lost is None else 0.0)
        self._ranks.close()
        self._runtime.close()
