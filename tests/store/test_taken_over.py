"""A rank that is killed in the middle of its streams leaves what it has computed of them: whoever goes on computes none
of it again."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import hf_tiny
import pytest
import streams
from hf_tiny import HfModel
from served import Server, served
from streams import wave
from test_losing_all import all_serve, kill_all, ranks_of

from models.tiny import CHECKPOINT

pytestmark = pytest.mark.store
MOST_KILLS = 12

WORDS = {
    "plain": pytest.param([]),
    "asynchronous": pytest.param(["--async-scheduling"], marks=pytest.mark.slow),
    "deterministic": pytest.param(["--dtype", "bfloat16", "--deterministic"], marks=pytest.mark.slow),
}


def taken_over(server: Server) -> float:
    return sum(map(float, re.findall(r"moesaic:kv_tokens_taken_over_total{.*} (.*)", server.get("/metrics"))))


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_one_of_two_and_then_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.setattr(streams, "NUM_STREAMS", 4)
    monkeypatch.setattr(streams, "NUM_TOKENS", 200)
    with served(tmp_path, "-dp", "2", "--enable-dbo", "off", "--no-enable-prefix-caching", *words) as server:
        expected = asyncio.run(wave(server))
        assert taken_over(server) == 0
        assert asyncio.run(wave(server, lambda: os.kill(ranks_of(server)["rank 0"], signal.SIGKILL), 300)) == expected
        assert taken_over(server) > 0
        all_serve(server)
        assert asyncio.run(wave(server, lambda: kill_all(server), 300)) == expected
        assert taken_over(server) >= 300


def killed_until(server: Server, expected: list[list[int]], kill: Callable[[], object], least: float) -> None:
    """Until so many tokens more were taken over. A state is whole between two steps only (docs/surviving.md), so a kill
    within one may leave nothing: no token is another for that."""
    before = taken_over(server)
    for _ in range(MOST_KILLS):
        assert asyncio.run(wave(server, kill, 150)) == expected
        all_serve(server)
        if taken_over(server) - before >= least:
            return
    raise AssertionError(f"nothing was taken over at {MOST_KILLS} kills")


KEEPS_MORE = {"window": hf_tiny.make_gpt_oss, "state": hf_tiny.make_qwen3_next}


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(KEEPS_MORE["window"], id="window", marks=pytest.mark.slow),
        pytest.param(KEEPS_MORE["state"], id="state"),
    ],
)
def test_windows_and_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[..., HfModel]) -> None:
    monkeypatch.setattr(streams, "NUM_STREAMS", 4)
    monkeypatch.setattr(streams, "NUM_TOKENS", 300)
    model = make(tmp_path / "model", vocab_size=2048).path
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(CHECKPOINT / name, model)
    words = ["-dp", "2", "--enable-dbo", "off", "--no-enable-prefix-caching", "--max-model-len", "400"]
    with served(tmp_path, *words, "--model", str(model)) as server:
        expected = asyncio.run(wave(server))
        killed_until(server, expected, lambda: os.kill(ranks_of(server)["rank 0"], signal.SIGKILL), 1)
        killed_until(server, expected, lambda: kill_all(server), 50)
