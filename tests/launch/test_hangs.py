"""What is taken for a hang, and what is not; tests/launch/test_surviving.py has the plain cases."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hanging import COMPUTE, SLEEP, SPIN, hanging, losses
from served import served, until
from streams import mode, wave

import moesaic

pytestmark = [pytest.mark.attacks, pytest.mark.slow]


@pytest.fixture(autouse=True)
def _hanging(tmp_path: Path) -> Iterator[None]:
    (tmp_path / "site").mkdir()
    with hanging(tmp_path / "site"):
        yield


OPTIONS = ("--dtype", "float32", "--enable-dbo", "off")


def test_long_work_is_no_hang(tmp_path: Path) -> None:
    """The loop makes no mark for 4 s of the processor's time, and the others wait for it."""
    with served(tmp_path, "-dp", "2", *OPTIONS) as server:
        expected = asyncio.run(wave(server))
        children = server.children()

        def work() -> None:
            time.sleep(0.1)
            os.kill(children["rank 1"], COMPUTE)

        assert asyncio.run(wave(server, work)) == expected
        assert server.children() == children
    assert not losses((tmp_path / "server.log").read_text())


def test_a_loop_that_spins_is_killed_at_last(tmp_path: Path) -> None:
    """From outside it is at work, so it has the time of the longest work."""
    with served(tmp_path, "-dp", "3", "--exchange-timeout", "2.5", *OPTIONS) as server:
        expected = asyncio.run(wave(server))
        children = server.children()

        def spin() -> None:
            time.sleep(0.1)
            os.kill(children["rank 1"], SPIN)

        assert asyncio.run(wave(server, spin)) == expected
        until(lambda: mode(server) == "full", 60, "all ranks serve")
        now = server.children()
        assert all((now[name] == pid) == (name != "rank 1") for name, pid in children.items())
    assert len(losses((tmp_path / "server.log").read_text())) == 1


def test_a_short_exchange_timeout_does_not_end_the_accusers(tmp_path: Path) -> None:
    """They miss the one that hangs before its heartbeat is old, and wait until it has been killed."""
    with served(tmp_path, "-dp", "3", "--exchange-timeout", "1", *OPTIONS) as server:
        expected = asyncio.run(wave(server))
        children = server.children()

        def hang() -> None:
            time.sleep(0.1)
            os.kill(children["rank 2"], SLEEP)

        assert asyncio.run(wave(server, hang)) == expected
        until(lambda: mode(server) == "full", 60, "all ranks serve")
        now = server.children()
        assert all((now[name] == pid) == (name != "rank 2") for name, pid in children.items())
    log = (tmp_path / "server.log").read_text()
    assert len(losses(log)) == 1 and "event=epoch_lost" in log and "Traceback" not in log


def test_a_hung_loop_under_an_offline_engine() -> None:
    params = moesaic.SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    prompts = [f"There were {number} foxes" for number in range(6)]
    with moesaic.LLM(data_parallel_size=2, dtype="float32") as llm:
        expected = [item.outputs[0].token_ids for item in llm.generate(prompts, params)]
        os.kill(llm.front.ready[1].process, SLEEP)
        assert [item.outputs[0].token_ids for item in llm.generate(prompts, params)] == expected
