"""The process that ranks are forked from, started before all else (launch/early.py)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from served import descendants, served

from launch.early import drop_early, start_early, take_source

pytestmark = pytest.mark.store


def started_at(pid: int) -> int:
    """In ticks of the system's clock (proc_pid_stat(5))."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def test_the_one_that_was_started_early_is_taken_once() -> None:
    start_early()
    (pid,) = (pid for pid in descendants(os.getpid()) if "fork_process" in Path(f"/proc/{pid}/cmdline").read_text())
    early, other = take_source(), take_source()
    for source in (early, other):
        source.socket.close()  # nothing is to be forked
        assert source.process.wait(30.0) == 0
    assert early.process.pid == pid != other.process.pid


def test_one_that_is_not_wanted_ends() -> None:
    start_early()
    drop_early()
    source = take_source()
    source.process.kill()
    source.process.wait()
    source.socket.close()
    assert not [pid for pid in descendants(os.getpid()) if "fork_process" in Path(f"/proc/{pid}/cmdline").read_text()]


def test_a_server_starts_it_first(tmp_path: Path) -> None:
    with served(tmp_path, "-dp", "1") as server:
        lines = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in descendants(server.process.pid)}
        (source,) = (pid for pid, line in lines.items() if "engine.process.fork_process" in line)
        (front,) = (pid for pid, line in lines.items() if "server.process" in line)
        assert started_at(source) < started_at(front)
