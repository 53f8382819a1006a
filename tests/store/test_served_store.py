"""Real servers whose ranks share their weights: what a loss costs, and what is left of it all."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import re
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import streams
from served import Server, descendants, served, starting, until
from streams import NUM_STREAMS, mode, wave
from test_losing_all import all_serve, copied, kill_all, ranks_of

from engine.process.places import STORE
from store.memory import _FIRST_PART_LOCK, _HEADER

pytestmark = pytest.mark.store

RESTLESS = {"window_size": 20, "memory_steps": 5, "reweight_interval": 2, "move_interval": 4, "min_gain": 0.0}


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "NUM_STREAMS", 8)
    monkeypatch.setattr(streams, "NUM_TOKENS", 120)


def store_file(server: Server) -> Path | None:
    """As a process that has it open finds it; None: the supervisor has not made it yet."""
    for file in Path(f"/proc/{server.process.pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(file).startswith(f"/memfd:{STORE} "):
                return file
    return None


def store_of(server: Server) -> int:
    """The inode of its memory."""
    file = store_file(server)
    assert file is not None, "the supervisor holds no store"
    return file.stat().st_ino


def holders(inode: int) -> list[int]:
    """Processes that have it open."""
    found = []
    for file in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if file.stat().st_ino == inode and os.readlink(file).startswith(f"/memfd:{STORE} "):
                found.append(int(file.parts[2]))
    return found


def mappings(inode: int) -> dict[int, set[str]]:
    """Of each process that maps it, with which rights."""
    found: dict[int, set[str]] = {}
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text().splitlines()
        except OSError:
            continue
        rights = {line.split()[1] for line in lines if line.split()[4] == str(inode) and f"/memfd:{STORE}" in line}
        if rights:
            found[int(maps.parent.name)] = rights
    return found


def maps_of_ranks(server: Server, inode: int) -> list[set[str]]:
    """Their rights; besides them only processes that wait may map it."""
    found, children = mappings(inode), server.children()
    assert set(found) <= {*children.values(), *server.standby()}, found
    return [found.get(pid, set()) for pid in ranks_of(server).values()]


def waiting(folder: Path) -> list[int]:
    """The processes of which the log says that they wait to become ranks, also those that do not any more."""
    return [int(pid) for pid in re.findall(r"event=standby_ready pid=(\d+)", (folder / "server.log").read_text())]


def test_ranks_come_back_without_the_checkpoint(tmp_path: Path) -> None:
    """All of them, twice; and one is enough for every expert. The first that comes back is the process that waited, which held
    no weights until then."""
    weights = copied(tmp_path)
    with served(tmp_path, "-dp", "3", "--enable-dbo", "off", "--model", str(tmp_path / "model")) as server:
        expected = asyncio.run(wave(server))
        inode = store_of(server)
        assert maps_of_ranks(server, inode) == [{"r--s"}] * 3
        assert 'weight_store_mappings{model_name="moesaic-tiny",store="0"} 3.0' in server.get("/metrics").replace(
            str(tmp_path / "model"), "moesaic-tiny"
        )
        waited = until(lambda: waiting(tmp_path), 60, "a process waits to become a rank")[0]
        assert mappings(inode)[waited] == {"r--s"}
        weights.unlink()

        def all_but_one() -> None:
            for name in ("rank 0", "rank 2"):
                os.kill(ranks_of(server)[name], signal.SIGKILL)
            until(lambda: mode(server) == "degraded", 30, "one serves alone")
            all_serve(server)

        assert asyncio.run(wave(server, all_but_one)) == expected
        assert waited in ranks_of(server).values()
        assert asyncio.run(wave(server, lambda: kill_all(server), after=2 * NUM_STREAMS)) == expected
        all_serve(server)
        assert maps_of_ranks(server, inode) == [{"r--s"}] * 3
    assert not mappings(inode), "memory is left"
    log = (tmp_path / "server.log").read_text()
    assert "Traceback" not in log and "experts_reloaded" not in log


def test_nothing_is_left_of_a_killed_supervisor(tmp_path: Path) -> None:
    with served(tmp_path, "-dp", "2") as server:
        inode, (standby, *_) = store_of(server), until(server.standby, 30, "a process waits to become a rank")
        children = descendants(server.process.pid)
        assert standby in children and len(children) > len(server.children())
        server.process.kill()
        server.process.wait(30)
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), 30, "all have ended")
        assert not mappings(inode)


@pytest.mark.slow
def test_a_rank_is_one_that_waited(tmp_path: Path) -> None:
    """It has rehearsed in the store until then, and its own end costs nothing. (It gets ready with a low priority.)"""
    with served(tmp_path, "-dp", "2") as server:
        expected = asyncio.run(wave(server))
        inode = store_of(server)
        first, second = until(lambda: waiting(tmp_path)[1:] and waiting(tmp_path), 180, "two wait to become a rank")
        os.kill(first, signal.SIGKILL)
        assert mappings(inode)[second] == {"r--s"}
        lost = ranks_of(server)["rank 1"]
        assert asyncio.run(wave(server, lambda: os.kill(lost, signal.SIGKILL))) == expected
        all_serve(server)
        assert ranks_of(server)["rank 1"] == second and mappings(inode)[second] == {"r--s"}
        assert "rank_losses_total" in server.get("/metrics") and mode(server) == "full"
    assert (tmp_path / "server.log").read_text().count("event=rank_restarted") == 1


def test_a_rank_killed_while_it_fills(tmp_path: Path) -> None:
    """Before a server is ready it ends with the first rank that is lost; no process and no memory stays behind."""
    with starting(tmp_path, "-dp", "2") as server:
        until(lambda: ranks_of(server), 60, "a rank has been started")
        inode, children = store_of(server), server.children()
        os.kill(min(ranks_of(server).values()), signal.SIGKILL)
        assert server.wait(60) == 3
    assert "before the server was ready" in (tmp_path / "server.log").read_text()
    assert not any(Path(f"/proc/{pid}").exists() for pid in children.values()) and not mappings(inode)


@pytest.mark.slow
def test_the_supervisor_killed_while_its_store_is_filled(tmp_path: Path) -> None:
    """The first part stays claimed by this test, so ranks fill all the others and wait for it."""
    with starting(tmp_path, "-dp", "2") as server:
        path = until(lambda: store_file(server), 60, "the supervisor has made the store")
        inode = path.stat().st_ino
        with path.open("r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _FIRST_PART_LOCK)

            def waits() -> bool:
                _, _, num_parts, _, full, _ = _HEADER.unpack(
                    os.pread(file.fileno(), _HEADER.size, 0).ljust(_HEADER.size)
                )
                return bool(num_parts and full == num_parts - 1 and len(mappings(inode)) == 2)

            until(waits, 60, "all but one part are full")
            assert all("rw-s" in rights for rights in mappings(inode).values())
            children = descendants(server.process.pid)
            server.process.kill()
            server.process.wait(30)
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), 30, "all have ended")
        assert not mappings(inode) and not holders(inode)
    assert not list(server.runtime_root.glob("*/ready"))


@pytest.mark.slow
def test_two_servers_do_not_meet(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    with served(first, "-dp", "2") as one, served(second, "-dp", "2", "--dtype", "float32") as other:
        inodes = store_of(one), store_of(other)
        assert inodes[0] != inodes[1]
        assert maps_of_ranks(one, inodes[0]) == maps_of_ranks(other, inodes[1]) == [{"r--s"}] * 2


@pytest.mark.slow  # tests/engine/test_balance.py has it of ranks in one process
def test_the_balancer_moves_work_and_no_weights(tmp_path: Path) -> None:
    words = ["-dp", "2", "--dtype", "float32", "--enable-eplb", "--eplb-config", json.dumps(RESTLESS)]
    with served(tmp_path, *words, "--admin-api-key", "boss") as server:
        expected = asyncio.run(wave(server))

        def rebalance() -> Any:
            headers = {"Content-Type": "application/json", "Authorization": "Bearer boss"}
            request = urllib.request.Request(f"{server.url}/eplb/rebalance", b"{}", headers)
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.loads(answer.read())

        assert asyncio.run(wave(server, rebalance)) == expected
        status = server.get("/eplb/status")
        assert status["reweights"] > 0 and (status["moves"], status["bytes_moved"]) == (0, 0)
        assert (status["failures"], status["last_error"]) == (0, "")
