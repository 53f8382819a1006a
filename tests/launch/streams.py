"""Streams of a real server, token by token, and what it says of its ranks."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.error
from collections.abc import Callable
from typing import Any

import httpx
from served import Server, until

NUM_STREAMS = 8
NUM_TOKENS = 120
_undisturbed: dict[tuple[int, int], list[list[int]]] = {}


async def stream(api: httpx.AsyncClient, number: int, came: Callable[[int], None]) -> list[int]:
    """The token ids of one stream, greedy or seeded; raises for whatever is not a whole answer. came: called with the number of
    tokens that have just come."""
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
                new = event["choices"][0].get("token_ids") or []
                token_ids += new
                came(len(new))
                reason = event["choices"][0]["finish_reason"]
    assert reason == "length" and len(token_ids) == NUM_TOKENS
    return token_ids


async def wave(server: Server, during: Callable[[], object] | None = None, after: int = 0) -> list[list[int]]:
    """All streams at once. during: runs meanwhile, from when so many tokens have come on all streams together."""
    num_tokens, reached = 0, asyncio.Event()

    def came(count: int) -> None:
        nonlocal num_tokens
        num_tokens += count
        if num_tokens >= after:
            reached.set()

    async with httpx.AsyncClient(base_url=server.url, timeout=120.0) as api:
        tasks = [asyncio.create_task(stream(api, number, came)) for number in range(NUM_STREAMS)]
        if during is not None:
            if after:
                await asyncio.wait_for(reached.wait(), 120.0)
            await asyncio.to_thread(during)
        return await asyncio.gather(*tasks)


def undisturbed(server: Server) -> list[list[int]]:
    """What a wave says when nothing happens: every server of the embedded model in float32 says the same, so the first one is
    asked."""
    size = NUM_STREAMS, NUM_TOKENS
    if size not in _undisturbed:
        _undisturbed[size] = asyncio.run(wave(server))
    return _undisturbed[size]


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
