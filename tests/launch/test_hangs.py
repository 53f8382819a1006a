"""A loop that hangs while its process lives: it is killed, those that wait for it are not, and no client notices."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
from served import served, until
from streams import mode, wave

import moesaic

pytestmark = pytest.mark.attacks

# Python imports it at the start of every process. The handler runs in the main thread, wherever that is just then.
SITE = """
import signal, time

def sleep(*arguments):
    time.sleep(3600)

def nap(*arguments):
    end = time.monotonic() + 3600
    while time.monotonic() < end:
        time.sleep(0.01)

def compute(*arguments):
    end = time.thread_time() + 4.0
    while time.thread_time() < end:
        pass

signal.signal(signal.SIGUSR1, sleep)
signal.signal(signal.SIGUSR2, nap)
def spin(*arguments):
    while True:
        pass

signal.signal(signal.SIGALRM, compute)
signal.signal(signal.SIGVTALRM, spin)
"""
HANGS = {"sleep": signal.SIGUSR1, "nap": signal.SIGUSR2}


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SITE)
    monkeypatch.setenv("PYTHONPATH", str(folder))


OPTIONS = ("--dtype", "float32", "--enable-dbo", "off")


def losses(log: str) -> list[str]:
    return [line.partition("moesaic: ")[2] for line in log.splitlines() if line.startswith("moesaic: event=rank_lost")]


@pytest.mark.parametrize(
    ("backend", "num_ranks", "kind"),
    [
        ("shm", 2, "sleep"),
        pytest.param("shm", 4, "nap", marks=pytest.mark.slow),
        pytest.param("gloo", 2, "nap", marks=pytest.mark.slow),
        pytest.param("gloo", 4, "sleep", marks=pytest.mark.slow),
    ],
)
def test_a_hung_loop_is_killed_and_nobody_else(tmp_path: Path, backend: str, num_ranks: int, kind: str) -> None:
    with served(tmp_path, "-dp", str(num_ranks), "--all2all-backend", backend, *OPTIONS) as server:
        expected = asyncio.run(wave(server))
        children = server.children()

        def hang() -> None:
            time.sleep(0.3)
            os.kill(children["rank 1"], HANGS[kind])

        assert asyncio.run(wave(server, hang)) == expected
        until(lambda: mode(server) == "full", 60, "all ranks serve")
        now = server.children()
        assert all((now[name] == pid) == (name != "rank 1") for name, pid in children.items())
        idle = now["rank 0"]
        os.kill(idle, HANGS[kind])  # while nothing is asked for
        until(lambda: server.children().get("rank 0") != idle, 20, "the idle one is killed")
        until(lambda: mode(server) == "full", 60, "all ranks serve")
        assert asyncio.run(wave(server)) == expected
    log = (tmp_path / "server.log").read_text()
    [first, second] = losses(log)
    assert first.startswith(f"event=rank_lost rank=1 pid={children['rank 1']} reason='hung: no heartbeat for 2.")
    assert second.startswith(f"event=rank_lost rank=0 pid={idle} reason='hung: no heartbeat for 2.")
    assert "Traceback" not in log


@pytest.mark.slow
def test_long_work_is_no_hang(tmp_path: Path) -> None:
    """The loop makes no mark for 4 s of the processor's time, and the others wait for it."""
    with served(tmp_path, "-dp", "2", *OPTIONS) as server:
        expected = asyncio.run(wave(server))
        children = server.children()

        def work() -> None:
            time.sleep(0.1)
            os.kill(children["rank 1"], signal.SIGALRM)

        assert asyncio.run(wave(server, work)) == expected
        assert server.children() == children
    assert not losses((tmp_path / "server.log").read_text())


@pytest.mark.slow
def test_a_loop_that_spins_is_killed_at_last(tmp_path: Path) -> None:
    """From outside it is at work, so it has the time of the longest work."""
    with served(tmp_path, "-dp", "3", "--exchange-timeout", "2.5", *OPTIONS) as server:
        expected = asyncio.run(wave(server))
        children = server.children()

        def spin() -> None:
            time.sleep(0.1)
            os.kill(children["rank 1"], signal.SIGVTALRM)

        assert asyncio.run(wave(server, spin)) == expected
        until(lambda: mode(server) == "full", 60, "all ranks serve")
        now = server.children()
        assert all((now[name] == pid) == (name != "rank 1") for name, pid in children.items())
    assert len(losses((tmp_path / "server.log").read_text())) == 1


@pytest.mark.slow
def test_a_short_exchange_timeout_does_not_end_the_accusers(tmp_path: Path) -> None:
    """They miss the one that hangs before its heartbeat is old, and wait until it has been killed."""
    with served(tmp_path, "-dp", "3", "--exchange-timeout", "1", *OPTIONS) as server:
        expected = asyncio.run(wave(server))
        children = server.children()

        def hang() -> None:
            time.sleep(0.1)
            os.kill(children["rank 2"], signal.SIGUSR1)

        assert asyncio.run(wave(server, hang)) == expected
        until(lambda: mode(server) == "full", 60, "all ranks serve")
        now = server.children()
        assert all((now[name] == pid) == (name != "rank 2") for name, pid in children.items())
    log = (tmp_path / "server.log").read_text()
    assert len(losses(log)) == 1 and "event=epoch_lost" in log and "Traceback" not in log


@pytest.mark.slow
def test_a_hung_loop_under_an_offline_engine() -> None:
    params = moesaic.SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    prompts = [f"There were {number} foxes" for number in range(6)]
    with moesaic.LLM(data_parallel_size=2, dtype="float32") as llm:
        expected = [item.outputs[0].token_ids for item in llm.generate(prompts, params)]
        os.kill(llm.front.ready[1].process, signal.SIGUSR1)
        assert [item.outputs[0].token_ids for item in llm.generate(prompts, params)] == expected
