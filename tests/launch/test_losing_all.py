"""Ranks that find no weights, or others, when they come back: nothing ends, and no token is another one."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
from served import served, until
from streams import all_serve, answer, kill_all, mode, ranks_of, refuses, undisturbed, wave

from models.tiny import CHECKPOINT

pytestmark = pytest.mark.attacks


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
    """Rank 1 of 3 has the only copies of some experts. Those who have the file open read on what it was; who reads what it is
    now refuses it by name, and goes on when it is what it was."""
    weights, kept = copied(tmp_path), tmp_path / "kept"
    own_experts = ("-dp", "3", "--num-redundant-experts", "8")
    with served(tmp_path, *own_experts, "--enable-dbo", "off", "--model", str(tmp_path / "model")) as server:
        expected = undisturbed(server)
        said = "cannot be read" if way == "away" else "changed since the start"

        def during() -> None:
            change(weights, kept, way)
            os.kill(ranks_of(server)["rank 1"], signal.SIGKILL)
            waiting = until(lambda: server.get("/health").get("waiting"), 90, "/health says who waits")
            assert all("model.safetensors: " in reason and said in reason for reason in waiting.values())
            if way == "in place":  # no copy is left of some experts
                status, again, body = answer(lambda: server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}))
                assert status == 503 and again and "model.safetensors: changed since the start" in body
            else:
                until(lambda: "1" in server.get("/health")["waiting"], 90, "the new rank says so")
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
        expected = undisturbed(server)

        def during() -> None:
            weights.rename(kept)
            kill_all(server)
            until(lambda: len(server.get("/health").get("waiting", {})) == 2, 60, "both wait")
            time.sleep(25.0)  # longer than a rank waits before it is started anew
            kept.rename(weights)

        assert asyncio.run(wave(server, during)) == expected
        all_serve(server)
