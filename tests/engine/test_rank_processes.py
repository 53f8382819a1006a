"""Ranks as real processes: gloo between them, ZeroMQ to the front (here: this test)."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import hf_tiny
import msgspec
import pytest
from rank_parts import Job, drive, make_plan

from configs.engine import Plan
from engine.messages import FrontToRank, Outputs, RankFailed, RankReady, RankToFront, Shutdown
from engine.rank import build_rank
from engine.wire import ZmqRanks

START_SECONDS = 60.0


class Cluster:
    """Starts one process per rank; this object is their front."""

    def __init__(self, plan: Plan) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="mr-"))  # short: a unix socket's path is bounded
        plan_path = self.directory / "plan.json"
        plan_path.write_bytes(msgspec.json.encode(plan))
        self.ranks = ZmqRanks(f"ipc://{self.directory}/front.ipc", plan.data_parallel_size)
        self.errors = [(self.directory / f"stderr-{rank}").open("w+") for rank in range(self.ranks.size)]
        arguments = ["--plan", str(plan_path), "--runtime-dir", str(self.directory), "--parent", str(os.getpid())]
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "engine.rank_process", *arguments, "--rank", str(rank)],
                stderr=self.errors[rank],
            )
            for rank in range(self.ranks.size)
        ]
        self.outputs: dict[int, list[int]] = {}
        self.finished: set[int] = set()
        self.sent: list[int] = []  # which job each request was

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
        for file in self.errors:
            file.close()
        self.ranks.close()
        shutil.rmtree(self.directory)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_tiny.make_qwen3_moe(tmp_path_factory.mktemp("processes")).path


@pytest.fixture
def start() -> Iterator[Callable[[Plan], Cluster]]:
    clusters: list[Cluster] = []

    def begin(plan: Plan) -> Cluster:
        clusters.append(Cluster(plan))
        return clusters[-1]

    yield begin
    for cluster in clusters:
        cluster.close()


def gloo_plan(checkpoint: Path, asynchronous: bool, size: int = 2) -> Plan:
    return make_plan(checkpoint, data_parallel_size=size, all2all_backend="gloo", async_scheduling=asynchronous)


def cpu_seconds(process: subprocess.Popen[bytes]) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def test_two_processes_equal_one_rank(checkpoint: Path, start: Callable[[Plan], Cluster]) -> None:
    """Tokens; then rest without a busy core; then work again for one rank alone; then all leave together."""
    cluster = start(gloo_plan(checkpoint, asynchronous=True))
    ready = cluster.wait_ready()
    assert {message.rank for message in ready} == {0, 1}
    total = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    assert all(message.bytes_read < 0.8 * total for message in ready), "each rank reads its own experts only"
    assert "of weights in" in cluster.stderr(0)
    jobs = [Job([5 + i, 6, 7 * i + 2], 8 + i) for i in range(6)]
    for index, job in enumerate(jobs):
        cluster.send(index % 2, job.message(index))
    cluster.wait_for(lambda _: len(cluster.finished) == len(jobs))
    single = drive([build_rank(make_plan(checkpoint))], jobs)
    assert cluster.outputs == {index: result.tokens for index, result in enumerate(single)}

    cluster.receive(0.3)  # the last step's echo
    before = [cpu_seconds(process) for process in cluster.processes]
    time.sleep(1.0)
    used = [cpu_seconds(process) - then for process, then in zip(cluster.processes, before, strict=True)]
    assert max(used) < 0.1, f"idle ranks used {used} s of CPU in 1 s"

    for index in (10, 11):
        cluster.send(1, jobs[0].message(index))
        cluster.wait_for(lambda _, index=index: index in cluster.finished)
        assert cluster.outputs[index] == single[0].tokens
    for process in cluster.processes:
        process.send_signal(signal.SIGTERM)  # a terminal's Ctrl-C and a supervisor's haste do not tear ranks apart
    cluster.send(0, Shutdown())
    assert [process.wait(10) for process in cluster.processes] == [0, 0]


@pytest.mark.parametrize("asynchronous", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_killed_rank_ends_the_other(checkpoint: Path, start: Callable[[Plan], Cluster], asynchronous: bool) -> None:
    cluster = start(dataclasses.replace(gloo_plan(checkpoint, asynchronous), max_model_len=4096, num_kv_blocks=2048))
    cluster.wait_ready()
    cluster.send(0, Job([5, 6, 7], 4000).message(0))
    cluster.wait_for(lambda _: len(cluster.outputs.get(0, [])) > 3)
    cluster.processes[1].kill()
    seen = cluster.wait_for(lambda seen: any(isinstance(message, RankFailed) for message in seen), 10.0)
    (failed,) = [message for message in seen if isinstance(message, RankFailed)]
    assert failed.rank == 0 and "PeerLost: lost rank(s)" in failed.error and "\n" not in failed.error
    assert cluster.processes[0].wait(5) == 4
    assert "PeerLost" in cluster.stderr(0)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "asynchronous"), [(2, True), (4, False), (4, True)])
def test_ranks_that_fall_asleep_all_the_time(
    checkpoint: Path, start: Callable[[Plan], Cluster], size: int, asynchronous: bool
) -> None:
    """Short requests with pauses of about a step between them, to meet every moment of falling asleep and waking."""
    cluster = start(gloo_plan(checkpoint, asynchronous, size))
    cluster.wait_ready()
    choose = random.Random(size)
    jobs = [Job([choose.randrange(2, 90) for _ in range(3)], choose.randrange(1, 4)) for _ in range(8)]
    single = drive([build_rank(make_plan(checkpoint))], jobs)
    for number in range(200):
        for _ in range(choose.randrange(1, 4)):
            cluster.send(choose.randrange(size), jobs[number % 8].message(len(cluster.sent)))
            cluster.sent.append(number % 8)
        if choose.random() < 0.5:
            cluster.wait_for(lambda _: len(cluster.finished) == len(cluster.sent))
        time.sleep(choose.random() * 0.02)
    cluster.wait_for(lambda _: len(cluster.finished) == len(cluster.sent))
    assert cluster.outputs == {index: single[job].tokens for index, job in enumerate(cluster.sent)}
    cluster.send(size - 1, Shutdown())
    assert [process.wait(10) for process in cluster.processes] == [0] * size


def test_a_rank_that_cannot_start_says_why(checkpoint: Path, start: Callable[[Plan], Cluster], tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "broken")
    weights = tmp_path / "broken" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    cluster = start(dataclasses.replace(make_plan(checkpoint), model_path=str(tmp_path / "broken")))
    seen = cluster.wait_for(lambda seen: len(seen) > 0, START_SECONDS)
    (failed,) = seen
    assert isinstance(failed, RankFailed)
    assert "model.safetensors" in failed.error and "\n" not in failed.error
    assert cluster.processes[0].wait(5) == 3
