"""Hangs that are planted into real servers have a name: who waits for whom, and where; and they end as survived faults."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hanging import losses
from host_servers import host_servers
from planted import AWAY, DEVICE, NATIVE, PLACEMENT, SKIP, SLEEP, plant, planting
from served import Server, served, until
from streams import mode, wave

pytestmark = [pytest.mark.attacks, pytest.mark.slow]

OPTIONS = ("--dtype", "float32", "--enable-dbo", "off", "--exchange-timeout", "4", "--admin-api-key", "key")
# Said before a rank that hangs is killed for it, after 2 s.
EARLY = ("--wait-warning-seconds", "1")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "site"
    folder.mkdir()
    with planting(folder):
        yield folder


def lines(tmp_path: Path, event: str = "wait") -> list[str]:
    return [line for line in (tmp_path / "server.log").read_text().splitlines() if f"event={event} " in line]


def survived(server: Server, tmp_path: Path, during: Callable[[], None]) -> float:
    """The streams are what they are without the fault, and all ranks serve again; seconds from the fault to the first line."""
    expected = asyncio.run(wave(server))
    assert server.get("/debug/waits", "key")["now"] == []
    seconds: list[float] = []

    def fault() -> None:
        during()
        began = time.monotonic()
        until(lambda: lines(tmp_path), 15, "the wait has a name")
        seconds.append(time.monotonic() - began)

    assert asyncio.run(wave(server, fault, after=80)) == expected
    until(lambda: mode(server) == "full", 90, "all ranks serve")
    return seconds[0]


def named(tmp_path: Path, rank: int) -> str:
    """The line that blames that rank."""
    said = lines(tmp_path)
    found = [line for line in said if re.search(rf"waits [0-9.]+ s for rank {rank}: last seen [0-9.]+ s ago in ", line)]
    assert found, said
    return found[0]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_thread_that_sleeps(tmp_path: Path, site: Path, backend: str) -> None:
    with served(tmp_path, "-dp", "3", "--all2all-backend", backend, *OPTIONS, *EARLY) as server:
        survived(server, tmp_path, lambda: plant(site, server.children()["rank 1"], SLEEP))
        waits = server.get("/debug/waits", "key")
        assert waits["past"] and waits["threshold_seconds"] == 1.0
        assert any([other["rank"] for other in past["wait"]["waits_for"]] == [1] for past in waits["past"])
        assert "moesaic:long_waits_total" in server.get("/metrics")
    assert re.search(r"rank [02].*, step [0-9]+, ", named(tmp_path, 1))
    assert "reason='hung: no heartbeat for 2." in lines(tmp_path, "rank_lost")[0]


@pytest.mark.parametrize("what", [DEVICE, NATIVE], ids=["python", "native"])
def test_the_thread_that_computes_hangs(tmp_path: Path, site: Path, what: str) -> None:
    with served(tmp_path, "-dp", "2", "--async-scheduling", *OPTIONS, *EARLY) as server:
        survived(server, tmp_path, lambda: plant(site, server.children()["rank 1"], what))
    assert "rank 0, step" in named(tmp_path, 1)


def test_a_process_that_is_stopped(tmp_path: Path, site: Path) -> None:
    with served(tmp_path, "-dp", "2", *OPTIONS, *EARLY) as server:
        survived(server, tmp_path, lambda: os.kill(server.children()["rank 0"], signal.SIGSTOP))
    assert "its process is stopped" in named(tmp_path, 0)


def test_a_rank_that_leaves_out_a_step(tmp_path: Path, site: Path) -> None:
    """It waits for the others too, but they were there first. Nobody hangs, so they meet again."""
    with served(tmp_path, "-dp", "3", *OPTIONS, *EARLY) as server:
        survived(server, tmp_path, lambda: plant(site, server.children()["rank 2"], SKIP))
        assert not lines(tmp_path, "rank_lost")
    assert re.search(r"rank [01] .*waits itself in step [0-9]+, agreement", named(tmp_path, 2))


def test_a_placement_that_differs(tmp_path: Path, site: Path) -> None:
    with served(tmp_path, "-dp", "3", *OPTIONS) as server:
        expected = asyncio.run(wave(server))
        children = server.children()
        assert asyncio.run(wave(server, lambda: plant(site, children["rank 1"], PLACEMENT), after=80)) == expected
        until(lambda: mode(server) == "full", 90, "all ranks serve")
    log = (tmp_path / "server.log").read_text()
    assert "the ranks disagree on the checksum of the placement" in log and "not with the others: rank 1" in log
    assert [line.partition(" pid=")[0] for line in losses(log)] == ["event=rank_lost rank=1"]


def test_a_rank_that_does_not_come_to_the_meeting(tmp_path: Path, site: Path) -> None:
    """It is killed in the end, because the others wait for it in vain."""
    with served(tmp_path, "-dp", "3", *OPTIONS, *EARLY) as server:

        def fault() -> None:
            plant(site, server.children()["rank 1"], AWAY)
            time.sleep(0.3)
            os.kill(server.children()["rank 2"], signal.SIGKILL)

        survived(server, tmp_path, fault)
    # Rank 2 may have come back by then, and wait too.
    assert re.search(r"rank 0(| \(as rank 2\)), epoch [0-9]+, meeting, waits [0-9.]+ s for rank 1", lines(tmp_path)[0])
    assert "event=rank_accused rank=1" in (tmp_path / "server.log").read_text()


def test_a_host_that_is_heard_by_none(tmp_path: Path) -> None:
    """What it sends is dropped; what is sent to it comes. It is lost, and comes back when it is heard again."""
    arguments = ("-dp", "2", "--dtype", "float32", "--enable-dbo", "off", *EARLY)
    with host_servers(tmp_path, *arguments) as servers:
        servers.start(0, "-dpl", "1")
        servers.start(1, "--headless", "-dpr", "1")
        servers.ready()
        expected = servers.streams(4, 150)
        found: list[list[list[int]]] = []
        thread = threading.Thread(target=lambda: found.append(servers.streams(4, 150)))
        thread.start()
        servers.hosts.mute(1)
        until(lambda: "event=host_lost" in servers.log(0), 30, "the host is missed")
        thread.join()
        assert found == [expected]
        text = next(line for line in servers.log(0).splitlines() if "event=wait " in line)
        servers.hosts.limit(None)
        until(lambda: servers.mode() == "full", 90, "the host is back")
    assert re.search(r"rank 0, .* waits [0-9.]+ s for rank 1: last seen [0-9.]+ s ago in ", text), text


def test_a_front_that_does_not_read(tmp_path: Path, site: Path) -> None:
    """Nothing is lost when it goes on."""
    with served(tmp_path, "-dp", "2", *OPTIONS, *EARLY) as server:
        front = server.children()["front"]

        def stop() -> None:
            os.kill(front, signal.SIGSTOP)
            until(lambda: lines(tmp_path), 30, "it has a name")
            os.kill(front, signal.SIGCONT)

        survived(server, tmp_path, stop)
        assert not lines(tmp_path, "rank_lost")
    assert "the front's loop stands still, its process is stopped" in lines(tmp_path)[0]
    assert lines(tmp_path, "wait_over")
