"""Rank processes that are killed, and the test as their front: what it replays continues exactly where it broke off."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import hf_tiny
import pytest
from overlapped import SPLIT
from rank_cluster import START_SECONDS, Cluster
from rank_parts import Job, make_plan
from survivors import undisturbed

from configs.dbo import DboPlan
from configs.engine import Plan
from front.messages import (
    Abort,
    AddRequest,
    FrontToRank,
    Joined,
    Membership,
    RankFailed,
    RankReady,
    RankToFront,
    Shutdown,
)
from front.wire import NotConnected

JOBS = [Job([5 + 3 * i, 7, 11 * i + 2], 50, params={"temperature": float(i % 2)}) for i in range(6)]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_tiny.make_qwen3_moe(tmp_path_factory.mktemp("survivors")).path


@pytest.fixture(scope="session")
def expected(checkpoint: Path) -> dict[int, list[int]]:
    return undisturbed(checkpoint, JOBS)


class Front(Cluster):
    """Owns the requests: job i belongs to rank i mod n until that is lost."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.epoch = 0
        self.alive = [True] * self.ranks.size
        self.owner: dict[int, int] = {}

    def add(self, index: int, rank: int) -> None:
        job, released = JOBS[index % len(JOBS)], self.outputs.setdefault(index, [])
        first = job.message(index % len(JOBS))
        self.owner[index] = rank
        self.send(
            rank,
            AddRequest(
                request_id=index,
                token_ids=[*first.token_ids, *released],
                prompt_len=first.prompt_len,
                params=first.params,
                seed=first.seed,
            ),
        )

    def begin(self, num_tokens: int = 4) -> None:
        self.wait_ready()
        for index in range(len(JOBS)):
            self.add(index, index % self.ranks.size)
        self.wait_for(lambda _: all(len(self.outputs[index]) >= num_tokens for index in range(len(JOBS))))

    def tell(self) -> None:
        self.epoch += 1
        for rank, alive in enumerate(self.alive):
            if alive:
                self.send(rank, Membership(self.epoch, self.alive))

    def lose(self, rank: int) -> None:
        """The process has been killed: wait for its end, take what it had sent, tell the others, replay."""
        assert self.processes[rank].wait(10) == -signal.SIGKILL
        self.receive(0.02)
        self.alive[rank] = False
        self.tell()
        heir = self.alive.index(True)
        for index, owner in self.owner.items():
            if owner == rank and index not in self.finished:
                self.add(index, heir)

    def wait_joined(self, ranks: set[int]) -> None:
        """All of them say Joined for this epoch."""

        def all_joined(seen: list[RankToFront]) -> bool:
            assert not any(isinstance(message, RankFailed) for message in seen), seen
            joined = {message.rank for message in seen if isinstance(message, Joined) and message.epoch == self.epoch}
            return joined == ranks

        self.wait_for(all_joined)

    def wait_finished(self) -> None:
        self.wait_for(lambda _: len(self.finished) == len(self.owner))


@pytest.fixture
def start(checkpoint: Path) -> Iterator[type[Front]]:
    fronts: list[Front] = []

    def begin(
        backend: str, slots: int = 4, size: int = 3, asynchronous: bool = True, dbo: DboPlan | None = None
    ) -> Front:
        plan = make_plan(
            checkpoint,
            data_parallel_size=size,
            all2all_backend=backend,
            async_scheduling=asynchronous,
            slots_per_rank=slots,
            exchange_timeout=20.0,
            dbo=dbo,
        )
        fronts.append(Front(plan))
        return fronts[-1]

    yield begin
    for front in fronts:
        front.close()


@pytest.mark.parametrize(
    ("backend", "dbo"),
    [
        pytest.param("gloo", SPLIT, id="split-gloo"),
        *(
            pytest.param(backend, dbo, id=name, marks=pytest.mark.slow)
            for backend, dbo, name in (
                ("gloo", None, "whole-gloo"),
                ("shm", None, "whole-shm"),
                ("shm", SPLIT, "split-shm"),
            )
        ),
    ],
)
def test_a_killed_rank_is_survived_and_returns(
    expected: dict[int, list[int]], start: type[Front], backend: str, dbo: DboPlan | None
) -> None:
    front = start(backend, dbo=dbo)
    front.begin()
    front.processes[1].kill()
    began = time.monotonic()
    front.lose(1)
    front.wait_joined({0, 2})
    assert time.monotonic() - began < 5.0
    front.wait_finished()
    assert front.outputs == expected

    front.restart(1)
    front.wait_for(lambda seen: any(isinstance(message, RankReady) for message in seen), START_SECONDS)
    for index in range(6, 9):
        front.add(index, index % 3)  # they run while it joins; its own waits for it
    front.alive[1] = True
    front.tell()
    front.wait_joined({0, 1, 2})
    front.wait_finished()
    assert {index: front.outputs[index + 6] for index in range(3)} == {index: expected[index] for index in range(3)}
    front.send(2, Shutdown())
    assert [process.wait(10) for process in front.processes] == [0, 0, 0]


@pytest.mark.parametrize("backend", ["gloo", pytest.param("shm", marks=pytest.mark.slow)])
@pytest.mark.parametrize("delay", [0.0, pytest.param(0.02, marks=pytest.mark.slow)])
def test_a_loss_while_the_others_meet_again(
    expected: dict[int, list[int]], start: type[Front], backend: str, delay: float
) -> None:
    front = start(backend, slots=8)
    front.begin()
    front.processes[1].kill()
    front.lose(1)
    time.sleep(delay)
    front.processes[2].kill()
    front.lose(2)
    front.wait_joined({0})
    front.wait_finished()
    assert front.outputs == expected


@pytest.mark.parametrize("backend", ["shm", pytest.param("gloo", marks=pytest.mark.slow)])
def test_a_stopped_rank_is_fenced(expected: dict[int, list[int]], start: type[Front], backend: str) -> None:
    """Its heartbeat stops; nobody goes on without it before it is killed."""
    front = start(backend)
    front.begin()
    beat = front.directory / "beat-1"
    front.processes[1].send_signal(signal.SIGSTOP)
    stat = Path(f"/proc/{front.processes[1].pid}/stat")
    front.wait_for(lambda _: stat.read_text().rpartition(")")[2].split()[0] == "T")
    before = beat.read_bytes()
    other = (front.directory / "beat-0").read_bytes()
    front.wait_for(lambda _: (front.directory / "beat-0").read_bytes() != other)
    front.receive(0.5)
    stood = {index: len(tokens) for index, tokens in front.outputs.items()}
    assert not front.receive(0.3) and stood == {index: len(tokens) for index, tokens in front.outputs.items()}
    assert beat.read_bytes() == before
    front.processes[1].kill()
    front.lose(1)
    front.wait_finished()
    assert front.outputs == expected


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_one_loss_after_the_other(
    expected: dict[int, list[int]], start: type[Front], backend: str, asynchronous: bool
) -> None:
    """Every rank is killed in turn and returns, while requests run."""
    front = start(backend, asynchronous=asynchronous)
    front.begin()
    for victim in (2, 0, 1):
        front.processes[victim].kill()
        front.lose(victim)
        front.wait_finished()
        front.restart(victim)
        front.wait_for(lambda seen: any(isinstance(message, RankReady) for message in seen), START_SECONDS)
        front.alive[victim] = True
        front.tell()
        for _ in range(6):
            index = len(front.owner)
            front.add(index, index % 3)
        front.wait_joined({0, 1, 2})
        target = {index: len(front.outputs[index]) + 3 for index in front.owner if index not in front.finished}
        front.wait_for(lambda _, t=target: all(len(front.outputs[i]) >= min(n, 50) for i, n in t.items()))
    front.wait_finished()
    assert front.outputs == {index: expected[index % 6] for index in front.owner}


def test_what_was_meant_for_the_process_before_is_not_taken(start: type[Front]) -> None:
    """A membership that the front has sent when it did not know yet that this rank had ended too: it names this rank
    alone, and one that takes it serves alone while the others wait for it."""
    front = start("gloo", slots=8)
    front.wait_ready()
    before = front.processes[1]
    before.kill()
    before.wait(10)
    _until(lambda: not _sent(front, Abort([])))
    front.restart(1)
    _until(lambda: _sent(front, Membership(1, [False, True, False], before.pid)))
    front.wait_for(lambda seen: any(isinstance(message, RankReady) for message in seen), START_SECONDS)
    front.send(1, Job([5] * 500, 5).message(0))  # too long, which a rank says in its first step
    seen = front.wait_for(lambda _: 0 in front.finished)
    front.send(1, Membership(2, [False, True, False], before.pid))
    front.send(1, Membership(3, [False, True, False], front.processes[1].pid))
    seen += front.wait_for(lambda seen: any(isinstance(message, Joined) for message in seen))
    assert [message.epoch for message in seen if isinstance(message, Joined)] == [3]


def _sent(front: Front, message: FrontToRank) -> bool:
    try:
        front.send(1, message)
    except NotConnected:
        return False
    return True


def _until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
