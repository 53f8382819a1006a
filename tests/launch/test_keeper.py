"""The keeper of the ranks with real processes: ends, hangs, restarts, and their limits."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from served import until

from configs.engine import EngineConfig, Plan
from engine.messages import RankLost
from engine.plan import make_plan
from launch import keeper as keeper_module
from launch.keeper import RankKeeper
from launch.processes import Children, RuntimeDir


class Kept:
    def __init__(self, runtime: RuntimeDir, plan: Plan, startup_timeout: float, clock: Callable[[], float]) -> None:
        self.path = runtime.path
        self.children = Children()
        self.keeper = RankKeeper(self.children, plan, runtime, startup_timeout, "beating_rank", clock)
        self.lost: list[RankLost] = []

    def start(self) -> None:
        self.keeper.start()
        self.wait(lambda: self.beats(0) and self.beats(1), "both ranks beat")
        self.keeper.restarts = True

    def look(self) -> None:
        self.lost += self.keeper.look(self.children.exited(0.02))

    def wait(self, condition: Callable[[], object], what: str) -> None:
        def look() -> object:
            self.look()
            return condition()

        until(look, 20.0, what)

    def beats(self, rank: int) -> bool:
        return (self.path / f"beat-{rank}").exists()

    def pid(self, rank: int) -> int:
        return next((child.process.pid for child in self.children.all if child.rank == rank), 0)


@pytest.fixture
def make_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Kept]]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    kept: list[Kept] = []
    runtime = RuntimeDir(Path(tempfile.gettempdir()))

    def make(startup_timeout: float = 30.0, clock: Callable[[], float] = time.monotonic) -> Kept:
        kept.append(Kept(runtime, make_plan(EngineConfig(data_parallel_size=2)), startup_timeout, clock))
        return kept[-1]

    yield make
    for one in kept:
        one.children.end(grace=0.0)
    runtime.close()


def test_a_killed_rank_is_told_and_started_again(make_kept: Callable[..., Kept]) -> None:
    kept = make_kept()
    kept.start()
    first, other = kept.pid(1), kept.pid(0)
    assert (kept.path / "joined-1").read_text() == "False"
    os.kill(first, signal.SIGKILL)
    kept.wait(lambda: kept.lost, "the loss is told")
    [lost] = kept.lost
    assert (lost.rank, lost.reason, lost.process) == (1, "killed by SIGKILL", first)
    assert time.monotonic() - lost.time < 5.0
    kept.wait(lambda: kept.pid(1) not in (0, first) and kept.beats(1), "it is back")
    assert (kept.path / "joined-1").read_text() == "True"
    assert kept.pid(0) == other and len(kept.lost) == 1 and len(kept.children.all) == 2


def test_a_hung_rank_is_killed_before_it_is_told(make_kept: Callable[..., Kept]) -> None:
    kept = make_kept()
    kept.start()
    first = kept.pid(0)
    began = time.monotonic()
    os.kill(first, signal.SIGSTOP)
    kept.wait(lambda: kept.lost, "the loss is told")
    assert 1.8 < time.monotonic() - began < 4.0
    [lost] = kept.lost
    assert lost.rank == 0 and lost.process == first and lost.reason.startswith("hung: no heartbeat for 2.")
    assert not Path(f"/proc/{first}").exists()
    assert lost.time < began + 1.0  # its last sign of life
    kept.wait(lambda: kept.pid(0) not in (0, first) and kept.beats(0), "it is back")


def test_no_restart_before_all_were_ready(make_kept: Callable[..., Kept]) -> None:
    kept = make_kept()
    kept.start()
    kept.keeper.restarts = False
    os.kill(kept.pid(1), signal.SIGKILL)
    kept.wait(lambda: kept.lost, "the loss is told")
    for _ in range(5):
        kept.look()
    assert kept.pid(1) == 0


def test_exit_code_0_is_no_loss(make_kept: Callable[..., Kept]) -> None:
    kept = make_kept()
    kept.start()
    (kept.path / "leave-1").touch()
    kept.wait(lambda: kept.keeper.left, "rank 1 has left")
    assert not kept.lost


def test_a_rank_that_cannot_start_is_tried_three_times_a_minute(
    make_kept: Callable[..., Kept], capfd: pytest.CaptureFixture[str]
) -> None:
    ahead = [0.0]
    kept = make_kept(clock=lambda: time.monotonic() + ahead[0])
    kept.start()
    (kept.path / "refuse-1").touch()
    os.kill(kept.pid(1), signal.SIGKILL)
    kept.wait(lambda: len(kept.lost) == 4, "three restarts have failed")
    assert [lost.reason for lost in kept.lost] == ["killed by SIGKILL", *["exit code 3"] * 3]
    for _ in range(5):
        kept.look()
    assert kept.pid(1) == 0
    assert capfd.readouterr().err.count("event=rank_stays_down rank=1") == 1
    (kept.path / "refuse-1").unlink()
    ahead[0] = keeper_module.RESTART_WINDOW  # the ranks' beats look old now, but this process did not run meanwhile
    kept.wait(lambda: kept.pid(1), "it is tried again")
    assert len(kept.lost) == 4


def test_a_restarted_rank_that_does_not_load_is_killed(make_kept: Callable[..., Kept]) -> None:
    kept = make_kept(startup_timeout=0.5)
    kept.start()
    (kept.path / "silent-1").touch()
    os.kill(kept.pid(1), signal.SIGKILL)
    kept.wait(lambda: len(kept.lost) >= 2, "it was killed for loading too long")
    assert kept.lost[1].reason == "not loaded within 0.5 s, killed"


def test_loading_ranks_are_killed_at_the_end(make_kept: Callable[..., Kept]) -> None:
    kept = make_kept()
    kept.start()
    first = kept.pid(1)
    (kept.path / "silent-1").touch()
    os.kill(first, signal.SIGKILL)
    kept.wait(lambda: kept.pid(1) not in (0, first), "it is started again")
    kept.keeper.kill_loading()
    (kept.path / "leave-0").touch()
    began = time.monotonic()
    kept.children.end(grace=20.0)
    assert time.monotonic() - began < 10.0
