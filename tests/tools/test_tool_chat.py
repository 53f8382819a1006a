"""Tools and reasoning over HTTP, by the openai client, on a fake of the rank side that says what a model would."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from openai import AsyncOpenAI
from server_parts import MODEL, FakeRanks, Server, server, small_tokenizer
from tool_formats import RENDERED

from configs.server import ServerConfig

pytestmark = pytest.mark.tools
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "does it",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string"}, "number": {"type": "integer"}},
            "required": ["text"],
        },
    },
}
ASKED: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "tools": [TOOL], "max_tokens": 900}
CALLS = [("f", {"text": 'a "süße" 🎉 <fox>', "number": 5}), ("f", {"text": ""})]


def says(text: str) -> FakeRanks:
    ranks = FakeRanks()
    ranks.script = [*small_tokenizer().encode(text, add_special_tokens=False), 0]
    return ranks


def client(s: Server) -> AsyncOpenAI:
    return AsyncOpenAI(base_url="http://test/v1", api_key="none", max_retries=0, http_client=s.http)


def serving(family: str, text: str, reasoning: str = "") -> Any:
    config = ServerConfig(tool_call_parser=family, reasoning_parser=reasoning)
    return server(config, ranks=says(text), max_model_len=1024)


async def streamed(api: AsyncOpenAI, **fields: Any) -> dict[int, dict[str, Any]]:
    """The deltas of each choice, joined as clients join them."""
    found: dict[int, dict[str, Any]] = {}
    async for chunk in await api.chat.completions.create(**ASKED, stream=True, **fields):
        for choice in chunk.choices:
            own = found.setdefault(choice.index, {"content": "", "reasoning": "", "calls": [], "finish": None})
            own["content"] += choice.delta.content or ""
            reasoning = getattr(choice.delta, "reasoning", None) or ""
            assert reasoning == (getattr(choice.delta, "reasoning_content", None) or "")
            own["reasoning"] += reasoning
            for call in choice.delta.tool_calls or []:
                assert call.function is not None
                if call.id is not None:
                    assert call.index == len(own["calls"]) and call.type == "function"
                    assert call.function.name and call.function.arguments == ""
                    own["calls"].append([call.id, call.function.name, ""])
                else:
                    assert call.index == len(own["calls"]) - 1 and call.function.name is None
                    own["calls"][-1][2] += call.function.arguments or ""
            assert own["finish"] is None
            own["finish"] = choice.finish_reason
    return found


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder", "kimi_k2", "glm45", "deepseek_v32"])
def test_calls_whole_and_streamed(form: str) -> None:
    family, render = RENDERED[form]

    async def run() -> None:
        async with serving(family, "Let me see." + render(CALLS)) as s:
            api = client(s)
            whole = (await api.chat.completions.create(**ASKED)).choices[0]
            assert whole.finish_reason == "tool_calls" and whole.message.content == "Let me see."
            assert whole.message.tool_calls is not None
            for call, (name, arguments) in zip(whole.message.tool_calls, CALLS, strict=True):
                assert call.type == "function" and call.function.name == name
                assert json.loads(call.function.arguments) == arguments
            for n in (1, 2):
                for found in (await streamed(api, n=n)).values():
                    assert found["content"] == "Let me see." and found["finish"] == "tool_calls"
                    said = [(name, json.loads(arguments)) for _, name, arguments in found["calls"]]
                    assert said == CALLS and len({name for name, _, _ in found["calls"]}) == 2
            if form == "kimi_k2":
                assert whole.message.tool_calls[1].id == "functions.f:1"

    asyncio.run(run())


def test_reasoning_and_its_tokens() -> None:
    text = "<think>\nThe fox, she thinks.\n</think>\n\nA tree."

    async def run() -> None:
        async with serving("", text, "qwen3") as s:
            plain = {"messages": ASKED["messages"], "max_tokens": 900}
            body = await s.chat(**plain)
            message = body["choices"][0]["message"]
            assert message["content"] == "A tree."
            assert message["reasoning"] == message["reasoning_content"] == "The fox, she thinks."
            counted = body["usage"]["completion_tokens_details"]["reasoning_tokens"]
            assert 0 < counted < body["usage"]["completion_tokens"]
            hidden = (await s.chat(**plain, include_reasoning=False))["choices"][0]["message"]
            assert {name: value for name, value in hidden.items() if value is not None} == {
                "role": "assistant",
                "content": "A tree.",
            }
            short = await s.chat(messages=ASKED["messages"], max_tokens=counted)
            assert short["choices"][0]["message"]["content"] is None
            events = await s.events("/v1/chat/completions", **plain, logprobs=True, return_token_ids=True)
            choices = [event["choices"][0] for event in events]
            assert "".join(choice["delta"].get("reasoning", "") for choice in choices) == "The fox, she thinks."
            ids = [token for choice in choices for token in choice.get("token_ids", [])]
            logprobs = [item for choice in choices if choice["logprobs"] for item in choice["logprobs"]["content"]]
            assert len(ids) == len(logprobs) == body["usage"]["completion_tokens"]  # none is lost with its text

    asyncio.run(run())


def test_stop_strings_are_looked_for_in_content_alone() -> None:
    text = "<think>a STOP b</think>go on" + RENDERED["hermes"][1]([("f", {"text": "STOP"})]) + "x STOP y"

    async def run() -> None:
        async with serving("hermes", text, "qwen3") as s:
            choice = (await s.chat(**ASKED, stop="STOP"))["choices"][0]
            assert choice["message"]["reasoning"] == "a STOP b" and choice["message"]["content"] == "go onx "
            assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"text": "STOP"}
            assert choice["stop_reason"] == "STOP" and choice["finish_reason"] == "tool_calls"

    asyncio.run(run())


def test_one_call_and_no_more() -> None:
    async def run() -> None:
        async with serving("hermes", RENDERED["hermes"][1](CALLS)) as s:
            choice = (await s.chat(**ASKED, parallel_tool_calls=False))["choices"][0]
            assert len(choice["message"]["tool_calls"]) == 1 and choice["finish_reason"] == "tool_calls"
            assert s.ranks.aborted()  # the rank need not go on
            none = (await s.chat(**ASKED, tool_choice="none"))["choices"][0]
            assert "<tool_call>" in none["message"]["content"] and none["finish_reason"] == "stop"
            cut = (await s.chat(**{**ASKED, "max_tokens": 45}))["choices"][0]
            assert cut["finish_reason"] == "length" and cut["message"]["tool_calls"][0]["function"]["name"] == "f"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": []}, "tools"),
        ({"tools": [{"type": "web"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, "tools[0].function.parameters"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}}, "tool_choice"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], param: str) -> None:
    async def run() -> None:
        async with serving("hermes", "x") as s:
            answer = await s.post("/v1/chat/completions", {**ASKED, **fields})
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == param

    asyncio.run(run())


def test_a_model_without_a_format_of_calls() -> None:
    async def run() -> None:
        async with server(ranks=says("x")) as s:
            answer = await s.post("/v1/chat/completions", ASKED)
            assert answer.status_code == 400 and "--tool-call-parser" in answer.json()["error"]["message"]
        config = ServerConfig(tool_call_parser="hermes", enable_auto_tool_choice=False)
        async with server(config, ranks=says("x")) as s:
            answer = await s.post("/v1/chat/completions", ASKED)
            assert answer.status_code == 400 and "--enable-auto-tool-choice" in answer.json()["error"]["message"]

    asyncio.run(run())
