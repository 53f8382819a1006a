"""The monitor of the ranks with real processes: ends, hangs, restarts, and their limits."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from served import until

from configs.engine import EngineConfig, Plan
from engine.plan import make_plan
from engine.process.heartbeat import last_beat
from front import async_llm
from front.messages import EXIT_WEIGHTS, RankLost
from launch import control
from launch import monitor as monitor_module
from launch.monitor import RankMonitor
from launch.processes import Children, RuntimeDir


class Kept:
    def __init__(self, runtime: RuntimeDir, plan: Plan, startup_timeout: float, clock: Callable[[], float]) -> None:
        self.path = runtime.path
        self.runtime = runtime
        self.children = Children()
        self.monitor = RankMonitor(self.children, plan, runtime, startup_timeout, "beating_rank", clock)
        self.lost: list[RankLost] = []

    def start(self) -> None:
        self.monitor.start()
        self.wait(lambda: self.beats(0) and self.beats(1), "both ranks beat")
        self.monitor.restarts = True

    def look(self) -> None:
        self.lost += self.monitor.look(self.children.exited(0.02))

    def wait(self, condition: Callable[[], object], what: str) -> None:
        def look() -> object:
            self.look()
            return condition()

        until(look, 20.0, what)

    def beats(self, rank: int, name: str = "beat") -> bool:
        return last_beat(self.runtime.file(f"{name}-{rank}")) is not None

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


def test_a_look_comes_well_before_a_stall() -> None:
    """A front that slept between two looks must not be taken for one that was not run."""
    assert min(monitor_module.STALL_SECONDS, control.STALL_SECONDS) > 2 * async_llm._LOOK_AGAIN_SECONDS


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
    kept.monitor.restarts = False
    os.kill(kept.pid(1), signal.SIGKILL)
    kept.wait(lambda: kept.lost, "the loss is told")
    for _ in range(5):
        kept.look()
    assert kept.pid(1) == 0


def test_exit_code_0_is_no_loss(make_kept: Callable[..., Kept]) -> None:
    kept = make_kept()
    kept.start()
    (kept.path / "leave-1").touch()
    kept.wait(lambda: kept.monitor.left, "rank 1 has left")
    assert not kept.lost


def test_pauses_grow_while_a_rank_cannot_start(
    make_kept: Callable[..., Kept], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(monitor_module, "RESTART_PAUSE", 0.01)
    monkeypatch.setattr(monitor_module, "SERVED_SECONDS", 0.05)
    kept = make_kept()
    kept.start()
    kept.wait(lambda: all(time.monotonic() - place.served_since > 0.1 for place in kept.monitor._places), "served")
    (kept.path / "refuse-1").touch()
    os.kill(kept.pid(1), signal.SIGKILL)
    kept.wait(lambda: len(kept.lost) == 6, "five restarts have failed")
    assert kept.lost[1].reason == "exit code 3" and not kept.monitor.hopeless  # the other one serves
    assert [place.tries for place in kept.monitor._places] == [0, 5]
    kept.look()
    said = capfd.readouterr().err
    assert said.count("event=rank_stays_down rank=1") == 2  # from the fourth failed try on
    (kept.path / "refuse-1").unlink()
    kept.wait(lambda: kept.beats(1) and kept.pid(1), "it is back")
    kept.wait(lambda: time.time() - (kept.path / "knows-1").stat().st_mtime > 0.5, "it has served")
    os.kill(kept.pid(1), signal.SIGKILL)
    kept.wait(lambda: len(kept.lost) == 7, "it is lost again")
    assert kept.monitor._places[1].tries == 0


@pytest.mark.attacks
def test_all_ranks_lost_again_and_again(make_kept: Callable[..., Kept], monkeypatch: pytest.MonkeyPatch) -> None:
    """There is hope as long as one has served or may be tried; the first try waits for nothing."""
    monkeypatch.setattr(monitor_module, "SERVED_SECONDS", 0.05)
    monkeypatch.setattr(monitor_module, "RESTART_PAUSE", 30.0)
    kept = make_kept()
    kept.start()
    for round_number in range(1, 4):
        pids = [kept.pid(rank) for rank in (0, 1)]
        kept.wait(lambda: all(time.monotonic() - place.served_since > 0.1 for place in kept.monitor._places), "served")
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        kept.wait(lambda n=round_number: len(kept.lost) == 2 * n, "both losses are told")
        assert not kept.monitor.hopeless
        kept.wait(lambda: all(place.serves for place in kept.monitor._places), "both are back")
    monkeypatch.setattr(monitor_module, "RESTART_PAUSE", 0.001)
    monkeypatch.setattr(monitor_module, "MAX_TRIES", 3)
    for rank in (0, 1):
        (kept.path / f"refuse-{rank}").touch()
        os.kill(kept.pid(rank), signal.SIGKILL)
    kept.wait(lambda: kept.monitor.hopeless, "no hope is left")
    assert re.fullmatch(r"none could be started again in 3 tries; rank [01]: exit code 3", kept.monitor.hopeless)
    kept.monitor.restarts = False
    kept.wait(lambda: kept.monitor.hopeless == "ranks are not started again now", "none is to be started")


@pytest.mark.attacks
def test_a_rank_that_waits_for_weights_is_tried_for_ever(
    make_kept: Callable[..., Kept], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor_module, "RESTART_PAUSE", 0.001)
    monkeypatch.setattr(monitor_module, "MAX_TRIES", 2)
    kept = make_kept()
    kept.start()
    for rank in (0, 1):
        (kept.path / f"refuse-{rank}").write_text(str(EXIT_WEIGHTS))
        os.kill(kept.pid(rank), signal.SIGKILL)
    kept.wait(lambda: len(kept.lost) >= 8, "each has been tried three times")
    assert kept.lost[-1].reason == "exit code 5" and not kept.monitor.hopeless


def test_a_restarted_rank_that_does_not_load_is_killed(make_kept: Callable[..., Kept]) -> None:
    kept = make_kept(startup_timeout=0.5)
    kept.start()
    (kept.path / "silent-1").touch()
    os.kill(kept.pid(1), signal.SIGKILL)
    kept.wait(lambda: len(kept.lost) >= 2, "it was killed for loading too long")
    assert kept.lost[1].reason == "not loaded within 0.5 s, killed"


def test_a_rank_that_hangs_while_it_loads_is_killed(
    make_kept: Callable[..., Kept], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor_module, "LOAD_HANG_SECONDS", 0.5)
    kept = make_kept()
    kept.start()
    (kept.path / "silent-1").touch()
    os.kill(kept.pid(1), signal.SIGKILL)
    kept.wait(lambda: kept.pid(1) and kept.beats(1, "loading"), "it loads again")
    os.kill(kept.pid(1), signal.SIGSTOP)
    kept.wait(lambda: len(kept.lost) >= 2, "it was killed")
    assert kept.lost[1].reason.startswith("hung while loading: no heartbeat for 0.")


# ---- growing and shrinking on purpose ----


def test_ranks_are_added_and_seen_off(make_kept: Callable[..., Kept], capfd: pytest.CaptureFixture[str]) -> None:
    kept = make_kept()
    kept.start()
    kept.monitor.resize(4)
    kept.wait(lambda: kept.beats(2) and kept.beats(3), "both beat")
    assert [(kept.path / f"joined-{rank}").read_text() for rank in (2, 3)] == ["True", "True"]
    assert [(kept.path / f"knows-{rank}").read_text() for rank in range(4)] == ["2", "2", "4", "4"]
    leaver = kept.pid(3)
    kept.monitor.resize(3)
    kept.monitor.resize(3)
    (kept.path / "leave-3").touch()
    kept.wait(lambda: kept.lost, "the front is told of its end")
    assert [(lost.rank, lost.process) for lost in kept.lost] == [(3, leaver)]
    assert not kept.monitor.left and kept.pid(3) == 0 and kept.pid(2)
    os.kill(kept.pid(2), signal.SIGKILL)  # an added one is looked after like the others
    kept.wait(lambda: len(kept.lost) == 2 and kept.beats(2), "it is back")
    (kept.path / "leave-3").unlink()
    kept.monitor.resize(4)
    kept.wait(lambda: kept.pid(3) and kept.beats(3), "and another one in the place of that which left")
    for _ in range(5):
        kept.look()
    said = capfd.readouterr().err
    assert (said.count("event=rank_added"), said.count("event=rank_left"), said.count("event=rank_lost")) == (3, 1, 1)


def test_wanted_again_before_it_has_left(make_kept: Callable[..., Kept]) -> None:
    """It has been told to leave already, so a new process takes its place."""
    kept = make_kept()
    kept.start()
    leaver = kept.pid(1)
    kept.monitor.resize(1)
    kept.monitor.resize(2)
    kept.look()
    assert kept.pid(1) == leaver
    (kept.path / "leave-1").touch()
    kept.wait(lambda: kept.lost, "it has left")
    (kept.path / "leave-1").unlink()
    kept.wait(lambda: kept.pid(1) not in (0, leaver) and kept.beats(1), "the next one is there")
    assert [lost.process for lost in kept.lost] == [leaver] and not kept.monitor.left


@pytest.mark.parametrize("way", ["loading", "hung", "stays", "killed", "down"])
def test_a_rank_that_does_not_leave_by_itself(
    make_kept: Callable[..., Kept], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Nothing is waited for without a bound, and none of this is a loss that is made good."""
    monkeypatch.setattr(monitor_module, "LEAVE_SECONDS", 0.3)
    if way == "down":
        monkeypatch.setattr(monitor_module, "RESTART_PAUSE", 0.2)
    kept = make_kept()
    kept.start()
    if way in ("loading", "down"):
        (kept.path / ("silent-2" if way == "loading" else "refuse-2")).touch()
    kept.monitor.resize(3)
    if way == "down":
        kept.wait(lambda: len(kept.lost) == 4, "it cannot be started")
        kept.lost.clear()
    else:
        kept.wait(lambda: kept.beats(2, "loading" if way == "loading" else "beat"), "it has started")
    leaver = kept.pid(2)
    if way in ("hung", "killed"):
        os.kill(leaver, signal.SIGSTOP if way == "hung" else signal.SIGKILL)
    kept.monitor.resize(2)
    if way != "down":
        kept.wait(lambda: kept.lost, "it has ended")
        assert [(lost.rank, lost.process, lost.reason) for lost in kept.lost] == [
            (2, leaver, "it was not wanted any more")
        ]
    for _ in range(5):
        kept.look()
    assert kept.pid(2) == 0 and len(kept.lost) == (way != "down") and not kept.monitor.left


def test_loading_ranks_are_killed_at_the_end(make_kept: Callable[..., Kept]) -> None:
    kept = make_kept()
    kept.start()
    first = kept.pid(1)
    (kept.path / "silent-1").touch()
    os.kill(first, signal.SIGKILL)
    kept.wait(lambda: kept.pid(1) not in (0, first), "it is started again")
    kept.monitor.kill_loading()
    (kept.path / "leave-0").touch()
    began = time.monotonic()
    kept.children.end(grace=20.0)
    assert time.monotonic() - began < 10.0
