"""What the server refuses, with which status, and that every refusal has an OpenAI error body."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from server_parts import MODEL, STORY, FakeRanks, server, story_tokens, until

from configs.server import ServerConfig
from front.messages import NoneLeft
from server.middleware import digest

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "PayloadTooLargeError",
    415: "UnsupportedMediaTypeError",
    431: "HeadersTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    (key,) = answer.json()
    error = answer.json()[key]
    assert key == "error" and set(error) == {"message", "type", "param", "code"}
    assert error["type"] == TYPES[status] and error["message"] and len(error["message"]) <= 1000
    assert error["code"] is None or isinstance(error["code"], str)
    assert "Traceback" not in answer.text
    return error  # type: ignore[no-any-return]


BAD_COMPLETIONS: list[tuple[dict[str, Any], str | None]] = [
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 2.5}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2**63}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 10**40}, "seed"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop_token_ids": [10**9]}, "stop_token_ids"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e300}, "repetition_penalty"),
    ({"n": -1}, "n"),
    ({"priority": 2**63}, "priority"),
    ({"response_format": {}}, "response_format.type"),
    ({"logit_bias": {"9999999": 1}}, "logit_bias"),
    ({"logit_bias": {"7": 1, "fox": 1}}, "logit_bias.fox"),
    ({"logprob_token_ids": [7]}, "logprob_token_ids"),
    ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
    ({"documents": [{"text": "a"}]}, "documents"),
    ({"logprobs": 21}, "logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"cache_salt": "a/b"}, "cache_salt"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"request_id": "bad id\n"}, "request_id"),
    ({"priority": 1}, "priority"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"bad_words": ["x"] * 129}, "bad_words"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [10**6]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [5] * 256}, None),
    ({"prompt": ["a"] * 1025}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 3}, "best_of"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
    ({"response_format": {"type": "yaml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 3}}},
        "response_format.json_schema",
    ),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "what"}}}}, "response_format"),
    ({"response_format": {"type": "structural_tag"}}, "response_format"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs"),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "_backend": "outlines"}}, "structured_outputs.backend"),
    ({"guided_json": {"uniqueItems": True}}, "guided_json"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_grammar": "what is this"}, "guided_grammar"),
    ({"guided_regex": "a", "guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_COMPLETIONS, ids=lambda value: str(value)[:40])
def test_a_bad_completion_names_its_field(fields: dict[str, Any], param: str | None) -> None:
    async def run() -> None:
        async with server() as s:
            answer = await s.post("/v1/completions", {"model": MODEL, "prompt": "Once", **fields})
            error = error_of(answer, 400)
            assert param is None or error["param"] == param
            if param is None:
                assert error["code"] == "context_length_exceeded"
            assert not s.ranks.sent

    asyncio.run(run())


BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"tools": []}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": []}, "functions"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ({"reasoning_effort": "heroic"}, "reasoning_effort"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_CHATS, ids=lambda value: str(value)[:40])
def test_a_bad_chat_names_its_field(fields: dict[str, Any], param: str) -> None:
    async def run() -> None:
        async with server() as s:
            answer = await s.post("/v1/chat/completions", {"model": MODEL, **CHAT, **fields})
            assert error_of(answer, 400)["param"] == param
            assert not s.ranks.sent

    asyncio.run(run())


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"[]", b"7", b'{"prompt": "a",}', b'{"x": ' + b"[" * 100_000, b'{"prompt": "\\ud800"}'],
    ids=["empty", "cut", "not utf-8", "a list", "a number", "a comma", "deep", "surrogate"],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_bad_json(path: str, content: bytes) -> None:
    async def run() -> None:
        async with server() as s:
            answer = await s.http.post(path, content=content, headers={"content-type": "application/json"})
            error_of(answer, 400)

    asyncio.run(run())


def test_routes_methods_models_and_types() -> None:
    async def run() -> None:
        async with server() as s:
            assert "/v1/embeddings" in error_of(await s.post("/v1/embeddings", {}), 404)["message"]
            error_of(await s.http.get("/nowhere/" + "x" * 5000), 404)
            refused = await s.http.get("/v1/completions")
            error_of(refused, 405)
            assert refused.headers["allow"] == "POST"
            for path in ("/v1/completions", "/v1/chat/completions"):
                error = error_of(await s.post(path, {"model": "gpt-9", "prompt": "a", **CHAT}), 404)
                assert "gpt-9" in error["message"] and error["param"] == "model" and error["code"] == "model_not_found"
            error_of(await s.http.get("/v1/models/gpt-9"), 404)
            for headers in ({"content-type": "text/plain"}, {}):
                error_of(await s.http.post("/v1/completions", content=b"{}", headers=headers), 415)
            zipped = {"content-type": "application/json", "content-encoding": "gzip"}
            error_of(await s.http.post("/v1/completions", content=b"{}", headers=zipped), 415)
            error_of(await s.http.request("OPTIONS", "/v1/models", headers={"origin": "http://evil"}), 405)

    asyncio.run(run())


def test_a_small_request_does_not_earn_a_huge_error() -> None:
    async def run() -> None:
        async with server() as s:
            answer = await s.post("/v1/completions", {"model": "m" * 100_000, "prompt": "a"})
            assert len(answer.content) < 2500
            error_of(answer, 404)
            answer = await s.post("/v1/completions", {"prompt": "a", "logit_bias": {"x" * 100_000: 1}})
            assert len(answer.content) < 2500

    asyncio.run(run())


def test_limits_on_bodies_and_headers() -> None:
    async def run() -> None:
        async with server(ServerConfig(max_body_bytes=1000, max_header_bytes=2000)) as s:
            error_of(await s.post("/v1/completions", {"prompt": "a" * 2000}), 413)

            async def pieces() -> Any:
                for _ in range(20):
                    yield b" " * 100

            headers = {"content-type": "application/json"}
            error_of(await s.http.post("/v1/completions", content=pieces(), headers=headers), 413)
            error_of(await s.http.get("/v1/models", headers={"x-long": "a" * 3000}), 431)
            error_of(await s.http.get("/v1/models?" + "a" * 3000), 431)
            assert (await s.http.get("/v1/models")).status_code == 200

    asyncio.run(run())


# ---- keys ---------------------------------------------------------------------------------------------------------

OPEN = ("/health", "/live", "/ping", "/ready", "/metrics", "/load", "/version", "/openapi.json", "/docs")
CLOSED = ("/v1/models", "/v1/models/fox-moe", "/tokenizer_info", "/nowhere")


def test_keys() -> None:
    async def run() -> None:
        config = ServerConfig(api_key_digests=(digest("one"), digest("two")), admin_key_digests=(digest("boss"),))
        async with server(config) as s:
            for path in OPEN:
                assert (await s.http.get(path)).status_code == 200
            for path in CLOSED:
                refused = await s.http.get(path)
                assert error_of(refused, 401)["code"] == "invalid_api_key"
                assert refused.headers["www-authenticate"] == "Bearer"
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
                error_of(await s.post(path, {}), 401)
            for good in (
                {"authorization": "Bearer one"},
                {"authorization": "bEARER  two"},
                {"x-api-key": "one"},
                {"authorization": "Bearer wrong", "x-api-key": "two"},
                {"authorization": "Bearer boss"},
            ):
                assert (await s.http.get("/v1/models", headers=good)).status_code == 200, good
            for bad in (
                {"authorization": "Bearer three"},
                {"authorization": "Bearer "},
                {"authorization": "one"},
                {"authorization": "Basic one"},
                {"x-api-key": digest("one")},
                {"x-api-key": ""},
            ):
                error_of(await s.http.get("/v1/models", headers=bad), 401)
            error_of(await s.post("/reset_prefix_cache", {}), 401)
            error_of(await s.post("/reset_prefix_cache", {}, headers={"x-api-key": "one"}), 403)
            answer = await s.post("/reset_prefix_cache", {}, headers={"x-api-key": "boss"})
            assert answer.status_code == 200

    asyncio.run(run())


def test_without_keys_only_administration_is_closed() -> None:
    async def run() -> None:
        async with server() as s:
            assert (await s.http.get("/v1/models")).status_code == 200
            for path in ("/abort_requests", "/reset_prefix_cache"):
                assert error_of(await s.post(path, {"request_ids": []}), 403)["code"] == "no_admin_key"

    asyncio.run(run())


def test_cors_is_closed_unless_opened() -> None:
    async def run() -> None:
        origin = {"origin": "http://page.example"}
        async with server() as s:
            assert "access-control-allow-origin" not in (await s.http.get("/v1/models", headers=origin)).headers
        async with server(ServerConfig(allowed_origins=("http://page.example",))) as s:
            answer = await s.http.get("/v1/models", headers=origin)
            assert answer.headers["access-control-allow-origin"] == "http://page.example"
            ask = {**origin, "access-control-request-method": "POST"}
            assert (await s.http.request("OPTIONS", "/v1/completions", headers=ask)).status_code == 200

    asyncio.run(run())


# ---- states -------------------------------------------------------------------------------------------------------


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
            await until(lambda: ranks.steps == 3 and len(s.service.flights) == 2, "some tokens")
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
            await until(lambda: ranks.steps == 3 and s.service.flights, "some tokens")
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
            assert s.service.flights.num_sequences == 0

    asyncio.run(run())


def test_a_bug_is_a_500_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with server() as s:
            s.service.tokenizer = None  # type: ignore[assignment]  # whatever breaks
            error = error_of(await s.post("/v1/completions", {"prompt": "secret words"}), 500)
            assert error["code"] == "internal_error" and "AttributeError" not in error["message"]

    asyncio.run(run())
    assert "AttributeError" in caplog.text and "secret words" not in caplog.text
