"""Ctrl-C and SIGTERM before there is anything to drain, and a second one while it drains: all ends at once, and is said."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from ports import free_ports
from served import Server, descendants, served, starting, until

pytestmark = pytest.mark.attacks
AT_ONCE = 5.0  # seconds, on a machine whose cores are shared; waiting for ranks to leave takes 10


def log_of(tmp_path: Path) -> str:
    return (tmp_path / "server.log").read_text()


def ends(server: Server, number: signal.Signals) -> int:
    below = descendants(server.process.pid)
    server.process.send_signal(number)
    code = server.wait(AT_ONCE)
    assert not [pid for pid in below if Path(f"/proc/{pid}/stat").exists()]
    assert not list(server.runtime_root.iterdir())
    return code


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        (signal.SIGINT, "front"),
        (signal.SIGTERM, "rank 1"),
        pytest.param(signal.SIGTERM, "loaded", marks=pytest.mark.slow),
    ],
)
def test_while_ranks_load(tmp_path: Path, number: signal.Signals, moment: str) -> None:
    with starting(tmp_path, "-dp", "2") as server:
        if moment == "loaded":
            until(lambda: "weights in" in log_of(tmp_path), 90, "a rank has loaded")
        else:
            until(lambda: moment in server.children(), 60, f"{moment} has begun")
        assert ends(server, number) == 128 + number
    assert f"moesaic: ended at once by {number.name}, before the server was ready" in log_of(tmp_path)
    assert "Traceback" not in log_of(tmp_path)


def test_before_anything_has_started(tmp_path: Path) -> None:
    with starting(tmp_path, "-dp", "2") as server:
        handled = 1 << signal.SIGTERM - 1

        def handles() -> bool:
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{server.process.pid}/status").read_text().splitlines():
                    if line.startswith("SigCgt:"):
                        return bool(int(line.split()[1], 16) & handled)
            return False

        until(handles, 30, "it has begun")
        server.process.send_signal(signal.SIGTERM)
        assert server.wait(AT_ONCE) == 128 + signal.SIGTERM
    assert "SIGTERM" in log_of(tmp_path) and "Traceback" not in log_of(tmp_path)


def test_behind_the_first_answer_of_health_it_drains(tmp_path: Path) -> None:
    """However early the signal comes: what was ready ends with 0."""
    with starting(tmp_path) as server:

        def healthy() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"{server.url}/health").status_code == 200
            return False

        deadline = time.monotonic() + 90
        while not healthy():
            assert time.monotonic() < deadline and server.process.poll() is None, log_of(tmp_path)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
    assert "before the server was ready" not in log_of(tmp_path)


async def hold(server: Server) -> None:
    """Signal twice while a request runs that would take long."""
    body = {"prompt": "Once", "max_tokens": 400, "stream": True, "ignore_eos": True, "n": 8}
    async with httpx.AsyncClient(base_url=server.url, timeout=60.0) as api:
        with contextlib.suppress(httpx.HTTPError):
            async with api.stream("POST", "/v1/completions", json=body) as answer:
                pieces = answer.aiter_raw()
                await anext(pieces)
                for rank in ("rank 0", "rank 1"):
                    os.kill(server.children()[rank], signal.SIGSTOP)  # nothing ends by itself
                server.process.send_signal(signal.SIGTERM)
                await asyncio.to_thread(until, lambda: not list(server.runtime_root.glob("*/ready")), 5, "it drains")
                server.process.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(server.wait, AT_ONCE) == 128 + signal.SIGTERM


@pytest.mark.slow
def test_a_second_signal_during_a_drain_ends_at_once(tmp_path: Path) -> None:
    with served(tmp_path, "-dp", "2") as server:
        asyncio.run(hold(server))
    assert "ended at once by SIGTERM, before the drain was over" in log_of(tmp_path)


@pytest.mark.slow
def test_while_a_rank_loads_again(tmp_path: Path) -> None:
    """The server is ready, so it drains; the rank that cannot hear it is not waited for."""
    with served(tmp_path, "-dp", "2") as server:
        first = server.children()["rank 1"]
        os.kill(first, signal.SIGKILL)
        until(lambda: server.children().get("rank 1") not in (None, first), 30, "it is started again")
        assert ends(server, signal.SIGTERM) == 0


def loads_torch(pid: int) -> bool:
    try:
        return "libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:  # it has ended
        return False


@pytest.mark.parametrize("num_ranks", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_generate_while_it_loads(num_ranks: str) -> None:
    command = [sys.executable, "-m", "moesaic", "generate", "-p", "Once", "-dp", num_ranks, "--max-tokens", "9999999"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        until(lambda: any(map(loads_torch, descendants(process.pid))), 60, "ranks have begun")
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=AT_ONCE)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM and "moesaic: ended by SIGTERM" in said


@pytest.mark.slow
def test_two_parts_of_a_server_on_one_machine(tmp_path: Path) -> None:
    """Head and headless part have one address. The part ends at once while it looks for the head, loads and serves with it, and
    ends with it."""
    rpc = free_ports(6)
    parts = ["-dp", "2", "-dpl", "1", "-dpa", "127.0.0.1", "-dpp", str(rpc)]
    alone, other = tmp_path / "alone", tmp_path / "other"
    alone.mkdir()
    other.mkdir()
    with starting(alone, *parts, "--headless", "-dpr", "1") as part:
        until(lambda: "rank(s)" in log_of(alone), 60, "it looks for the head")
        assert ends(part, signal.SIGINT) == 128 + signal.SIGINT
    with starting(other, *parts, "--headless", "-dpr", "1") as part, served(tmp_path, *parts) as server:
        body = {"prompt": "Once", "max_tokens": 8, "temperature": 0}
        answers = [server.post("/v1/completions", body)["choices"][0]["text"] for _ in range(4)]
        assert len(set(answers)) == 1
        assert server.get("/ready")["ranks"] == ["up", "up"]
        server.process.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0 and part.wait(30) == 0
