"""A real server whose rank is killed under streams that are bound: by grammars, by logits processors of the operator, by
both."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import served, until

pytestmark = [pytest.mark.structured, pytest.mark.slow]
HERE = Path(__file__).parent
STORY: Any = {
    "type": "object",
    "properties": {"story": {"type": "string", "minLength": 200, "maxLength": 260}, "pages": {"type": "integer"}},
    "required": ["story", "pages"],
}
WOBBLE = {"vllm_xargs": {"wobble": 4.0}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "story", "schema": STORY}}
ASKED: list[dict[str, Any]] = [
    {"response_format": FORMAT},
    {"response_format": FORMAT, **WOBBLE},
    {"structured_outputs": {"regex": "([a-z]{2,9} ){40}end"}, "temperature": 0.0},
    {"structured_outputs": {"regex": "([a-z]{2,9} ){40}end"}, **WOBBLE},
    {**WOBBLE, "presence_penalty": 0.5},
    {"vllm_xargs": {"no_repeat": 3}, "temperature": 0.0},
]


async def stream(api: httpx.AsyncClient, number: int, came: Callable[[int], None]) -> tuple[list[int], str, str]:
    body = {
        "prompt": f"Once upon a time there were {number} little foxes", "max_tokens": 260, "temperature": 0.8,
        "seed": number, "stream": True, "return_token_ids": True, **ASKED[number],
    }  # fmt: skip
    token_ids, text, reason = [], "", None
    async with api.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                choice = event["choices"][0]
                token_ids += choice.get("token_ids") or []
                text += choice["text"]
                came(len(choice.get("token_ids") or []))
                reason = choice["finish_reason"]
    assert reason in ("stop", "length")
    return token_ids, text, reason


async def wave(url: str, during: Callable[[], None] | None = None) -> list[tuple[list[int], str, str]]:
    """All streams at once. during: runs meanwhile, when tokens have come on all of them together."""
    count, reached = 0, asyncio.Event()

    def came(new: int) -> None:
        nonlocal count
        count += new
        if count >= 20 * len(ASKED):
            reached.set()

    async with httpx.AsyncClient(base_url=url, timeout=120.0) as api:
        tasks = [asyncio.create_task(stream(api, number, came)) for number in range(len(ASKED))]
        if during is not None:
            await asyncio.wait_for(reached.wait(), 120.0)
            await asyncio.to_thread(during)
        return await asyncio.gather(*tasks)


def test_a_killed_rank_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)
    names = ("own_processors:NoRepeats", "own_processors.Wobble")
    options = [word for name in names for word in ("--logits-processors", name)]
    with served(tmp_path, "-dp", "2", *options) as server:
        expected = asyncio.run(wave(server.url))
        for _, text, reason in expected[:2]:
            assert reason == "length" or json.loads(text).keys() >= {"story", "pages"}
        for rank in ("rank 1", "rank 0"):
            victim = server.children()[rank]
            assert asyncio.run(wave(server.url, lambda pid=victim: os.kill(pid, signal.SIGKILL))) == expected
            until(lambda: server.get("/ready")["mode"] == "full", 90, "all ranks serve")
