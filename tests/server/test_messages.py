"""/v1/messages on a fake of the rank side: shapes, the order of events, errors, what becomes of a request."""

from __future__ import annotations

import asyncio
import functools
import importlib
from typing import Any

import msgspec
import pytest
from pydantic import TypeAdapter
from server_parts import MODEL, STORY, Server, last_prompt, named_events, server, small_tokenizer, story_tokens, until

from configs.server import ServerConfig
from server.api.messages import MessagesRequest, to_chat
from server.api.openai import ChatRequest
from server.middleware import digest

HELLO = [{"role": "user", "content": "Hello"}]


@functools.cache
def types_of_anthropic() -> Any:
    """Imported by the worker that runs these tests, not by all that collect them: it is large."""
    return importlib.import_module("anthropic.types")


@functools.cache
def events() -> TypeAdapter[Any]:
    return TypeAdapter(types_of_anthropic().RawMessageStreamEvent)


async def message(s: Server, **fields: Any) -> dict[str, Any]:
    answer = await s.post("/v1/messages", {"model": MODEL, "max_tokens": 200, "messages": HELLO, **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    types_of_anthropic().Message.model_validate(body, strict=True)
    return body


def test_requests_have_a_name_that_clients_find() -> None:
    async def run() -> None:
        async with server() as s:
            for body in (
                {"max_tokens": 1, "messages": HELLO},
                {"max_tokens": 1, "messages": HELLO, "stream": True},
                {},
            ):
                answer = await s.post("/v1/messages", body)
                assert answer.headers["request-id"] == answer.headers["x-request-id"]
            assert "request-id" not in (await s.http.get("/v1/models")).headers

    asyncio.run(run())


def test_models_are_listed_as_the_client_reads_them() -> None:
    async def run() -> None:
        async with server() as s:
            headers = {"anthropic-version": "2023-06-01"}
            found = (await s.http.get("/v1/models", headers=headers)).json()
            one, *others = found["data"]
            last = others[-1] if others else one
            types_of_anthropic().ModelInfo.model_validate(one, strict=False)
            assert one["id"] == found["first_id"] == MODEL and last["id"] == found["last_id"] and not found["has_more"]
            assert (await s.http.get(f"/v1/models/{MODEL}", headers=headers)).json() == one
            assert (await s.http.get("/v1/models")).json()["object"] == "list"

    asyncio.run(run())


async def stream(s: Server, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": MODEL, "max_tokens": 200, "messages": HELLO, "stream": True, **fields}
    answer = await s.post("/v1/messages?beta=true", body)
    assert answer.status_code == 200, answer.text
    return named_events(answer, events())


def test_a_message() -> None:
    async def run() -> None:
        async with server() as s:
            body = await message(s, system="Be brief.")
            assert body["id"].startswith("msg_") and body["model"] == MODEL and body["role"] == "assistant"
            assert body["content"] == [{"type": "text", "text": STORY}]
            assert body["stop_reason"] == "end_turn" and body["stop_sequence"] is None
            prompt = "system: Be brief.\nuser: Hello\nassistant:"
            assert last_prompt(s) == prompt
            assert body["usage"] == {
                "input_tokens": len(small_tokenizer().encode(prompt, False)) - 4,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 4,
                "output_tokens": len(story_tokens()),
            }
            assert (await message(s, max_tokens=2))["stop_reason"] == "max_tokens"
            stopped = await message(s, stop_sequences=["fox"])
            assert stopped["stop_reason"] == "stop_sequence" and stopped["stop_sequence"] == "fox"

    asyncio.run(run())


def test_one_that_was_aborted_says_that_it_is_cut_off() -> None:
    async def run() -> None:
        async with server() as s:
            s.ranks.pause_at = 5
            answer = asyncio.create_task(message(s))
            await until(lambda: s.ranks.paused, "it is under way")
            for name in [name for one in s.service.in_flight._in_flight for name in one.prompt_ids]:
                assert s.service.engine.abort(name)
            assert (await answer)["stop_reason"] == "max_tokens"

    asyncio.run(run())


def test_the_order_of_events() -> None:
    async def run() -> None:
        async with server() as s:
            events = await stream(s, stop_sequences=["hollow"])
            kinds = [event["type"] for event in events]
            deltas = ["content_block_delta"] * kinds.count("content_block_delta")
            assert kinds == [
                *("message_start", "content_block_start", *deltas, "content_block_stop"),
                *("message_delta", "message_stop"),
            ]
            text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
            assert text == STORY[: STORY.index("hollow")]
            assert (
                events[0]["message"]["content"] == [] and events[0]["message"]["usage"]["cache_read_input_tokens"] == 4
            )
            assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "hollow"}
            assert events[-2]["usage"]["output_tokens"] > 1

    asyncio.run(run())


def test_tokens_are_counted() -> None:
    async def run() -> None:
        async with server() as s:
            counted = await s.post("/v1/messages/count_tokens", {"model": MODEL, "messages": HELLO})
            prompt = small_tokenizer().encode("user: Hello\nassistant:", False)
            assert counted.status_code == 200 and counted.json() == {"input_tokens": len(prompt)}
            assert not s.ranks.sent

    asyncio.run(run())


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"messages": []}, "messages must not be empty"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": "word " * 400}]}, "maximum context length"),
        ({"thinking": {"type": "enabled", "budget_tokens": 10}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema must be"),
        ({"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text must be"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
            "messages[0].content[0].tool_use_id is missing",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": "x"}]},
                    *HELLO,
                ]
            },
            "messages[0].content[0].input must be",
        ),
        ({"stop_sequences": [""]}, "stop"),
        ({"output_config": {"format": {"type": "yaml"}}}, "output_config.format"),
        ({"temperature": 9}, "temperature"),
    ],
)
def test_errors_have_anthropics_shape_and_name_the_field(fields: dict[str, Any], says: str) -> None:
    async def run() -> None:
        async with server() as s:
            answer = await s.post("/v1/messages", {"model": MODEL, "max_tokens": 9, "messages": HELLO, **fields})
            body = answer.json()
            assert answer.status_code == 400 and body["type"] == "error", answer.text
            assert body["error"]["type"] == "invalid_request_error" and says in body["error"]["message"], answer.text
            assert body["request_id"] == answer.headers["x-request-id"]

    asyncio.run(run())


def test_other_errors() -> None:
    async def run() -> None:
        async with server(ServerConfig(api_key_digests=(digest("sesame"),), max_queued_requests=0)) as s:
            body = {"model": MODEL, "max_tokens": 9, "messages": HELLO}
            refused = await s.post("/v1/messages", body)
            assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"
            s.http.headers["x-api-key"] = "sesame"
            unknown = await s.post("/v1/messages", {**body, "model": "other"})
            assert unknown.status_code == 404 and unknown.json()["error"]["type"] == "not_found_error"
            s.ranks.paused = True
            tasks = [asyncio.create_task(s.post("/v1/messages", body)) for _ in range(9)]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            answer = done.pop().result()
            assert answer.status_code == 529 and answer.json()["error"]["type"] == "overloaded_error"
            assert answer.headers["retry-after"]
            s.ranks.resume()
            await asyncio.gather(*tasks)

    asyncio.run(run())


# ---- the translation ----------------------------------------------------------------------------------------------


def chat(**fields: Any) -> ChatRequest:
    given = {"max_tokens": 2000, "messages": HELLO, **fields}
    return to_chat(json_request(given))


def json_request(given: dict[str, Any]) -> MessagesRequest:
    return msgspec.convert(given, MessagesRequest)


def test_what_changes_with_every_request_is_dropped() -> None:
    block = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=abc12;"}
    system = [block, {"type": "text", "text": "You are.", "cache_control": {"type": "ephemeral"}}]
    assert chat(system=system).messages[0].content == "You are."
    assert chat(system="x-anthropic-billing-header: 1\n\nYou are.").messages[0].content == "You are."
    assert chat(system=[block]).messages[0].role == "user"


def test_blocks_become_messages() -> None:
    calls = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "Let me look."},
        {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}},
        {"type": "tool_use", "id": "t2", "name": "g", "input": {}},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "one"}]},
        {"type": "tool_result", "tool_use_id": "t2", "content": "no", "is_error": True},
        {"type": "text", "text": "Go on."},
    ]
    messages = chat(
        messages=[
            *HELLO,
            {"role": "assistant", "content": calls},
            {"role": "user", "content": results},
            {"role": "system", "content": "Note."},
        ]
    ).messages
    assert [item.role for item in messages] == ["user", "assistant", "tool", "tool", "user", "user"]
    said = messages[1]
    assert said.reasoning == "hm" and said.content == "Let me look." and said.tool_calls is not None
    assert said.tool_calls[0].id == "t1" and said.tool_calls[0].function.arguments == '{"x":1}'
    assert messages[2].content == "one" and messages[2].tool_call_id == "t1" and messages[3].content == "Error: no"


def test_tools_thinking_and_formats() -> None:
    tools = [{"name": "f", "description": "F", "input_schema": {"type": "object"}, "cache_control": {}}]
    request = chat(tools=tools, tool_choice={"type": "any", "disable_parallel_tool_use": True})
    function = {"name": "f", "description": "F", "parameters": {"type": "object"}}
    assert request.tools == [{"type": "function", "function": function}] and request.tool_choice == "required"
    named = chat(tools=tools, tool_choice={"type": "tool", "name": "f"})
    assert named.tool_choice == {"type": "function", "function": {"name": "f"}}
    assert chat().chat_template_kwargs == {"enable_thinking": False, "thinking": False}
    thinking = {"type": "enabled", "budget_tokens": 1024}
    kwargs = chat(thinking=thinking, output_config={"effort": "high"}).chat_template_kwargs
    assert kwargs == {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}
    assert chat(messages=[*HELLO, {"role": "assistant", "content": "Once"}]).continue_final_message is True
