"""Ranks as real processes: gloo between them, ZeroMQ to the front (here: this test)."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import hf_tiny
import pytest
from msgspec import structs
from rank_cluster import START_SECONDS, Cluster
from rank_parts import Job, drive, make_plan

from configs.dbo import DboPlan
from configs.engine import Plan
from dbo.memory import recall
from engine.build import build_rank
from engine.process.rank_loop import backend_of
from ep.vocab_parallel import MAX_ROWS
from front.messages import RankFailed, Shutdown
from models.tiny import CHECKPOINT


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


def test_two_processes_equal_one_rank(checkpoint: Path, start: Callable[[Plan], Cluster], tmp_path: Path) -> None:
    """Tokens; then rest without a busy core; then work again for one rank alone; then all leave together. At first they
    measure when a split pays, and remember it."""
    memory = tmp_path / "dbo.json"
    plan = gloo_plan(checkpoint, asynchronous=True)
    cluster = start(structs.replace(plan, dbo=DboPlan(memory=str(memory))))
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
    cluster.wait_for(lambda _: "event=dbo_measured" in cluster.stderr(1) and recall(memory) is not None)

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


@pytest.mark.parametrize("asynchronous", [True, False])
def test_ranks_that_share_their_head(checkpoint: Path, start: Callable[[Plan], Cluster], asynchronous: bool) -> None:
    """Greedy and drawn requests, while one rank has none, and with a prompt of more rows than are shared."""
    options = {"max_model_len": 256, "max_num_batched_tokens": 256, "num_kv_blocks": 256}
    jobs = [Job([5 + i, 6, 7 * i + 2], 8 + i, params={"temperature": float(i % 2)}) for i in range(5)]
    jobs.append(Job([3 + i % 90 for i in range(MAX_ROWS + 40)], 6))
    plan = make_plan(checkpoint, data_parallel_size=2, all2all_backend="shm", async_scheduling=asynchronous, **options)
    cluster = start(structs.replace(plan, vocab_parallel=True))
    cluster.wait_ready()
    for index, job in enumerate(jobs):
        cluster.send(0 if index < 3 else index % 2, job.message(index))
    cluster.wait_for(lambda _: len(cluster.finished) == len(jobs))
    single = drive([build_rank(make_plan(checkpoint, **options))], jobs)
    assert cluster.outputs == {index: result.tokens for index, result in enumerate(single)}
    cluster.send(0, Shutdown())
    assert [process.wait(10) for process in cluster.processes] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [True, False])
def test_without_word_of_who_is_left_a_rank_gives_up(
    checkpoint: Path, start: Callable[[Plan], Cluster], asynchronous: bool
) -> None:
    """After the exchange timeout; tests/engine/test_survival_processes.py has what happens with a front that says it."""
    plan = gloo_plan(checkpoint, asynchronous)
    cluster = start(structs.replace(plan, max_model_len=4096, num_kv_blocks=2048, exchange_timeout=2.0))
    cluster.wait_ready()
    cluster.send(0, Job([5, 6, 7], 4000).message(0))
    cluster.wait_for(lambda _: len(cluster.outputs.get(0, [])) > 3)
    cluster.processes[1].kill()
    seen = cluster.wait_for(lambda seen: any(isinstance(message, RankFailed) for message in seen))
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
    cluster = start(structs.replace(make_plan(checkpoint), model_path=str(tmp_path / "broken")))
    seen = cluster.wait_for(lambda seen: len(seen) > 0, START_SECONDS)
    (failed,) = seen
    assert isinstance(failed, RankFailed)
    assert "model.safetensors" in failed.error and "\n" not in failed.error
    assert cluster.processes[0].wait(5) == 3


@pytest.mark.parametrize(("device", "size", "expected"), [("cuda", 2, "nccl"), ("cuda", 1, "local"), ("cpu", 2, "shm")])
def test_what_joins_a_server_that_has_grown(device: Literal["cpu", "cuda"], size: int, expected: str) -> None:
    """It began with one rank, so no exchange was planned; ranks with GPUs have no memory of the host's in common."""
    plan = structs.replace(make_plan(CHECKPOINT), device=device)
    assert plan.all2all_backend == "local" and backend_of(plan, size) == expected
    assert backend_of(structs.replace(plan, all2all_backend="pplx"), size) == "pplx"
