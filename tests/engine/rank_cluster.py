"""Ranks in processes of their own, and what tests need of their front and supervisor."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from forked import forked_with_torch

from configs.engine import Plan
from engine.process import rank_process
from front.messages import FrontToRank, Outputs, RankFailed, RankReady, RankToFront
from front.wire import ZmqRanks

START_SECONDS = 60.0


def _be_rank(words: list[str], errors: Path) -> None:
    with errors.open("a") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    sys.argv[1:] = [*words, "--parent", str(os.getppid())]
    rank_process.main()


class RankProcess:
    """engine.process.rank_process with these words, forked from a process that has torch (forked.py), as a server's ranks are;
    what it says goes to the end of `errors`. As a subprocess.Popen is."""

    def __init__(self, words: list[str], errors: Path) -> None:
        self._process = forked_with_torch().Process(target=_be_rank, args=(words, errors))
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        assert self._process.exitcode is not None, f"process {self.pid} has not ended in {timeout} s"
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Cluster:
    """Starts one process per rank; this object is their front."""

    def __init__(self, plan: Plan) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="mr-"))  # short: a unix socket's path is bounded
        plan_path = self.directory / "plan.json"
        plan_path.write_bytes(msgspec.json.encode(plan))
        self.ranks = ZmqRanks(f"ipc://{self.directory}/front.ipc", plan.data_parallel_size)
        self._arguments = ["--plan", str(plan_path), "--runtime-dir", str(self.directory)]
        self.processes = [self._start(rank) for rank in range(self.ranks.size)]
        self.outputs: dict[int, list[int]] = {}
        self.finished: set[int] = set()
        self.sent: list[int] = []  # which job each request was

    def _start(self, rank: int, *more: str) -> RankProcess:
        return RankProcess([*self._arguments, "--rank", str(rank), *more], self.directory / f"stderr-{rank}")

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
