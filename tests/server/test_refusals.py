"""What the server refuses, with which status, and that every refusal has an OpenAI error body."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from refused import error_of
from server_parts import MODEL, server

from configs.server import ServerConfig
from server.middleware import digest

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
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
    ({"logprob_token_ids": [7]}, "logprob_token_ids"),  # without logprobs
    ({"logprob_token_ids": [], "logprobs": 1}, "logprob_token_ids"),
    ({"logprob_token_ids": [10**9], "logprobs": 1}, "logprob_token_ids"),
    ({"logprob_token_ids": [1] * 21, "logprobs": 1}, "logprob_token_ids"),
    ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
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
    ({"use_beam_search": True, "stream": True}, "stream"),
    ({"use_beam_search": True, "n": 65}, "n"),
    ({"use_beam_search": True, "n": 3, "beam_width": 2}, "n"),
    ({"use_beam_search": True, "beam_width": 65}, "beam_width"),
    ({"use_beam_search": True, "stop": "x"}, "stop"),
    ({"use_beam_search": True, "presence_penalty": 0.5}, "presence_penalty"),
    ({"use_beam_search": True, "echo": True, "logprobs": 1}, "echo"),
    ({"use_beam_search": True, "response_format": {"type": "json_object"}}, "use_beam_search"),
    ({"use_beam_search": True, "length_penalty": 100}, "length_penalty"),
    ({"use_beam_search": True, "early_stopping": "soon"}, "early_stopping"),
    ({"length_penalty": 2.0}, "length_penalty"),
    ({"early_stopping": True}, "early_stopping"),
    ({"beam_width": 2}, "beam_width"),
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
    ({"min_tokens": 10**6}, "min_tokens"),  # more than the context has
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
    ({"messages": [{"role": "user", "content": [{"type": "refusal", "text": "x"}]}]}, "messages[0].content[0].refusal"),
    ({"tools": [{"function": {"name": "f"}}], "tool_choice": {"type": "function"}}, "tool_choice.function.name"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"tools": []}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "auto"}, "tool_choice"),
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
