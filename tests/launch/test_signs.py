"""What the kernel says of a process whose loop makes no mark, and what the monitor makes of it, in fake time."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from served import until

from configs.engine import EngineConfig
from dbo.alive import mark
from engine.plan import make_plan
from engine.process.heartbeat import LoopBeat, last_beat
from launch.monitor import HANG_SECONDS, WORK_SECONDS, RankMonitor
from launch.signs import Signs, Window, signs_of


def python(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code])


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def seconds(pid: int) -> float:
    signs = signs_of(pid)
    assert signs is not None
    return signs.seconds


def test_a_process_that_computes_is_at_work(processes: list[subprocess.Popen[bytes]]) -> None:
    processes.append(python("while True: pass"))
    pid = processes[0].pid
    until(lambda: seconds(pid) > 0.2, 20, "it computes")
    assert cast(Signs, signs_of(pid)).runs
    os.kill(pid, signal.SIGSTOP)
    until(lambda: not cast(Signs, signs_of(pid)).runs, 20, "it is stopped")
    assert seconds(pid) == seconds(pid)


def test_work_of_a_child_counts(processes: list[subprocess.Popen[bytes]]) -> None:
    """A compiler that was called, say."""
    processes.append(
        python("import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'], timeout=30)")
    )
    pid = processes[0].pid
    children = Path(f"/proc/{pid}/task/{pid}/children")
    if not children.exists():
        pytest.skip("this kernel does not tell the children of a process")
    until(children.read_text, 20, "it has a child")
    before = seconds(pid)
    until(lambda: seconds(pid) > before + 0.3, 20, "its child computes")
    assert not cast(Signs, signs_of(pid)).runs
    for child in children.read_text().split():
        os.kill(int(child), signal.SIGKILL)


def test_nothing_is_known_of_a_process_that_is_gone() -> None:
    ended = python("pass")
    ended.wait()
    assert signs_of(ended.pid) is None


@pytest.mark.parametrize(
    ("share", "states", "at_work"),
    [
        (0.0, "SSSSSSSSSS", False),
        (0.5, "SSSSSSSSSS", True),  # another thread of it computes
        (0.01, "RSRSRSRSRS", False),  # a loop that looks now and then, on a machine with too much to do
        (0.04, "RSRSRSRSRS", True),  # it waits for a core
        (0.0, "DSDSDSDSDS", True),  # or for a disk
        (0.04, "SSSRSSSSSS", False),
    ],
)
def test_a_window(share: float, states: str, at_work: bool) -> None:
    window = Window(50.0, 7.0)
    for index, state in enumerate(states):
        window.look(Signs(7.0 + 0.1 * index * share, state == "R", state == "D"), 50.0 + 0.1 * index)
    assert window.at_work is at_work


def test_the_beat_is_that_of_the_loop(tmp_path: Path) -> None:
    beat = LoopBeat(tmp_path / "beat-0")
    first = last_beat(tmp_path / "beat-0")
    mark()
    second = last_beat(tmp_path / "beat-0")
    assert first is not None and second is not None and first < second
    assert second == last_beat(tmp_path / "beat-0")  # no thread writes it
    beat.close()
    mark()
    assert last_beat(tmp_path / "beat-0") is not None


class Fake:
    """One rank, whose process is none: its beats, its work and the time are told."""

    def __init__(self, path: Path, **config: Any) -> None:
        self.now, self.work, self.killed = 100.0, 0.0, False
        self.path = path
        process = SimpleNamespace(pid=4711, kill=self._kill, returncode=None)
        child = SimpleNamespace(process=process, rank=0, name="rank 0")
        children = SimpleNamespace(start=lambda *arguments: child, all=[child])
        runtime = SimpleNamespace(
            path=path,
            options=[],
            write=lambda name, value: path / name,
            file=lambda name: path / name,
            clear=lambda name: (path / name).unlink(missing_ok=True),
            add_cache=lambda rank: None,
            keep=lambda name, file: None,
            kept=lambda name: None,
        )
        self.monitor = RankMonitor(
            cast(Any, children),
            make_plan(EngineConfig(**config)),
            cast(Any, runtime),
            60.0,
            clock=lambda: self.now,
            signs=lambda pid: Signs(self.work, False),
        )
        self.monitor.start()
        self.beat()

    def _kill(self) -> None:
        self.killed = True

    def beat(self) -> None:
        (self.path / "beat-0").write_bytes(struct.pack("=d", self.now))

    def run(self, seconds: float, works: bool = False) -> float:
        """How long it lived of them."""
        began = self.now
        while self.now < began + seconds and not self.killed:
            self.now += 0.1
            self.work += 0.1 * works
            self.monitor.look([])
        return self.now - began


def test_a_loop_that_sleeps_is_killed_after_two_seconds(tmp_path: Path) -> None:
    fake = Fake(tmp_path)
    assert HANG_SECONDS < fake.run(10.0) < HANG_SECONDS + 0.3


def test_a_loop_at_work_is_not_killed_until_it_hangs(tmp_path: Path) -> None:
    fake = Fake(tmp_path)
    assert fake.run(7.0, works=True) >= 7.0
    fake.beat()
    fake.run(5.0, works=True)
    assert not fake.killed
    assert fake.run(10.0) < HANG_SECONDS + 1.3 and fake.killed


@pytest.mark.parametrize(("exchange_timeout", "bound"), [(5.0, WORK_SECONDS), (30.0, 30.0)])
def test_no_work_takes_for_ever(tmp_path: Path, exchange_timeout: float, bound: float) -> None:
    fake = Fake(tmp_path, exchange_timeout=exchange_timeout)
    assert bound < fake.run(100.0, works=True) < bound + 0.3


def test_a_monitor_that_was_not_run_gives_the_ranks_their_time_anew(tmp_path: Path) -> None:
    fake = Fake(tmp_path)
    fake.now += 50.0
    fake.monitor.look([])
    assert not fake.killed
    assert HANG_SECONDS < fake.run(10.0) < HANG_SECONDS + 0.3


def test_the_accused_process_is_killed_and_no_other(tmp_path: Path) -> None:
    fake = Fake(tmp_path)
    fake.monitor.fence(4712)
    assert not fake.killed
    fake.monitor.fence(4711)
    assert fake.killed
