"""All ranks lost at once, and weights that are away or have changed: nothing ends, and no token is another one."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
import time
import urllib.error
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import streams
from served import Server, served, until
from streams import mode, wave

from models.tiny import CHECKPOINT

pytestmark = pytest.mark.attacks


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "NUM_STREAMS", 8)
    monkeypatch.setattr(streams, "NUM_TOKENS", 120)


def answer(call: Callable[[], Any]) -> Any:
    """What the server says, also when it refuses: (status, Retry-After, body)."""
    try:
        return call()
    except urllib.error.HTTPError as error:
        return error.code, error.headers.get("retry-after"), error.read().decode()


def ranks_of(server: Server) -> dict[str, int]:
    return {name: pid for name, pid in server.children().items() if name != "front"}


def refuses(server: Server) -> bool:
    return isinstance(answer(lambda: server.get("/ready")), tuple)


def all_serve(server: Server) -> None:
    until(lambda: answer(lambda: mode(server)) == "full", 90, "all ranks serve")


def kill_all(server: Server) -> None:
    for pid in ranks_of(server).values():
        os.kill(pid, signal.SIGKILL)


def num_requests(server: Server) -> int:
    """Of the ranks, running and waiting, as they last said."""
    names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    lines = [line for line in server.get("/metrics").splitlines() if line.startswith(names)]
    return round(sum(float(line.rsplit(" ", 1)[1]) for line in lines))


@pytest.mark.parametrize(
    ("num_ranks", "rounds", "num_streams"), [(2, 1, 8), pytest.param(4, 10, 64, marks=pytest.mark.slow)]
)
def test_all_ranks_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int, rounds: int, num_streams: int
) -> None:
    monkeypatch.setattr(streams, "NUM_STREAMS", num_streams)
    with served(tmp_path, "-dp", str(num_ranks), "--enable-dbo", "off") as server:
        expected = asyncio.run(wave(server))
        for _ in range(rounds):
            all_serve(server)

            def during() -> None:
                until(lambda: num_requests(server) == num_streams, 60, "every stream is under way")
                kill_all(server)
                until(lambda: refuses(server), 10, "it says that none serves")
                status, again, body = answer(lambda: server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}))
                assert status == 503 and again and "of" in body and "ranks serve" in body, body

            assert asyncio.run(wave(server, during)) == expected
        all_serve(server)
        lost = rounds * num_ranks
        assert f'rank_losses_total{{model_name="moesaic-tiny"}} {lost}.0' in server.get("/metrics")


@pytest.mark.slow
def test_ranks_that_cannot_come_back_end_the_server(tmp_path: Path) -> None:
    """While it drains none is started again: then the loss of all is the end, and says so."""
    with served(tmp_path, "-dp", "2", "--enable-dbo", "off") as server:
        body = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True}
        client = threading.Thread(target=answer, args=(lambda: server.post("/v1/completions", body),))
        client.start()
        until(lambda: ":num_requests_running" in server.get("/metrics"), 10, "the request runs")
        server.process.send_signal(signal.SIGTERM)
        until(lambda: refuses(server), 10, "it drains")
        kill_all(server)
        client.join(30)
        assert server.wait(30) == 3
        assert "all ranks are lost: ranks are not started again now" in (tmp_path / "server.log").read_text()


def copied(tmp_path: Path) -> Path:
    """The weights of a model that may be changed."""
    shutil.copytree(CHECKPOINT, tmp_path / "model")
    return tmp_path / "model" / "model.safetensors"


def change(weights: Path, kept: Path, way: str) -> None:
    if way == "away":
        weights.rename(kept)
        return
    shutil.copy2(weights, kept)
    data = bytearray(weights.read_bytes())
    for place in range(len(data) // 2, len(data), 7):
        data[place] ^= 0x11
    if way == "in place":
        weights.write_bytes(data)
    else:
        weights.rename(kept)
        weights.write_bytes(data)


def put_back(weights: Path, kept: Path, way: str) -> None:
    if way == "in place":
        weights.write_bytes(kept.read_bytes())
        times = kept.stat()
        os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    else:
        kept.rename(weights)


@pytest.mark.parametrize(
    "way", ["in place", *(pytest.param(way, marks=pytest.mark.slow) for way in ("away", "another file"))]
)
def test_weights_that_are_not_there_or_others(tmp_path: Path, way: str) -> None:
    """Rank 2 of 4 has the only copies of some experts. Those who have the file open read on what it was; who reads what it is
    now refuses it by name, and goes on when it is what it was."""
    weights, kept = copied(tmp_path), tmp_path / "kept"
    own_experts = ("-dp", "4", "--num-redundant-experts", "8")
    with served(tmp_path, *own_experts, "--enable-dbo", "off", "--model", str(tmp_path / "model")) as server:
        expected = asyncio.run(wave(server))
        said = "cannot be read" if way == "away" else "changed since the start"

        def during() -> None:
            change(weights, kept, way)
            os.kill(ranks_of(server)["rank 2"], signal.SIGKILL)
            waiting = until(lambda: server.get("/health").get("waiting"), 90, "/health says who waits")
            assert all("model.safetensors: " in reason and said in reason for reason in waiting.values())
            if way == "in place":  # no copy is left of some experts
                status, again, body = answer(lambda: server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}))
                assert status == 503 and again and "model.safetensors: changed since the start" in body
            else:
                until(lambda: "2" in server.get("/health")["waiting"], 90, "the new rank says so")
                assert mode(server) == "degraded"
                server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
            put_back(weights, kept, way)

        assert asyncio.run(wave(server, during)) == expected
        all_serve(server)
        assert "waiting" not in server.get("/health")
    log = (tmp_path / "server.log").read_text()
    assert "event=weights_unavailable" in log and "Traceback" not in log


@pytest.mark.slow
def test_all_ranks_killed_while_the_weights_are_away(tmp_path: Path) -> None:
    weights, kept = copied(tmp_path), tmp_path / "kept"
    own_experts = ("-dp", "2", "--num-redundant-experts", "16")
    with served(tmp_path, *own_experts, "--enable-dbo", "off", "--model", str(tmp_path / "model")) as server:
        expected = asyncio.run(wave(server))

        def during() -> None:
            weights.rename(kept)
            kill_all(server)
            until(lambda: len(server.get("/health").get("waiting", {})) == 2, 60, "both wait")
            time.sleep(25.0)  # longer than a rank waits before it is started anew
            kept.rename(weights)

        assert asyncio.run(wave(server, during)) == expected
        all_serve(server)
