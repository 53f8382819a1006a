"""Tools, reasoning and formats of /v1/responses and /v1/messages, on a fake of the rank side that says what a model
would."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from server_parts import MODEL, FakeRanks, Server, last_prompt, server, small_tokenizer
from test_messages import message
from test_messages import stream as stream_message
from test_responses import respond, stream

from configs.server import ServerConfig
from front.messages import AddRequest

pytestmark = pytest.mark.tools
PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
FUNCTION = {"type": "function", "name": "f", "parameters": PARAMETERS}
CUSTOM = {"type": "custom", "name": "g"}
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 5}}\n</tool_call>'
SAID = f"<think>\nHm.\n</think>\n\nLet me see.{CALL}\n" + CALL.replace('"f"', '"g"').replace(
    '"x": 5', '"input": "a süße"'
)


def serving(text: str) -> Any:
    ranks = FakeRanks()
    ranks.script = [*small_tokenizer().encode(text, add_special_tokens=False), 0]
    return server(ServerConfig(tool_call_parser="hermes", reasoning_parser="qwen3"), ranks=ranks, max_model_len=2048)


def grammar_of(s: Server) -> str:
    sent = [item for item in s.ranks.sent if isinstance(item, AddRequest)]
    return "" if sent[-1].params.grammar is None else sent[-1].params.grammar.text


def test_items_of_a_response() -> None:
    async def run() -> None:
        async with serving(SAID) as s:
            fields: dict[str, Any] = {"tools": [FUNCTION, CUSTOM], "include": ["reasoning.encrypted_content"]}
            body = await respond(s, **fields)
            reasoning, said, call, custom = body["output"]
            assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
            assert said["content"][0]["text"] == "Let me see."
            assert call["type"] == "function_call" and json.loads(call["arguments"]) == {"x": 5}
            assert custom["type"] == "custom_tool_call" and custom["input"] == "a süße"
            assert body["usage"]["output_tokens_details"]["reasoning_tokens"] > 0 and body["status"] == "completed"
            events = await stream(s, **fields)
            last = events[-1]["response"]["output"]
            for one, other in zip(body["output"], last, strict=True):
                assert {**one, "id": "", "call_id": ""} == {**other, "id": "", "call_id": ""}
            done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
            assert done == last
            pieces = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
            assert "".join(pieces) == call["arguments"]
            # what came back is understood, with and without the server's memory of it
            output = {"type": "function_call_output", "call_id": call["call_id"], "output": "six"}
            await respond(s, input=[output], previous_response_id=body["id"], **fields)
            kept = last_prompt(s)
            await respond(s, input=[{"role": "user", "content": "Hello"}, *body["output"], output], **fields)
            assert last_prompt(s) == kept and kept.endswith("tool: six\nassistant:")

    asyncio.run(run())


def test_forced_calls_and_formats() -> None:
    async def run() -> None:
        async with serving(CALL) as s:
            body = await respond(s, tools=[FUNCTION], tool_choice="required")
            assert [item["type"] for item in body["output"]] == ["function_call"] and grammar_of(s)
            await respond(s, tools=[FUNCTION, CUSTOM], tool_choice={"type": "function", "name": "f"})
            assert grammar_of(s)
            allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}
            await respond(s, tools=[FUNCTION, CUSTOM], tool_choice=allowed)
            assert '"g"' not in grammar_of(s)
            form = {"type": "json_schema", "name": "n", "schema": PARAMETERS}
            assert (await respond(s, text={"format": form}))["text"]["format"] == form
            assert grammar_of(s)
            bad = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "nothing"}}}
            refused = await s.post("/v1/responses", {"input": "x", "text": bad})
            assert refused.status_code == 400 and refused.json()["error"]["param"].startswith("text.format")
        async with serving("12") as s:
            custom = {**CUSTOM, "format": {"type": "grammar", "syntax": "regex", "definition": "[0-9]+"}}
            fields = {"tools": [custom], "tool_choice": {"type": "custom", "name": "g"}}
            for output in (
                (await respond(s, **fields))["output"],
                (await stream(s, **fields))[-1]["response"]["output"],
            ):
                (item,) = output
                assert item["type"] == "custom_tool_call" and item["name"] == "g" and item["input"] == "12"
            assert grammar_of(s)

    asyncio.run(run())


def test_blocks_of_a_message() -> None:
    async def run() -> None:
        tools = [{"name": name, "input_schema": {"type": "object"}} for name in ("f", "g")]
        async with serving(SAID) as s:
            body = await message(s, tools=tools)
            assert body["stop_reason"] == "tool_use"
            thinking, said, call, other = body["content"]
            assert thinking["thinking"] == "Hm." and thinking["signature"]
            assert said["text"] == "Let me see." and call["input"] == {"x": 5} and other["input"] == {"input": "a süße"}
            events = await stream_message(s, tools=tools)
            blocks: list[dict[str, Any]] = []
            for event in events:
                if event["type"] == "content_block_start":
                    blocks.append({**event["content_block"], "json": ""})
                elif event["type"] == "content_block_delta":
                    delta = event["delta"]
                    field = {"input_json_delta": "partial_json"}.get(
                        delta["type"], delta["type"].removesuffix("_delta")
                    )
                    blocks[event["index"]]["json" if field == "partial_json" else field] += delta[field]
            assert [block["type"] for block in blocks] == [block["type"] for block in body["content"]]
            assert blocks[0]["thinking"] == "Hm." and blocks[0]["signature"] and blocks[1]["text"] == "Let me see."
            assert json.loads(blocks[2]["json"]) == {"x": 5} and events[-2]["delta"]["stop_reason"] == "tool_use"
            result = [{"type": "tool_result", "tool_use_id": call["id"], "content": "six"}]
            turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": body["content"]}]
            await message(s, tools=tools, messages=[*turns, {"role": "user", "content": result}])
            assert last_prompt(s).endswith("tool: six\nassistant:")
        async with serving(CALL) as s:
            body = await message(s, tools=tools, tool_choice={"type": "any"})
            assert body["stop_reason"] == "tool_use" and grammar_of(s)
            form = {"format": {"type": "json_schema", "schema": PARAMETERS}}
            await message(s, output_config=form)
            assert grammar_of(s)
            bad = {"model": MODEL, "max_tokens": 9, "messages": turns[:1], "tools": [{"name": "a b"}]}
            assert (await s.post("/v1/messages", bad)).status_code == 400

    asyncio.run(run())
