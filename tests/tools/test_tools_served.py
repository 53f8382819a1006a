"""Forced calls of the embedded model on a real server, by the openai client; and a rank that is killed meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI
from served import Server, served, until

pytestmark = [pytest.mark.tools, pytest.mark.slow]
STORY: Any = {
    "type": "function",
    "function": {
        "name": "tell",
        "parameters": {
            "type": "object",
            "properties": {
                "story": {"type": "string", "minLength": 150, "maxLength": 200},
                "animal": {"enum": ["fox", "dog"]},
                "pages": {"type": "integer", "minimum": 1, "maximum": 20},
            },
            "required": ["story", "animal", "pages"],
            "additionalProperties": False,
        },
    },
}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
MESSAGES: Any = [{"role": "user", "content": "Tell me a story about a dog."}]
NUM_STREAMS = 6


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("tools")
    with served(folder, "-dp", "2") as server:
        server.wait_ready()
        yield server


def checked(text: str) -> None:
    arguments = json.loads(text)
    assert arguments.keys() == {"story", "animal", "pages"} and arguments["animal"] in ("fox", "dog")
    assert 150 <= len(arguments["story"]) <= 200 and 1 <= arguments["pages"] <= 20


def test_forced_calls_and_their_results(server: Server) -> None:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
        model = api.models.list().data[0].id
        ask: Any = {"model": model, "temperature": 0.8, "seed": 5, "tools": [STORY, WEATHER], "max_tokens": 400}
        named = {"type": "function", "function": {"name": "tell"}}
        choice = api.chat.completions.create(messages=MESSAGES, tool_choice=named, **ask).choices[0]
        assert choice.finish_reason == "stop" and choice.message.content == ""
        assert choice.message.tool_calls is not None
        [call] = choice.message.tool_calls
        assert call.type == "function" and call.function.name == "tell"
        checked(call.function.arguments)

        allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "weather"}}]}
        one = {"type": "allowed_tools", "allowed_tools": allowed}
        choice = api.chat.completions.create(
            messages=MESSAGES, tool_choice=one, parallel_tool_calls=False, **ask
        ).choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.tool_calls is not None
        [call] = choice.message.tool_calls
        assert call.type == "function" and call.function.name == "weather"
        assert json.loads(call.function.arguments).keys() == {"city"}

        said = {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}
        result = {"role": "tool", "tool_call_id": call.id, "content": "12 degrees"}
        answer = api.chat.completions.create(messages=[*MESSAGES, said, result], **{**ask, "max_tokens": 8})
        assert answer.usage is not None and answer.usage.completion_tokens
        chosen = api.chat.completions.create(messages=MESSAGES, tool_choice="auto", **ask).choices[0]
        assert chosen.message.content or chosen.message.tool_calls  # what it has learnt is stories


async def stream(api: AsyncOpenAI, model: str, number: int, came: Callable[[], None]) -> tuple[str, list[list[str]]]:
    """Content and calls: name, arguments."""
    content, calls, reason = "", [], None
    answer: Any = await api.chat.completions.create(
        model=model, messages=MESSAGES, tools=[STORY], tool_choice="required", parallel_tool_calls=False,
        temperature=0.0 if number % 2 else 0.8, seed=number, max_tokens=400, stream=True,
    )  # fmt: skip
    async for chunk in answer:
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            if call.id is not None:
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments
            came()
        reason = choice.finish_reason or reason
    assert reason == "tool_calls"
    return content, calls


async def wave(server: Server, during: Callable[[], None] | None = None) -> list[tuple[str, list[list[str]]]]:
    """All streams at once. during: runs meanwhile, once arguments come on all of them together."""
    model, num_pieces, reached = server.get("/v1/models")["data"][0]["id"], 0, asyncio.Event()

    def came() -> None:
        nonlocal num_pieces
        num_pieces += 1
        if num_pieces == 20 * NUM_STREAMS:
            reached.set()

    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120.0) as api:
        tasks = [asyncio.create_task(stream(api, model, number, came)) for number in range(NUM_STREAMS)]
        if during is not None:
            await asyncio.wait_for(reached.wait(), 120.0)
            await asyncio.to_thread(during)
        return await asyncio.gather(*tasks)


def test_a_killed_rank_changes_no_call(server: Server) -> None:
    expected = asyncio.run(wave(server))
    for content, [[name, arguments]] in expected:
        assert content == "" and name == "tell"
        checked(arguments)
    rank = server.children()["rank 1"]
    assert asyncio.run(wave(server, lambda: os.kill(rank, signal.SIGKILL))) == expected
    until(lambda: server.get("/ready")["mode"] == "full", 90, "all ranks serve")
