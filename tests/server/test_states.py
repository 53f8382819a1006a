"""What the server answers while ranks load, are lost, or have too much to do, and while it drains."""

from __future__ import annotations

import asyncio
import json

import pytest
from refused import error_of
from server_parts import MODEL, STORY, FakeRanks, server, story_tokens, until

from configs.server import ServerConfig
from front.messages import NoneLeft

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}


def test_loading_then_ready_then_draining() -> None:
    async def run() -> None:
        async with server(ready=False) as s:
            for path in ("/health", "/ping", "/v1/models", "/v1/models/fox-moe"):
                assert error_of(await s.http.get(path), 503)["code"] == "loading"
            assert (await s.http.get("/live")).json() == {"status": "alive"}
            waiting = await s.http.get("/ready")
            error = error_of(waiting, 503)
            assert "rank 0, 1" in error["message"] and error["code"] == "loading"
            refused = await s.post("/v1/completions", {"prompt": "a"})
            error_of(refused, 503)
            assert refused.headers["retry-after"] == "1" and "connection" not in refused.headers
            assert (await s.http.get("/metrics")).status_code == 200
            s.ranks.load()
            await until(lambda: s.service.engine.is_ready, "ready")
            assert (await s.http.get("/ready")).json() == {"status": "ready", "mode": "full", "ranks": ["up", "up"]}
            for path in ("/health", "/ping", "/v1/models", "/v1/models/fox-moe"):
                assert (await s.http.get(path)).status_code == 200

            s.ranks.paused = True
            running = asyncio.create_task(s.complete())
            await until(lambda: s.ranks.running, "the request runs")
            draining = asyncio.create_task(s.service.engine.drain(5.0))
            await until(lambda: s.service.engine.draining, "draining")
            assert error_of(await s.http.get("/ready"), 503)["code"] == "draining"
            assert (await s.http.get("/health")).status_code == 200
            refused = await s.post("/v1/chat/completions", CHAT)
            error_of(refused, 503)
            assert refused.headers["retry-after"] == "1" and "close" in refused.headers["connection"]
            s.ranks.resume()
            assert (await running)["choices"][0]["finish_reason"] == "stop"
            assert await draining == 0

    asyncio.run(run())


def test_a_lost_rank_is_not_noticed() -> None:
    async def run() -> None:
        ranks = FakeRanks(2)
        ranks.pause_at = 3
        async with server(ranks=ranks) as s:
            whole = asyncio.create_task(s.complete(logprobs=1))
            stream = asyncio.create_task(s.events("/v1/completions", stream_options={"include_usage": True}))
            await until(lambda: ranks.steps == 3 and len(s.service.in_flight) == 2, "some tokens")
            ranks.fail(1, "out of luck")
            ranks.resume()
            choice = (await whole)["choices"][0]
            events = await stream
            text = "".join(event["choices"][0]["text"] for event in events if event["choices"])
            assert choice["text"] == text == STORY and choice["finish_reason"] == "stop"
            assert len(choice["logprobs"]["tokens"]) == events[-1]["usage"]["completion_tokens"] == len(story_tokens())
            ready = (await s.http.get("/ready")).json()
            assert ready == {
                "status": "ready",
                "mode": "degraded",
                "ranks": ["up", "lost"],
                "waiting": {"1": "out of luck"},
            }
            metrics = (await s.http.get("/metrics")).text
            for line in (
                f'moesaic:rank_up{{engine="1",model_name="{MODEL}"}} 0.0',
                f'moesaic:rank_losses_total{{model_name="{MODEL}"}} 1.0',
                f'moesaic:requests_replayed_total{{model_name="{MODEL}"}} 1.0',
                f'moesaic:recovery_seconds_count{{model_name="{MODEL}",phase="total"}} 1.0',
            ):
                assert line in metrics, line

    asyncio.run(run())


def test_too_few_ranks() -> None:
    async def run() -> None:
        async with server(num_experts=4, slots_per_rank=2) as s:
            s.ranks.fail(1, "out of luck")
            await until(lambda: s.service.engine.shortage, "too few")
            refused = await s.post("/v1/completions", {"prompt": "a"})
            assert "1 of 2 ranks serve, with room for 2 of 4 experts" in error_of(refused, 503)["message"]
            assert refused.headers["retry-after"] == "1" and "connection" not in refused.headers
            assert error_of(await s.http.get("/ready"), 503)["code"] == "short"
            assert (await s.http.get("/health")).status_code == 200

    asyncio.run(run())


def test_all_ranks_lost() -> None:
    async def run() -> None:
        async with server() as s:
            s.ranks.paused = True
            whole = asyncio.create_task(s.post("/v1/completions", {"prompt": "a"}))
            stream = asyncio.create_task(s.post("/v1/completions", {"prompt": "a", "stream": True}))
            await until(lambda: len(s.ranks.running) == 2, "both run")
            s.ranks.fail(0, "no memory")
            s.ranks.fail(1, "out of luck")
            await until(lambda: s.service.engine.shortage, "none serves")
            held = error_of(await s.post("/v1/completions", {"prompt": "a"}), 503)
            assert "0 of 2 ranks serve" in held["message"] and not whole.done() and not stream.done()
            s.ranks.say(NoneLeft("rank 1 failed: out of luck"))
            for answer in (await whole, await stream):  # nothing had been sent: also the stream gets an HTTP error
                error = error_of(answer, 503)
                assert error["code"] == "engine_failed" and "rank 1" in error["message"]
            for path in ("/health", "/ready"):
                assert "rank 1 failed: out of luck" in error_of(await s.http.get(path), 503)["message"]
            error_of(await s.post("/v1/completions", {"prompt": "a"}), 503)

    asyncio.run(run())


def test_all_ranks_lost_in_the_middle_of_a_stream() -> None:
    async def run() -> None:
        ranks = FakeRanks(2)
        ranks.pause_at = 3
        async with server(ranks=ranks) as s:
            stream = asyncio.create_task(s.post("/v1/chat/completions", {**CHAT, "stream": True}))
            await until(lambda: ranks.steps == 3 and s.service.in_flight, "some tokens")
            ranks.fail(1, "gone")
            ranks.fail(0, "gone")
            ranks.say(NoneLeft("rank 0 failed: gone"))
            answer = await stream
            assert answer.status_code == 200
            blocks = answer.text.split("\n\n")
            assert blocks[-2:] == ["data: [DONE]", ""]
            error = json.loads(blocks[-3].removeprefix("data: "))["error"]
            assert error["code"] == "engine_failed" and "rank 0" in error["message"]

    asyncio.run(run())


def test_the_queue_is_bounded() -> None:
    async def run() -> None:
        config = ServerConfig(max_queued_requests=2)
        async with server(config, max_num_seqs=1) as s:  # two ranks: 2 run, 2 wait
            s.ranks.paused = True
            running = [asyncio.create_task(s.complete(n=2, max_tokens=2)) for _ in range(2)]
            await until(lambda: len(s.ranks.running) == 4, "four sequences")
            refused = await s.post("/v1/completions", {"prompt": "a"})
            assert error_of(refused, 503)["code"] == "unavailable" and refused.headers["retry-after"] == "1"
            assert 'vllm:admission_rejections_total{engine="front"' in (await s.http.get("/metrics")).text
            too_many = await s.post("/v1/completions", {"prompt": "a", "n": 5})
            assert error_of(too_many, 400)["code"] == "too_many_sequences"
            s.ranks.resume()
            await asyncio.gather(*running)
            assert (await s.complete(max_tokens=1))["choices"]
            assert s.service.in_flight.num_sequences == 0

    asyncio.run(run())


def test_a_bug_is_a_500_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with server() as s:
            s.service.tokenizer = None  # type: ignore[assignment]  # whatever breaks
            error = error_of(await s.post("/v1/completions", {"prompt": "secret words"}), 500)
            assert error["code"] == "internal_error" and "AttributeError" not in error["message"]

    asyncio.run(run())
    assert "AttributeError" in caplog.text and "secret words" not in caplog.text
