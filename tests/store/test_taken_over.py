"""A rank that is killed in the middle of its streams leaves what it has computed of them: whoever goes on computes none
of it again."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path

import pytest
import streams
from served import Server, served
from streams import wave
from test_losing_all import all_serve, kill_all, ranks_of

pytestmark = pytest.mark.store

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
