"""/v1/responses over WebSockets and its compaction, on a fake of the rank side: real connections to the real server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import websockets
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from refused import error_of
from server_parts import MODEL, STORY, last_prompt, listening, server, until
from websockets.asyncio.client import ClientConnection, connect

from configs.server import ServerConfig
from server import sockets
from server.middleware import digest

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ENDS = ("error", "response.completed", "response.incomplete", "response.failed")
OUTPUT = [{"type": "function_call_output", "call_id": "call_1", "output": "x"}]


async def turn(client: ClientConnection, **fields: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All events, and the last one."""
    await client.send(json.dumps({"type": "response.create", "model": MODEL, "input": "Hello", **fields}))
    events: list[dict[str, Any]] = []
    while not events or events[-1]["type"] not in ENDS:
        events.append(json.loads(await client.recv()))
    return events, events[-1]


async def code_of(client: ClientConnection, **fields: Any) -> str:
    _, last = await turn(client, **fields)
    assert last["type"] == "error", last
    return str(last["error"]["code"])


def test_a_turn_is_what_a_stream_is() -> None:
    async def run() -> None:
        async with server() as s, listening(s) as url, connect(url) as client:
            for _ in range(2):
                events, last = await turn(client)
                for event in events:
                    EVENTS.validate_python(event, strict=True)
                assert [event["sequence_number"] for event in events] == list(range(len(events)))
                response = last["response"]
                assert response["status"] == "completed" and response["output"][0]["content"][0]["text"] == STORY
                assert (await s.http.get(f"/v1/responses/{response['id']}")).json() == response
            names = [str(number) for number in range(sockets.MAX_WAITING + 4)]  # more than wait unread
            for name in names:
                fields = {"type": "response.create", "input": name, "max_output_tokens": 1}
                await client.send(json.dumps(fields))
            done: list[str] = []
            while len(done) < len(names):
                event = json.loads(await client.recv())
                done += [last_prompt(s)] if event["type"] in ENDS else []
            assert done == [f"user: {name}\nassistant:" for name in names]

    asyncio.run(run())


def test_what_is_not_stored_goes_on_where_it_began() -> None:
    async def run() -> None:
        async with server() as s, listening(s) as url:
            async with connect(url) as client:
                first = (await turn(client, store=False, max_output_tokens=2))[1]["response"]
                said = first["output"][0]["content"][0]["text"]
                kept = {"previous_response_id": first["id"], "store": False, "max_output_tokens": 2}
                async with connect(url) as other:
                    assert await code_of(other, **kept) == "previous_response_not_found"
                second = (await turn(client, input="And?", **kept))[1]["response"]
                assert last_prompt(s) == f"user: Hello\nassistant: {said}\nuser: And?\nassistant:"
                assert await code_of(client, **kept) == "previous_response_not_found"  # the newest alone is kept
                for name in (first["id"], second["id"]):
                    error_of(await s.http.get(f"/v1/responses/{name}"), 404)
                kept["previous_response_id"] = second["id"]
                assert await code_of(client, input=OUTPUT, **kept) == "invalid_value"  # no such call
                assert await code_of(client, **kept) == "previous_response_not_found"  # a failed turn ends the chain
                await turn(client, store=False, max_output_tokens=2)
            stored = (await s.post("/v1/responses", {"input": "Hi", "max_output_tokens": 1})).json()
            async with connect(url) as client:
                assert (await turn(client, previous_response_id=stored["id"]))[1]["type"] == "response.completed"

    asyncio.run(run())


def test_a_prompt_is_warmed_without_an_answer() -> None:
    """generate: false, as Codex sends it; the next turn goes on from it, with more input or none."""

    async def run() -> None:
        async with server() as s, listening(s) as url, connect(url) as client:
            for kept in ({"store": False}, {}):
                events, last = await turn(client, generate=False, **kept)
                for event in events:
                    EVENTS.validate_python(event, strict=True)
                names = ["response.created", "response.in_progress", "response.completed"]
                assert [event["type"] for event in events] == names
                response = last["response"]
                assert response["output"] == [] and response["status"] == "completed"
                assert response["usage"]["output_tokens"] == 0 < response["usage"]["input_tokens"]
                assert s.ranks.sent[-1].params.max_tokens == 1
                goes_on = {"previous_response_id": response["id"], **kept}
                second = (await turn(client, input=[], **goes_on))[1]["response"]
                assert second["output"][0]["content"][0]["text"] == STORY
                assert last_prompt(s) == "user: Hello\nassistant:"
            await turn(client, generate=False, input=[], instructions="Be brief.")
            assert last_prompt(s) == "system: Be brief.\nuser: \nassistant:"
            refused = await s.post("/v1/responses", {"input": "Hi", "generate": False})
            assert error_of(refused, 400)["param"] == "generate"

    asyncio.run(run())


def test_what_is_wrong_with_a_message() -> None:
    async def run() -> None:
        async with server() as s, listening(s) as url, connect(url) as client:
            for message, code in (
                ("{", "invalid_json"),
                ("[1]", "invalid_json"),
                ('{"type": 3}', "unknown_event_type"),
            ):
                await client.send(message)
                event = json.loads(await client.recv())
                assert event["type"] == "error" and event["status"] == 400 and event["error"]["code"] == code
            assert await code_of(client, model="other") == "model_not_found"
            assert await code_of(client, stop=["a"] * 17) == "invalid_request"
            assert await code_of(client, generate=False, input=[]) == "invalid_value"
            assert await code_of(client, temperature=-1) == "invalid_value"
            assert (await turn(client))[1]["type"] == "response.completed"

    asyncio.run(run())


async def status_of(url: str, **headers: str) -> int:
    with pytest.raises(websockets.InvalidStatus) as refused:
        async with connect(url, additional_headers=headers):
            pass
    assert "error" in json.loads(refused.value.response.body)
    return refused.value.response.status_code


def test_who_may_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        config = ServerConfig(api_key_digests=(digest("key"),), allowed_origins=("http://page",), root_path="/models")
        async with server(config) as s, listening(s) as url:
            key = {"Authorization": "Bearer key"}
            assert await status_of(url) == 401 and await status_of(url, Authorization="Bearer x") == 401
            assert await status_of(f"{url}/more", **key) == 404
            assert await status_of(url, Origin="http://elsewhere", **key) == 403
            own = url.replace("ws:", "http:").removesuffix(sockets.PATH)
            for origin in (own, "http://page"):
                async with connect(
                    url.replace("/v1", "/models/v1"), additional_headers={"Origin": origin, **key}
                ) as client:
                    assert (await turn(client))[1]["type"] == "response.completed"
            monkeypatch.setattr(sockets, "MAX_CONNECTIONS", 0)
            assert await status_of(url, **key) == 503

    asyncio.run(run())


def test_a_client_that_leaves_and_one_that_stays_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with server() as s, listening(s) as url:
            s.ranks.pause_at = 3
            async with connect(url) as client:
                await client.send(json.dumps({"type": "response.create", "input": "Hello"}))
                await until(lambda: s.ranks.steps == 3, "some tokens")
            await until(lambda: s.ranks.aborted() and not s.service.in_flight, "the ranks are told")
            s.ranks.pause_at = 0
            s.ranks.resume()
            monkeypatch.setattr(sockets, "LIFETIME_SECONDS", 0.05)
            async with connect(url) as client:
                assert json.loads(await client.recv())["error"]["code"] == "websocket_lifetime_reached"
                with pytest.raises(websockets.ConnectionClosed):
                    await client.recv()

    asyncio.run(run())


def test_a_conversation_summed_up() -> None:
    async def run() -> None:
        async with server(max_model_len=1024) as s:
            asked = {"model": MODEL, "input": [{"role": "user", "content": "Hello"}], "instructions": "Be brief."}
            body = (await s.post("/v1/responses/compact", asked)).json()
            assert last_prompt(s).startswith("system: Be brief.\nuser: Hello\nuser: Sum up")
            (item,) = body["output"]
            assert body["object"] == "response.compaction" and item["type"] == "compaction"
            assert body["usage"]["output_tokens"] > 0 and body["usage"]["input_tokens"] > 0
            more = [item, {"role": "user", "content": "And then?"}]
            await s.post("/v1/responses", {"input": more, "max_output_tokens": 1})
            prompt = f"system: The conversation so far, summed up:\n\n{STORY}\nuser: And then?\nassistant:"
            assert last_prompt(s) == prompt
            stored = (await s.post("/v1/responses", {"input": "Hi", "max_output_tokens": 1})).json()
            continued = {"model": MODEL, "previous_response_id": stored["id"]}
            assert (await s.post("/v1/responses/compact", continued)).status_code == 200
            for fields, param in (
                ({"model": None}, "model"),
                ({"input": []}, "input"),
                ({"stream": True}, "stream"),
                ({"background": True}, "background"),
                ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].encrypted_content"),
            ):
                assert error_of(await s.post("/v1/responses/compact", {**asked, **fields}), 400)["param"] == param

    asyncio.run(run())
