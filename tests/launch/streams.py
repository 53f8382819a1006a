"""Streams of a real server, token by token, and what it says of its ranks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
from served import Server

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


async def wave(server: Server, during: Callable[[], object] | None = None) -> list[list[int]]:
    async with httpx.AsyncClient(base_url=server.url, timeout=120.0) as api:
        tasks = [asyncio.create_task(stream(api, number)) for number in range(NUM_STREAMS)]
        if during is not None:
            await asyncio.to_thread(during)
        return await asyncio.gather(*tasks)


def mode(server: Server) -> str:
    return str(server.get("/ready")["mode"])


async def waves(server: Server, during: Callable[[], object]) -> list[list[list[int]]]:
    """One after another, as long as `during` runs."""
    running = asyncio.create_task(asyncio.to_thread(during))
    found = [await wave(server)]
    while not running.done():
        found.append(await wave(server))
    await running
    return found
