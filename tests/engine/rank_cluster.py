"""Ranks in processes of their own, and what tests need of their front and supervisor."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from configs.engine import Plan
from front.messages import FrontToRank, Outputs, RankFailed, RankReady, RankToFront
from front.wire import ZmqRanks

START_SECONDS = 60.0


class Cluster:
    """Starts one process per rank; this object is their front."""

    def __init__(self, plan: Plan) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="mr-"))  # short: a unix socket's path is bounded
        plan_path = self.directory / "plan.json"
        plan_path.write_bytes(msgspec.json.encode(plan))
        self.ranks = ZmqRanks(f"ipc://{self.directory}/front.ipc", plan.data_parallel_size)
        self._arguments = ["--plan", str(plan_path), "--runtime-dir", str(self.directory), "--parent", str(os.getpid())]
        self.processes = [self._start(rank) for rank in range(self.ranks.size)]
        self.outputs: dict[int, list[int]] = {}
        self.finished: set[int] = set()
        self.sent: list[int] = []  # which job each request was

    def _start(self, rank: int, *more: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "engine.process.rank_process", *self._arguments, "--rank", str(rank), *more]
        with (self.directory / f"stderr-{rank}").open("a") as errors:
            return subprocess.Popen(command, stderr=errors)

    def restart(self, rank: int) -> None:
        """What a supervisor does after the rank's end."""
        assert self.processes[rank].poll() is not None
        self.processes[rank] = self._start(rank, "--join")

    def stderr(self, rank: int) -> str:
        return (self.directory / f"stderr-{rank}").read_text()

    def receive(self, timeout: float) -> list[RankToFront]:
        messages = self.ranks.receive(timeout)
        for message in messages:
            if isinstance(message, Outputs):
                for output in message.outputs:
                    self.outputs.setdefault(output.request_id, []).extend(output.new_token_ids)
                    if output.finish_reason is not None:
                        self.finished.add(output.request_id)
        return messages

    def wait_for(self, condition: Callable[[list[RankToFront]], bool], seconds: float = 20.0) -> list[RankToFront]:
        """Receive until the condition holds for what has come since this call."""
        deadline, seen = time.monotonic() + seconds, list[RankToFront]()
        while not condition(seen):
            assert time.monotonic() < deadline, (seen, [self.stderr(rank) for rank in range(self.ranks.size)])
            seen += self.receive(0.1)
        return seen

    def wait_ready(self) -> list[RankReady]:
        def all_ready(seen: list[RankToFront]) -> bool:
            assert not any(isinstance(message, RankFailed) for message in seen), seen
            return sum(isinstance(message, RankReady) for message in seen) == self.ranks.size

        return [message for message in self.wait_for(all_ready, START_SECONDS) if isinstance(message, RankReady)]

    def send(self, rank: int, message: FrontToRank) -> None:
        self.ranks.send(rank, message)

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        self.ranks.close()
        shutil.rmtree(self.directory)
