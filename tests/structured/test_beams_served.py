"""Beam searches and budgets of reasoning on a real server, alone and while a rank is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import served, until

from moesaic import LLM, BeamSearchParams

pytestmark = [pytest.mark.structured, pytest.mark.slow]
PROMPTS = ["Once upon a time", "One day a little girl named Lily found a"]
BEAMS: dict[str, Any] = {"prompt": PROMPTS, "use_beam_search": True, "n": 3, "max_tokens": 40, "logprobs": 0}
CHAT = {"messages": [{"role": "user", "content": "Tell me a story."}], "temperature": 0.8, "seed": 3}
THOUGHT: dict[str, Any] = {**CHAT, "thinking_token_budget": 30, "max_tokens": 200}


async def wave(url: str, victim: int = 0) -> list[Any]:
    async with httpx.AsyncClient(base_url=url, timeout=120.0) as api:
        asked = [("/v1/completions", BEAMS)] + [("/v1/chat/completions", {**THOUGHT, "n": 2})] * 2
        asked.append(("/v1/chat/completions", {**CHAT, "use_beam_search": True, "beam_width": 4, "max_tokens": 30}))
        tasks = [asyncio.create_task(api.post(path, json=body)) for path, body in asked]
        if victim:
            async with asyncio.timeout(60):
                while (load := (await api.get("/load")).json())["server_load"] < 4 or load["num_requests_running"] < 3:
                    await asyncio.sleep(0.002)
            os.kill(victim, signal.SIGKILL)
        answers = await asyncio.gather(*tasks)
    assert [answer.status_code for answer in answers] == [200] * 4, [answer.text for answer in answers]
    return [answer.json()["choices"] for answer in answers]


def tokens_of(choices: list[list[dict[str, Any]]]) -> list[Any]:
    return [[(one.get("text") or one.get("message"), one["finish_reason"]) for one in each] for each in choices]


def test_beams_and_budgets_survive_a_rank(tmp_path: Path) -> None:
    with LLM() as llm:
        expected = [llm.beam_search(prompt, BeamSearchParams(3, 40))[0] for prompt in PROMPTS]
    with served(tmp_path, "-dp", "2", "--reasoning-parser", "deepseek_r1") as server:
        first = asyncio.run(wave(server.url))
        beams = [one["text"] for one in first[0]]
        assert beams == [s.text.removeprefix(p) for p, e in zip(PROMPTS, expected, strict=True) for s in e.sequences]
        for choice in first[1]:
            assert choice["message"]["reasoning"] and choice["message"]["content"]
        for rank in ("rank 1", "rank 0"):
            assert tokens_of(asyncio.run(wave(server.url, server.children()[rank]))) == tokens_of(first)
            until(lambda: server.get("/ready")["mode"] == "full", 90, "all ranks serve")
