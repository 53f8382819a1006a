"""What ends a request from outside: the client, an administrator, time. And keep-alives."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import msgspec
import pytest
from server_parts import MODEL, STORY, Server, parse_events, rank_ready, server, small_tokenizer, story_tokens, until

from configs.server import ServerConfig
from front.messages import Joined, RankLost
from server.middleware import digest

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
BOSS = {"x-api-key": "boss"}
PATHS = ["/v1/completions", "/v1/chat/completions"]


class Connection:
    """A client that can leave: speaks ASGI with the application itself."""

    def __init__(self, s: Server, path: str, body: dict[str, Any]) -> None:
        content = json.dumps({"model": MODEL, **body}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        self.scope = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
            "headers": headers, "http_version": "1.1", "scheme": "http", "root_path": "",
        }  # fmt: skip
        self.content: bytes | None = content
        self.left = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        self.stuck: asyncio.Event | None = None  # when set, sends wait for it: the client does not read
        self.task = asyncio.create_task(s.app(self.scope, self.receive, self.send))

    async def receive(self) -> dict[str, Any]:
        if self.content is not None:
            content, self.content = self.content, None
            return {"type": "http.request", "body": content, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if self.stuck is not None:
            await self.stuck.wait()
        self.sent.append(message)

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_a_client_that_leaves_aborts_its_request(path: str, stream: bool, begun: bool) -> None:
    async def run() -> None:
        async with server() as s:
            s.ranks.paused = not begun
            s.ranks.pause_at = 5
            body = {"prompt": "a", **CHAT, "stream": stream, "max_tokens": 200, "n": 2}
            client = Connection(s, path, body)
            await until(lambda: len(s.ranks.running) == 2, "both choices run")
            if begun:
                await until(lambda: s.ranks.steps == 5, "some tokens")
            client.left.set()
            await until(lambda: not s.ranks.running, "the ranks are told")
            assert sorted(s.ranks.aborted()) == [0, 1]
            await asyncio.wait_for(client.task, 5.0)
            assert not s.service.in_flight and not s.service.engine.num_requests
            if not begun:
                assert not client.sent

    asyncio.run(run())


def test_leaving_aborts_all_prompts() -> None:
    async def run() -> None:
        async with server() as s:
            s.ranks.paused = True
            client = Connection(s, "/v1/completions", {"prompt": ["a", "b", "c"]})
            await until(lambda: len(s.ranks.running) == 3, "three prompts run")
            client.left.set()
            await until(lambda: not s.ranks.running, "the ranks are told")
            await asyncio.wait_for(client.task, 5.0)

    asyncio.run(run())


@pytest.mark.parametrize("what", ["abort", "drain", "loss"])
def test_what_comes_while_prompts_are_sent_holds_for_all_of_them(what: str) -> None:
    """Prompts go to the ranks in groups, and others have their turn between two of those."""

    async def run() -> None:
        async with server() as s:
            engine = s.service.engine
            s.ranks.paused = True
            body = {"model": MODEL, "prompt": ["a"] * 40, "max_tokens": 2, "request_id": "forty"}
            answer = asyncio.create_task(s.post("/v1/completions", body))
            while not engine.num_requests:
                await asyncio.sleep(0)
            assert engine.num_requests < 40
            drained = None
            if what == "abort":
                for name in s.service.in_flight.prompt_ids(["forty"]):
                    engine.abort(name)
            elif what == "drain":
                drained = asyncio.create_task(engine.drain(30.0))
            else:
                for rank in range(2):
                    s.ranks.drop(rank)
                    engine.front.on_message(RankLost(rank, "killed", time.monotonic(), engine.ready[rank].process))
                assert engine.shortage
                await until(lambda: engine.num_requests == 40, "all wait for a rank")
                for rank in range(2):
                    ready = rank_ready(rank, small_tokenizer().vocab_size)
                    s.ranks.say(msgspec.structs.replace(ready, process=7))
                    own = {"agree_seconds": 0.0, "repair_seconds": 0.0, "experts_loaded": 0, "bytes_read": 0}
                    s.ranks.say(Joined(rank=rank, epoch=99, **own))
            s.ranks.resume()
            choices = (await answer).json()["choices"]
            assert [choice["finish_reason"] for choice in choices] == ["abort" if what == "abort" else "length"] * 40
            assert drained is None or await drained == 0
            assert not engine.num_requests and not s.service.in_flight

    asyncio.run(run())


@pytest.mark.parametrize("path", PATHS)
def test_time_limits(path: str) -> None:
    async def run() -> None:
        async with server(ServerConfig(request_timeout=0.1)) as s:
            s.ranks.paused = True
            answer = await s.post(path, {"prompt": "a", **CHAT})
            assert answer.status_code == 408
            assert answer.json()["error"]["type"] == "RequestTimeoutError"
            assert not s.ranks.running and not s.service.in_flight

    asyncio.run(run())


def test_a_time_limit_in_the_middle_of_a_stream() -> None:
    async def run() -> None:
        async with server(ServerConfig(request_timeout=0.3)) as s:
            s.ranks.pause_at = 3
            client = Connection(s, "/v1/completions", {"prompt": "a", "stream": True, "max_tokens": 400})
            await asyncio.wait_for(client.task, 5.0)
            assert client.sent[0]["status"] == 200
            events = parse_events(client.text)
            assert events[-1]["error"]["code"] == "timeout"
            assert client.sent[-1]["more_body"] is False

    asyncio.run(run())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_an_administrator_aborts(path: str, stream: bool) -> None:
    async def run() -> None:
        async with server(ServerConfig(admin_key_digests=(digest("boss"),))) as s:
            s.ranks.paused = True
            body = {"prompt": "a", **CHAT, "stream": stream}
            task = asyncio.create_task(s.post(path, body, headers={"x-request-id": "mine-1"}))
            other = asyncio.create_task(s.post(path, body, headers={"x-request-id": "mine-2"}))
            await until(lambda: len(s.ranks.running) == 2, "both run")
            prefix = "cmpl-" if path == "/v1/completions" else "chatcmpl-"
            ids = {"request_ids": [prefix + "mine-1", "unknown"]}
            assert (await s.post("/abort_requests", ids, headers=BOSS)).json() == {"aborted": 1}
            answer = await task
            assert answer.status_code == 200 and answer.headers["x-request-id"] == "mine-1"
            last = parse_events(answer.text)[-1] if stream else answer.json()
            assert last["choices"][0]["finish_reason"] == "abort" and last["id"] == prefix + "mine-1"
            s.ranks.resume()
            assert (await other).status_code == 200

    asyncio.run(run())


def test_two_requests_may_have_one_id() -> None:
    async def run() -> None:
        async with server() as s:
            same = {"x-request-id": "retry"}
            body = {"prompt": "a", "max_tokens": 3}
            answers = await asyncio.gather(*(s.post("/v1/completions", body, headers=same) for _ in range(3)))
            assert {answer.json()["id"] for answer in answers} == {"cmpl-retry"}
            body["request_id"] = "body-wins"
            answer = await s.post("/v1/completions", body, headers=same)
            assert answer.json()["id"] == "cmpl-body-wins"
            answer = await s.http.get("/version", headers={"x-request-id": "not fit \x7f"})
            assert len(answer.headers["x-request-id"]) == 32

    asyncio.run(run())


def test_keep_alives_while_nothing_comes() -> None:
    async def run() -> None:
        async with server(ServerConfig(keep_alive_interval=0.04)) as s:
            s.ranks.paused = True
            client = Connection(s, "/v1/chat/completions", {**CHAT, "stream": True})
            await until(lambda: client.text.count(": keep-alive\n\n") >= 3, "keep-alives")
            assert client.sent[0]["type"] == "http.response.start" and client.sent[0]["status"] == 200
            s.ranks.resume()
            await asyncio.wait_for(client.task, 5.0)
            events = parse_events(client.text)
            texts = [event["choices"][0]["delta"].get("content", "") for event in events]
            assert "".join(texts) == STORY
            assert sum(message["type"] == "http.response.start" for message in client.sent) == 1

    asyncio.run(run())


def test_a_client_that_does_not_read_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.in_flight.STALL_SECONDS", 0.1)

    async def run() -> None:
        async with server(ServerConfig(keep_alive_interval=0.05)) as s:
            s.ranks.paused = True
            client = Connection(s, "/v1/completions", {"prompt": "a", "stream": True})
            client.stuck = asyncio.Event()
            await until(lambda: s.ranks.running, "it runs")
            s.ranks.resume()
            await until(lambda: not s.service.in_flight, "it is let go")
            await asyncio.wait_for(client.task, 5.0)
            assert not s.ranks.running

    asyncio.run(run())


def test_deltas_that_pile_up_leave_in_one_send() -> None:
    async def run() -> None:
        async with server(ServerConfig(keep_alive_interval=0)) as s:
            client = Connection(s, "/v1/completions", {"prompt": "a", "stream": True, "max_tokens": 400})
            client.stuck = asyncio.Event()
            await until(lambda: s.ranks.steps and not s.ranks.running, "the ranks are done")
            client.stuck.set()
            await asyncio.wait_for(client.task, 5.0)
            bodies = [message["body"] for message in client.sent if message["type"] == "http.response.body"]
            assert len(bodies) <= 4 < len(story_tokens())
            assert "".join(event["choices"][0]["text"] for event in parse_events(client.text)) == STORY

    asyncio.run(run())
