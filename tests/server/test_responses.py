"""/v1/responses on a fake of the rank side: shapes, the order of events, what is kept, what is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from refused import error_of
from server_parts import MODEL, STORY, Server, last_prompt, named_events, server, small_tokenizer, story_tokens, until

from configs.server import ServerConfig
from server.api.openai import ChatRequest
from server.api.responses import ResponsesRequest, custom_input, opened, sealed, to_chat
from server.api.stored import ResponseStore
from server.errors import ApiError

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


async def respond(s: Server, **fields: Any) -> dict[str, Any]:
    answer = await s.post("/v1/responses", {"model": MODEL, "input": "Hello", **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    Response.model_validate(body, strict=True)
    return body


async def stream(s: Server, **fields: Any) -> list[dict[str, Any]]:
    answer = await s.post("/v1/responses", {"model": MODEL, "input": "Hello", "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    events = named_events(answer, EVENTS)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_a_response() -> None:
    async def run() -> None:
        async with server() as s:
            body = await respond(s, instructions="Be brief.", metadata={"a": "b"}, temperature=0.5)
            assert body["id"].startswith("resp_") and body["status"] == "completed" and body["error"] is None
            (item,) = body["output"]
            assert item["type"] == "message" and item["role"] == "assistant" and item["status"] == "completed"
            assert item["content"] == [{"type": "output_text", "text": STORY, "annotations": [], "logprobs": []}]
            assert body["instructions"] == "Be brief." and body["metadata"] == {"a": "b"} and body["temperature"] == 0.5
            prompt = "system: Be brief.\nuser: Hello\nassistant:"
            assert last_prompt(s) == prompt
            count, output = len(small_tokenizer().encode(prompt, False)), len(story_tokens())
            assert body["usage"] == {
                "input_tokens": count,
                "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
                "output_tokens": output,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": count + output,
            }

    asyncio.run(run())


def test_a_response_that_is_cut_is_incomplete() -> None:
    async def run() -> None:
        async with server() as s:
            body = await respond(s, max_output_tokens=3)
            assert body["status"] == "incomplete" and body["incomplete_details"] == {"reason": "max_output_tokens"}
            assert body["output"][0]["status"] == "incomplete" and body["usage"]["output_tokens"] == 3
            assert (await stream(s, max_output_tokens=3))[-1]["type"] == "response.incomplete"

    asyncio.run(run())


def test_the_order_of_events() -> None:
    async def run() -> None:
        async with server() as s:
            events = await stream(s)
            kinds = [event["type"].removeprefix("response.") for event in events]
            middle = ["output_text.delta"] * kinds.count("output_text.delta")
            assert kinds == [
                *("created", "in_progress", "output_item.added", "content_part.added", *middle),
                *("output_text.done", "content_part.done", "output_item.done", "completed"),
            ]
            assert "".join(event["delta"] for event in events if event["type"].endswith("text.delta")) == STORY
            whole = await respond(s)
            last = events[-1]["response"]
            for field in ("output", "usage", "status", "text", "tools", "tool_choice"):
                if field == "output":
                    assert last[field][0]["content"] == whole[field][0]["content"]
                else:
                    assert last[field] == whole[field], field
            done = next(event for event in events if event["type"] == "response.output_item.done")
            assert done["item"] == last["output"][0]

    asyncio.run(run())


def test_what_the_model_read_and_wrote_where_it_is_asked_for() -> None:
    async def run() -> None:
        async with server() as s:
            for body in (
                await respond(s, max_output_tokens=3, enable_response_messages=True),
                (await stream(s, max_output_tokens=3, enable_response_messages=True))[-1]["response"],
            ):
                (read,), (wrote,) = body["input_messages"], body["output_messages"]
                assert read["message"] == last_prompt(s) and read["type"] == "raw_message_tokens"
                assert wrote["tokens"] == s.ranks.script[:3] and STORY.startswith(wrote["message"])
            assert "input_messages" not in await respond(s, max_output_tokens=3)

    asyncio.run(run())


def test_logprobs_where_they_are_asked_for() -> None:
    async def run() -> None:
        async with server() as s:
            fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 4}
            body = await respond(s, **fields)
            shown = body["output"][0]["content"][0]["logprobs"]
            assert len(shown) == 4 and len(shown[0]["top_logprobs"]) == 2
            events = await stream(s, **fields)
            part = next(event for event in events if event["type"] == "response.output_text.done")
            assert [entry["token"] for entry in part["logprobs"]] == [entry["token"] for entry in shown]

    asyncio.run(run())


def test_what_is_kept() -> None:
    async def run() -> None:
        async with server(ServerConfig(max_stored_responses=3)) as s:
            first = await respond(s, max_output_tokens=2)
            name = first["id"]
            assert (await s.http.get(f"/v1/responses/{name}")).json() == first
            second = await respond(s, input="And then?", previous_response_id=name, max_output_tokens=2)
            said = first["output"][0]["content"][0]["text"]
            assert last_prompt(s) == f"user: Hello\nassistant: {said}\nuser: And then?\nassistant:"
            items = (await s.http.get(f"/v1/responses/{second['id']}/input_items")).json()["data"]
            assert [item["type"] for item in items] == ["message", "message", "message"]
            reference = [{"type": "item_reference", "id": first["output"][0]["id"]}, {"role": "user", "content": "Go"}]
            await respond(s, input=reference, previous_response_id=name)
            streamed = (await stream(s, max_output_tokens=2))[-1]["response"]
            assert (await s.http.get(f"/v1/responses/{streamed['id']}")).json() == streamed
            assert (await s.http.get(f"/v1/responses/{name}")).status_code == 404  # the oldest of four
            assert (await s.http.delete(f"/v1/responses/{second['id']}")).json()["deleted"] is True
            assert (await s.http.get(f"/v1/responses/{second['id']}")).status_code == 404
            unkept = await respond(s, store=False)
            assert (await s.http.get(f"/v1/responses/{unkept['id']}")).status_code == 404
            missing = await s.post("/v1/responses", {"input": "x", "previous_response_id": "resp_no"})
            assert missing.status_code == 404 and missing.json()["error"]["param"] == "previous_response_id"
            assert (await s.http.get("/v1/responses/other")).status_code == 400
            assert (await s.http.post(f"/v1/responses/{streamed['id']}/cancel")).status_code == 400

    asyncio.run(run())


def test_bounds_of_what_is_kept() -> None:
    store = ResponseStore(max_count=2, max_bytes=200)
    for number in range(3):
        store.put({"id": f"resp_{number}", "output": []}, [{"text": "x" * 40}])
    assert len(store) == 2 and store.get("resp_0") is None
    store.put({"id": "resp_3", "output": []}, [{"text": "x" * 120}])
    assert len(store) == 1 and store.num_bytes <= 200
    store.put({"id": "resp_4", "output": []}, [{"text": "x" * 300}])
    assert store.get("resp_4") is None and store.get("resp_3") is not None
    assert store.drop("resp_3") and not store.num_bytes


def test_tokens_are_counted_as_in_a_request() -> None:
    async def run() -> None:
        async with server() as s:
            first = await respond(s)
            for more in ({}, {"instructions": "Be brief."}, {"previous_response_id": first["id"]}):
                body = {"model": MODEL, "input": "Hello", **more}
                counted = (await s.post("/v1/responses/input_tokens", body)).json()
                tokens = (await respond(s, **more))["usage"]["input_tokens"]
                assert counted == {"object": "response.input_tokens", "input_tokens": tokens}
            refused = error_of(await s.post("/v1/responses/input_tokens", {"input": ""}), 400)
            assert refused["param"] == "input"

    asyncio.run(run())


def test_in_the_background() -> None:
    async def run() -> None:
        async with server() as s:
            body = await respond(s, background=True)
            name = body["id"]
            assert body["status"] == "queued"

            async def now() -> dict[str, Any]:
                return (await s.http.get(f"/v1/responses/{name}")).json()  # type: ignore[no-any-return]

            while (await now())["status"] in ("queued", "in_progress"):
                await asyncio.sleep(0.005)
            done = await now()
            assert done["status"] == "completed" and done["output"][0]["content"][0]["text"] == STORY
            assert (await s.http.post(f"/v1/responses/{name}/cancel")).json()["status"] == "completed"
            s.ranks.paused = True
            name = (await respond(s, background=True))["id"]
            assert len(s.service.in_flight) == 1
            cancelled = (await s.http.post(f"/v1/responses/{name}/cancel")).json()
            assert cancelled["status"] == "cancelled" and (await now())["status"] == "cancelled"
            await until(lambda: not len(s.service.in_flight), "nothing in flight")
            assert s.ranks.aborted()

    asyncio.run(run())


def test_what_runs_is_not_forgotten() -> None:
    """However many came behind it."""

    async def run() -> None:
        async with server(ServerConfig(max_stored_responses=1)) as s:
            s.ranks.paused = True
            names = [(await respond(s, background=True))["id"] for _ in range(3)]
            s.ranks.resume()
            await respond(s)
            s.ranks.paused = True
            names += [(await respond(s, background=True))["id"] for _ in range(2)]
            for name in names[3:]:
                assert (await s.http.get(f"/v1/responses/{name}")).json()["status"] == "queued"
            assert (await s.http.post(f"/v1/responses/{names[3]}/cancel")).json()["status"] == "cancelled"
            s.ranks.resume()
            await until(lambda: not len(s.service.in_flight), "all have ended")
            found = [(await s.http.get(f"/v1/responses/{name}")).status_code for name in names]
            assert found == [404, 404, 404, 404, 200]

    asyncio.run(run())


def test_streams_of_the_background_can_be_left_and_taken_up() -> None:
    async def run() -> None:
        async with server() as s:
            s.ranks.pause_at = 5
            body = {"model": MODEL, "input": "Once", "background": True, "stream": True}
            first = asyncio.create_task(s.post("/v1/responses", body))
            await until(lambda: s.ranks.paused, "in the middle of the story")
            first.cancel()
            [name] = [one.answer_id for one in s.service.in_flight._in_flight if one.answer_id]
            kept = await s.http.get(f"/v1/responses/{name}")
            assert kept.json()["status"] == "in_progress"
            second = asyncio.create_task(s.http.get(f"/v1/responses/{name}?stream=true"))
            s.ranks.pause_at = 0
            s.ranks.resume()
            events = named_events(await second, EVENTS)
            assert [event["sequence_number"] for event in events] == [*range(len(events))]
            kinds = [event["type"].removeprefix("response.") for event in events]
            assert kinds[:3] == ["created", "queued", "in_progress"] and kinds[-1] == "completed"
            assert events[0]["response"]["id"] == name
            text = "".join(event["delta"] for event in events if event["type"].endswith("text.delta"))
            assert text == STORY == events[-1]["response"]["output"][0]["content"][0]["text"]
            for after in (-1, 4, len(events) - 1):  # also when it has ended
                path = f"/v1/responses/{name}?stream=true&starting_after={after}"
                assert named_events(await s.http.get(path), EVENTS) == events[after + 1 :]
            error_of(await s.http.get(f"/v1/responses/{name}?stream=true&starting_after=x"), 400)
            plain = (await respond(s))["id"]
            error_of(await s.http.get(f"/v1/responses/{plain}?stream=true"), 400)
            s.ranks.paused = True
            third = asyncio.create_task(s.post("/v1/responses", body))
            await until(lambda: len(s.service.in_flight) == 2, "it runs, and is followed")
            [name] = [one.answer_id for one in s.service.in_flight._in_flight if one.answer_id]
            assert (await s.http.post(f"/v1/responses/{name}/cancel")).json()["status"] == "cancelled"
            last = named_events(await third, EVENTS)[-1]
            assert last["type"] == "response.failed" and last["response"]["status"] == "cancelled"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": 5}]}]}, "input[0].content[0].text"),
        ({"input": [{"role": 5, "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": "x"}, {"content": "x"}]}, "input[1].type"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": "word " * 400}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 9}, "temperature"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True, "store": False}, "background"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        (
            {"tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "function", "name": "g"}},
            "tool_choice",
        ),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], param: str) -> None:
    async def run() -> None:
        async with server() as s:
            answer = await s.post("/v1/responses", {"model": MODEL, "input": "Hello", **fields})
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == param, answer.text

    asyncio.run(run())


def test_a_long_conversation_loses_its_oldest_turns_where_that_is_asked_for() -> None:
    async def run() -> None:
        async with server() as s:
            turns = [
                {"role": role, "content": f"{n} " + "a fox " * 5} for n in range(12) for role in ("user", "assistant")
            ]
            items = [{"role": "developer", "content": "Be brief."}, *turns, {"role": "user", "content": "And?"}]
            refused = await s.post("/v1/responses", {"input": items})
            assert refused.json()["error"]["code"] == "context_length_exceeded"
            await respond(s, input=items, truncation="auto", max_output_tokens=1)
            prompt = last_prompt(s)
            assert prompt.startswith("system: Be brief.\nuser: ") and prompt.endswith("user: And?\nassistant:")
            assert "user: 11 " in prompt and "user: 0 " not in prompt

    asyncio.run(run())


# ---- the translation ----------------------------------------------------------------------------------------------


def chat(**fields: Any) -> ChatRequest:
    return to_chat(ResponsesRequest(**{"input": "Hello", **fields}), [])[0]


def test_items_become_messages() -> None:
    items = [
        {"role": "developer", "content": "D"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'},
        {"type": "custom_tool_call", "call_id": "c2", "name": "g", "input": "text"},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": sealed("sealed")},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "done"}]},
        {"type": "local_shell_call", "call_id": "c3", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "c3", "output": "files"},
    ]
    messages = chat(input=items, instructions="I").messages
    assert [message.role for message in messages] == [
        *("system", "user", "assistant", "tool", "tool", "assistant", "tool")
    ]
    assert messages[0].content == "I\n\nD" and messages[1].content == "a\nb"
    calls = messages[2].tool_calls
    assert calls is not None and messages[2].reasoning == "hm" and [call.id for call in calls] == ["c1", "c2"]
    assert calls[1].function.arguments == '{"input":"text"}'
    assert messages[3].tool_call_id == "c1" and messages[4].content == "two"
    assert messages[5].reasoning == "sealed" and messages[5].content == "done"
    later = messages[5].tool_calls
    assert later is not None and later[0].function.name == "local_shell" and messages[6].content == "files"


def test_tools_and_formats() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
    tools = [
        {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True},
        {"type": "custom", "name": "g", "description": "G", "format": grammar},
        {"type": "web_search"},
    ]
    request = chat(tools=tools, tool_choice="required", parallel_tool_calls=False)
    assert [tool["function"]["name"] for tool in request.tools] == ["f", "g"] and request.tool_choice == "required"
    assert request.tools[0]["function"]["strict"] is True
    assert request.tools[1]["function"]["parameters"]["required"] == ["input"]
    assert 'start: "a"' in request.tools[1]["function"]["description"]
    named = {"type": "custom", "name": "g"}
    forced = chat(tools=tools, tool_choice=named)
    assert forced.structured_outputs is not None and forced.structured_outputs.grammar == 'start: "a"'
    assert forced.tool_choice == "none"
    assert ResponsesRequest(tools=tools, tool_choice=named).forced_custom == "g"
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}
    assert len(chat(tools=tools, tool_choice=allowed).tools or ()) == 2  # they stay in the prompt
    with pytest.raises(ApiError, match="tool_choice"):
        chat(tools=tools, tool_choice={"type": "web_search"})
    assert custom_input('{"input": "text"}') == "text" and custom_input("{cut") == "{cut"
    assert opened(sealed("ü")) == "ü" and opened("other") == "" and opened("moesaic:!") == ""
