"""A server that loses ranks under load: no client notices, and the rank comes back."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import Server, command_line, served, until

NUM_STREAMS = 16
NUM_TOKENS = 160


async def stream(api: httpx.AsyncClient, number: int) -> list[int]:
    """The token ids of one greedy stream; raises for whatever is not a whole answer."""
    body = {
        "prompt": f"Once upon a time there were {number} little foxes",
        "max_tokens": NUM_TOKENS,
        "temperature": 0.0 if number % 2 else 0.8,
        "seed": number,
        "stream": True,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    token_ids: list[int] = []
    reason = None
    async with api.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event: dict[str, Any] = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                token_ids += event["choices"][0].get("token_ids") or []
                reason = event["choices"][0]["finish_reason"]
    assert reason == "length" and len(token_ids) == NUM_TOKENS
    return token_ids


async def wave(server: Server, during: Any = None) -> list[list[int]]:
    async with httpx.AsyncClient(base_url=server.url, timeout=120.0) as api:
        tasks = [asyncio.create_task(stream(api, number)) for number in range(NUM_STREAMS)]
        if during is not None:
            await asyncio.to_thread(during)
        return await asyncio.gather(*tasks)


def mode(server: Server) -> str:
    return str(server.get("/ready")["mode"])


@pytest.mark.parametrize(
    ("backend", "kind", "num_losses"),
    [
        ("shm", signal.SIGKILL, 1),
        pytest.param("shm", signal.SIGKILL, 5, marks=pytest.mark.slow),
        pytest.param("gloo", signal.SIGKILL, 2, marks=pytest.mark.slow),
        pytest.param("shm", signal.SIGSTOP, 2, marks=pytest.mark.slow),
        pytest.param("gloo", signal.SIGSTOP, 1, marks=pytest.mark.slow),
    ],
)
def test_no_client_notices_a_lost_rank(tmp_path: Path, backend: str, kind: signal.Signals, num_losses: int) -> None:
    chance = random.Random(f"{backend} {kind}")
    with served(tmp_path, "-dp", "3", "--all2all-backend", backend) as server:
        expected = asyncio.run(wave(server))
        killed = []
        for _ in range(num_losses):
            until(lambda: mode(server) == "full", 60, "all ranks serve")
            rank = chance.randrange(3)
            victim = server.children()[f"rank {rank}"]
            killed.append(victim)

            def lose(victim: int = victim) -> None:
                time.sleep(chance.random())
                os.kill(victim, kind)

            assert asyncio.run(wave(server, lose)) == expected
        until(lambda: mode(server) == "full", 60, "all ranks serve")
        metrics = server.get("/metrics")
        assert f'moesaic:rank_losses_total{{model_name="moesaic-tiny"}} {num_losses}.0' in metrics
        assert asyncio.run(wave(server)) == expected
        for pid in killed:
            assert not command_line(pid)
    log = (tmp_path / "server.log").read_text()
    assert log.count("event=rank_restarted") == num_losses and "Traceback" not in log
