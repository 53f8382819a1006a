"""The process that waits to become a rank, with real processes that are really killed."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import command_line, until

from configs.engine import EngineConfig
from engine.plan import make_plan
from engine.process.heartbeat import last_beat
from front.messages import RankLost
from launch import monitor as monitor_module
from launch.monitor import RankMonitor
from launch.processes import Children, RuntimeDir
from launch.standby import KEPT_FREE, NAME, Standby

pytestmark = pytest.mark.store


class Kept:
    """Two ranks that only beat (beating_rank.py), and the processes that wait to become one."""

    def __init__(self, runtime: RuntimeDir) -> None:
        self.runtime = runtime
        self.children = Children()
        plan = make_plan(EngineConfig(data_parallel_size=2))
        self.monitor = RankMonitor(self.children, plan, runtime, 30.0, "beating_rank", standby=True)
        self.lost: list[RankLost] = []
        self.monitor.start()
        self.wait(lambda: self.beats(0) and self.beats(1), "both ranks beat")
        self.monitor.restarts = True

    def wait(self, condition: object, what: str) -> None:
        def look() -> object:
            self.lost += self.monitor.look(self.children.exited(0.02))
            return condition()  # type: ignore[operator]

        until(look, 30.0, what)

    def beats(self, rank: int) -> bool:
        return last_beat(self.runtime.file(f"beat-{rank}")) is not None

    def pid(self, rank: int) -> int:
        return next((child.process.pid for child in self.children.all if child.rank == rank), 0)

    @property
    def standby(self) -> Standby:
        standby = self.monitor._standby
        assert standby is not None
        return standby

    def wait_ready(self, count: int = 2) -> list[int]:
        """The processes that wait, once so many do, the next rank first."""
        self.wait(lambda: len(self.standby.ready) == count, "they wait")
        return self.standby.ready


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setattr(monitor_module, "STANDBY_SECONDS", 0.0)  # these ranks beat as if they had work all the time
    runtime = RuntimeDir(Path(tempfile.gettempdir()))
    one = Kept(runtime)
    yield one
    one.children.end(grace=0.0)
    runtime.close()


def test_it_becomes_the_lost_rank(kept: Kept) -> None:
    """And another one waits then."""
    for rank in (1, 0):
        (waiting, other), before = kept.wait_ready(), kept.pid(rank)
        os.kill(before, signal.SIGKILL)
        kept.wait(lambda rank=rank, pid=waiting: kept.pid(rank) == pid and kept.beats(rank), "it is back")
        words = command_line(waiting)
        assert words[words.index("-m") + 1] == "beating_rank" and words[words.index("--rank") + 1] == str(rank)
        assert kept.lost.pop().process == before and not kept.lost
        assert kept.wait_ready()[0] == other
    assert len(kept.children.all) == 5  # with the one that they are forked from


def test_all_ranks_are_lost_at_once(kept: Kept) -> None:
    """There is one for each."""
    waiting = kept.wait_ready()
    for rank in (0, 1):
        os.kill(kept.pid(rank), signal.SIGKILL)
    kept.wait(lambda: {kept.pid(0), kept.pid(1)} == {*waiting} and kept.beats(0) and kept.beats(1), "all are back")
    assert not {*kept.wait_ready()} & {*waiting}


def test_one_waits_where_memory_is_short(kept: Kept) -> None:
    kept.standby._free = lambda: KEPT_FREE - 1
    kept.wait_ready(1)
    for _ in range(3):
        kept.monitor.look([])
    assert len(kept.standby.processes) == 1
    kept.standby._free = lambda: KEPT_FREE
    kept.wait_ready(2)


@pytest.mark.parametrize("name, seconds", [("STANDBY_SECONDS", 0.0), ("CALM_SECONDS", -1.0)])
def test_the_first_one_does_not_begin_beside_work(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, name: str, seconds: float
) -> None:
    """It does when the ranks have served for long enough, and when they have no work."""
    for least in ("STANDBY_SECONDS", "CALM_SECONDS"):
        monkeypatch.setattr(monitor_module, least, 1e6)
    for _ in range(3):
        assert not kept.monitor.look([]) and not kept.standby.processes
    monkeypatch.setattr(monitor_module, name, seconds)
    kept.wait_ready()


def test_its_own_end_costs_nothing(kept: Kept) -> None:
    ranks = kept.pid(0), kept.pid(1)
    first, second = kept.wait_ready()
    os.kill(first, signal.SIGKILL)
    kept.wait(lambda: kept.standby.ready == [second], "it is seen")
    assert kept.wait_ready()[0] == second
    assert (kept.pid(0), kept.pid(1)) == ranks and not kept.lost


def test_those_that_end_at_the_moment_of_a_loss(kept: Kept) -> None:
    """The next one becomes the rank, or it is started as it is without any."""
    for count in (1, 2):
        waiting, rank = kept.wait_ready(), kept.pid(1)
        for pid in (*waiting[:count], rank):
            os.kill(pid, signal.SIGKILL)
        kept.wait(lambda rank=rank: kept.pid(1) not in (0, rank) and kept.beats(1), "it is back")
        assert kept.pid(1) not in waiting[:count] and [lost.process for lost in kept.lost] == [rank]
        kept.lost.clear()


def test_one_that_does_not_begin_as_a_rank(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor_module, "BECOME_SECONDS", 0.5)
    (first, _), rank = kept.wait_ready(), kept.pid(1)
    os.kill(first, signal.SIGSTOP)
    os.kill(rank, signal.SIGKILL)
    kept.wait(lambda: kept.pid(1) not in (0, rank, first) and kept.beats(1), "it is back")
    assert [lost.process for lost in kept.lost] == [rank, first]
    assert kept.lost[1].reason == "it did not begin as a rank, killed"


def test_an_added_rank_is_one_that_waited(kept: Kept) -> None:
    waiting = kept.wait_ready()
    kept.monitor.resize(3)
    kept.wait(lambda: kept.pid(2) == waiting[0] and kept.beats(2), "it serves")
    assert not kept.lost and kept.wait_ready(3)[0] == waiting[1]


def test_it_is_not_waited_for_at_the_end(kept: Kept) -> None:
    waiting = kept.wait_ready()
    assert [child.name for child in kept.children.all if child.process.pid in waiting] == [NAME, NAME]
    for rank in (0, 1):
        (kept.runtime.path / f"leave-{rank}").touch()
    kept.children.end(grace=60.0)
    assert not any(map(command_line, waiting))
