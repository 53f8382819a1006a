"""A server that grows and shrinks under load, and loses ranks while it does: no client notices."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hf_tiny import make_qwen3
from moesaic_here import run_here
from served import Server, command_line, served, until
from streams import mode, undisturbed, wave, waves

from engine.process.heartbeat import last_beat
from launch.processes import PREFIX
from models.tiny import CHECKPOINT

KEY = "boss"


class Elastic:
    """A server, and what its streams say when nothing happens."""

    def __init__(self, server: Server, log: Path) -> None:
        self.server = server
        self.log = log
        self.expected = asyncio.run(wave(server))

    def resize(self, count: int) -> None:
        table = self.server.post("/admin/ranks", {"count": count}, KEY)
        assert table["count"] == count

    def whole(self, count: int) -> None:
        until(lambda: mode(self.server) == "full" and len(self.table()) == count, 90, f"{count} ranks serve")

    def table(self) -> list[dict[str, Any]]:
        ranks: list[dict[str, Any]] = self.server.get("/admin/ranks", KEY)["ranks"]
        return ranks

    def kill(self, rank: int) -> None:
        """As soon as there is such a process; until it has been noticed."""
        pid = until(lambda: self.server.children().get(f"rank {rank}"), 30, f"rank {rank} has started")
        os.kill(pid, signal.SIGKILL)
        until(lambda: f"event=rank_lost rank={rank} pid={pid} " in self.log.read_text(), 30, "it is missed")
        until(lambda: all(row["pid"] != pid for row in self.table()), 30, "it is no member")

    def stop(self, rank: int, beat: str) -> None:
        """As soon as it beats; not until anybody notices."""

        def beats() -> bool:
            name, found = f"/memfd:{PREFIX}{beat}-{rank} ", False
            for file in Path(f"/proc/{self.server.process.pid}/fd").iterdir():
                with contextlib.suppress(OSError):  # it has just been closed
                    found |= os.readlink(file).startswith(name) and last_beat(file) is not None
            return found

        pid = until(lambda: self.server.children().get(f"rank {rank}"), 60, f"rank {rank} has started")
        until(beats, 60, f"rank {rank} beats")
        os.kill(pid, signal.SIGSTOP)

    def unnoticed(self, *events: Callable[[], object]) -> None:
        """These happen while clients stream, and the streams are as ever."""

        def happen() -> None:
            for event in events:
                event()

        for found in asyncio.run(waves(self.server, happen)):
            assert found == self.expected

    def check_end(self, num_ranks: int) -> None:
        assert asyncio.run(wave(self.server)) == self.expected
        ranks = {name for name in self.server.children() if name != "front"}
        assert ranks == {f"rank {rank}" for rank in range(num_ranks)}
        log = self.log.read_text()
        assert "Traceback" not in log and "has not left" not in log


@contextlib.contextmanager
def elastic(tmp_path: Path, *arguments: str) -> Iterator[Elastic]:
    with served(tmp_path, "--admin-api-key", KEY, *arguments) as server:
        yield Elastic(server, tmp_path / "server.log")


@pytest.mark.slow
@pytest.mark.parametrize("most", [3, 4])
def test_growing_and_shrinking_with_losses(tmp_path: Path, most: int) -> None:
    """2, 3 (and 4) and 2 ranks; one that was added is killed while it loads, and one that stays while others come or leave."""
    with elastic(tmp_path, "-dp", "2") as it:
        it.unnoticed(lambda: it.resize(3), lambda: it.kill(2), lambda: it.whole(3))
        assert [row["losses"] for row in it.table()] == [0, 0, 0]  # it was not a member
        if most > 3:
            it.unnoticed(lambda: it.resize(4), lambda: it.kill(0), lambda: it.whole(4))
        leavers = [row["pid"] for row in it.table()[2:]]
        it.unnoticed(lambda: it.resize(2), lambda: it.kill(1), lambda: it.whole(2))
        until(lambda: not any(map(command_line, leavers)), 20, "they have left")
        assert [row["losses"] for row in it.table()] == [int(most > 3), 1]
        it.check_end(2)
        until(lambda: it.log.read_text().count("event=rank_left") == most - 2, 20, "the supervisor has seen them off")
        assert it.log.read_text().count("event=rank_added") == most - 2


@pytest.mark.slow
def test_while_experts_are_balanced(tmp_path: Path) -> None:
    restless = {"window_size": 20, "memory_steps": 5, "reweight_interval": 2, "move_interval": 4, "min_gain": 0.0}
    options = ("--dtype", "float32", "--enable-eplb", "--eplb-config", json.dumps(restless))
    with elastic(tmp_path, "-dp", "2", *options) as it:
        it.unnoticed(lambda: it.resize(3), lambda: it.whole(3))
        it.unnoticed(lambda: it.kill(0), lambda: it.whole(3), lambda: it.resize(4), lambda: it.whole(4))
        status = it.server.get("/eplb/status")
        assert status["steps"] > 0 and not status.get("last_error") and not status.get("failures")
        assert it.server.get("/eplb/placement")["ranks"] == 4
        it.unnoticed(lambda: it.resize(2), lambda: it.whole(2))
        it.check_end(2)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_many_resizes_in_a_row(tmp_path: Path, backend: str) -> None:
    """Up and down before anybody has loaded, or left; a rank that hangs while it is to leave, and one while it loads."""
    with elastic(tmp_path, "-dp", "3", "--all2all-backend", backend) as it:
        it.unnoticed(*[lambda count=count: it.resize(count) for count in (5, 3, 4, 2, 5, 4)], lambda: it.whole(4))
        it.unnoticed(lambda: it.stop(3, "beat"), lambda: it.resize(3), lambda: it.resize(4), lambda: it.whole(4))
        it.unnoticed(lambda: it.resize(5), lambda: it.stop(4, "loading"), lambda: it.whole(5))
        assert re.search(
            r"rank_lost rank=4 .*hung", it.log.read_text()
        )  # while it loads, which takes a moment, or after that
        it.unnoticed(lambda: it.kill(4), lambda: it.resize(2), lambda: it.whole(2))
        it.check_end(2)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["experts", "dense"])
def test_from_one_rank_to_two_and_back(tmp_path: Path, model: str) -> None:
    arguments = []
    if model == "dense":
        make_qwen3(tmp_path / "dense", vocab_size=2048)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(CHECKPOINT / name, tmp_path / "dense")
        arguments = [str(tmp_path / "dense")]
    with elastic(tmp_path, *arguments, "-dp", "1") as it:
        it.unnoticed(lambda: it.resize(2), lambda: it.whole(2))
        assert asyncio.run(wave(it.server)) == it.expected
        it.unnoticed(lambda: it.kill(0), lambda: it.whole(2))
        it.unnoticed(lambda: it.resize(1), lambda: it.whole(1))
        it.check_end(1)


def test_the_command_and_what_it_refuses(tmp_path: Path) -> None:
    with served(tmp_path, "--admin-api-key", KEY, "-dp", "3", "--num-redundant-experts", "8") as server:

        def in_a_process(*words: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "moesaic", *words]
            return subprocess.run(command, capture_output=True, text=True, timeout=120)

        def ranks(
            *options: str, key: str = KEY, run: Callable[..., subprocess.CompletedProcess[str]] = in_a_process
        ) -> subprocess.CompletedProcess[str]:
            return run("ranks", "--url", server.url, "--admin-api-key", key, *options)

        shown = ranks()
        assert shown.returncode == 0 and shown.stdout.count("up") == 3, shown.stderr
        table = json.loads(ranks("--json").stdout)
        assert (table["count"], table["fewest"], table["mode"]) == (3, 2, "full")
        assert [row["pid"] for row in table["ranks"]] == [server.children()[f"rank {rank}"] for rank in range(3)]
        refused = ranks("--count", "1", run=run_here)
        assert refused.returncode == 2
        assert "count must be at least 2: 1 rank(s) of 8 slots have room for 8 of 16 experts" in refused.stderr
        assert "count must be at most" in ranks("--count", "1000", run=run_here).stderr
        assert "administrator's key" in ranks(key="wrong", run=run_here).stderr
        os.kill(server.children()["rank 0"], signal.SIGKILL)
        until(lambda: mode(server) == "degraded", 20, "rank 0 is lost")
        not_now = ranks("--count", "2", run=run_here)
        assert "HTTP 409: 1 of the 2 ranks that would stay serve now, and it takes 2; wait for rank 0" in not_now.stderr
        until(lambda: mode(server) == "full", 60, "it is back")
        smaller = ranks("--count", "2", "--json")
        assert smaller.returncode == 0 and json.loads(smaller.stdout)["count"] == 2
        until(lambda: len(server.get("/admin/ranks", KEY)["ranks"]) == 2, 20, "rank 2 has left")
        expected = undisturbed(server)

        def grow() -> None:
            assert ranks("--count", "3").returncode == 0
            until(lambda: mode(server) == "full", 60, "3 ranks serve")

        assert asyncio.run(wave(server, grow)) == expected
        assert len(server.get("/admin/ranks", KEY)["ranks"]) == 3
