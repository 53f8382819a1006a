"""Models, tokens, versions, metrics, logs."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families
from refused import error_of
from server_parts import MAX_MODEL_LEN, MODEL, STORY, server, small_tokenizer, story_tokens

from configs.server import ServerConfig
from server import logs
from server.middleware import digest
from server.web import FILES, ROOT


def test_models() -> None:
    async def run() -> None:
        async with server() as s:
            listed = (await s.http.get("/v1/models")).json()
            assert listed["object"] == "list" and [model["id"] for model in listed["data"]] == [MODEL, "fox/alias"]
            for model in listed["data"]:
                assert model["object"] == "model" and model["root"] == MODEL and model["owned_by"] == "moesaic"
                assert model["max_model_len"] == MAX_MODEL_LEN and model["created"] == 1_700_000_000
                assert (await s.http.get(f"/v1/models/{model['id']}")).json() == model

    asyncio.run(run())


def test_messages_are_tokenized_as_in_a_chat_request() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    template = "{{ tools | tojson if tools }}{{ reasoning_effort }}{{ x }}{{ documents }}{{ messages[0].content }}"
    fields: list[dict[str, object]] = [
        {"tools": tools},
        {"reasoning_effort": "low"},
        {"chat_template_kwargs": {"x": 1}},
    ]

    async def run() -> None:
        async with server(ServerConfig(chat_template=template, tool_call_parser="hermes")) as s:
            messages = [{"role": "user", "content": "Hi"}]
            counts = set()
            for more in fields:
                counted = (await s.post("/tokenize", {"messages": messages, **more})).json()["count"]
                whole = await s.chat(messages=messages, max_tokens=1, **more)
                assert counted == whole["usage"]["prompt_tokens"]
                counts.add(counted)
            assert len(counts) == 3
            for field, wrong in (("tools", []), ("chat_template", "x"), ("tools[0].type", [{"type": "mcp"}])):
                more = {field.partition("[")[0]: wrong}
                assert error_of(await s.post("/tokenize", {"messages": messages, **more}), 400)["param"] == field

    asyncio.run(run())


def test_tokens_to_text_and_back() -> None:
    async def run() -> None:
        async with server() as s:
            tokenizer = small_tokenizer()
            for prefix in ("", "/v1"):
                body = (await s.post(f"{prefix}/tokenize", {"model": MODEL, "prompt": STORY})).json()
                ids = tokenizer.encode(STORY)
                assert body == {"count": len(ids), "max_model_len": MAX_MODEL_LEN, "tokens": ids, "token_strs": None}
                back = (await s.post(f"{prefix}/detokenize", {"tokens": ids})).json()
                assert back == {"prompt": "<|bos|>" + STORY}
            bare = {"prompt": "a fox", "add_special_tokens": False, "return_token_strs": True}
            body = (await s.post("/tokenize", bare)).json()
            assert "".join(body["token_strs"]) == "aĠfox"
            chat = {"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": False}
            body = (await s.post("/tokenize", chat)).json()
            assert tokenizer.decode(body["tokens"]) == "user: Hi\n"
            assert (await s.post("/tokenize", {"prompt": ""})).json()["count"] == 1  # BOS
            long = (await s.post("/tokenize", {"prompt": STORY * 500})).json()
            assert long["count"] == len(tokenizer.encode(STORY * 500))
            for path, bad in (
                ("/tokenize", {}),
                ("/tokenize", {"prompt": "a", **chat}),
                ("/detokenize", {"tokens": [10**9]}),
                ("/detokenize", {"tokens": [-1]}),
                ("/detokenize", {}),
            ):
                assert (await s.post(path, bad)).status_code == 400
            assert (await s.post("/detokenize", {"tokens": [], "model": "other"})).status_code == 404

    asyncio.run(run())


def test_small_pages() -> None:
    async def run() -> None:
        async with server(ServerConfig(admin_key_digests=(digest("boss"),))) as s:
            assert (await s.http.get("/version")).json()["version"]
            for path in ("/health", "/ping"):
                assert (await s.http.get(path)).json() == {"status": "alive"}
            assert (await s.http.post("/ping")).json() == {"status": "alive"}
            assert (await s.http.head("/health")).status_code == 200
            boss = {"authorization": "Bearer boss"}
            assert (await s.http.post("/reset_prefix_cache", headers=boss)).status_code == 200
            assert len(s.ranks.sent) == 2

    asyncio.run(run())


def test_metrics() -> None:
    async def run() -> None:
        async with server() as s:
            await s.complete(n=2)
            await s.chat(max_tokens=3)
            await s.events("/v1/completions", max_tokens=3)
            await s.post("/v1/completions", {"prompt": "a", "temperature": 9})
            await s.http.get("/nowhere")
            answer = await s.http.get("/metrics")
            assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
            samples = {}
            for family in text_string_to_metric_families(answer.text):
                for sample in family.samples:
                    key = tuple(sorted((name, value) for name, value in sample.labels.items() if name != "le"))
                    samples[sample.name, key] = sample.value

            def total(name: str, **labels: str) -> float:
                found = [
                    value for (own, key), value in samples.items() if own == name and set(labels.items()) <= set(key)
                ]
                assert found, name
                return sum(found)

            for name in ("running", "waiting"):
                assert total(f"vllm:num_requests_{name}", model_name=MODEL, engine="1") == 0
            assert total("vllm:kv_cache_usage_perc") == 0.5
            for name in ("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits"):
                total(f"vllm:{name}_total")
            total("vllm:num_preemptions_total")
            assert total("moesaic:dbo_steps_total") == 0
            assert total("moesaic:dbo_overlap_ratio", model_name=MODEL, engine="1") == 0.75
            assert total("vllm:request_success_total", finished_reason="stop") == 2
            assert total("vllm:request_success_total", finished_reason="length") == 2
            for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_prompt_tokens"):
                assert total(f"vllm:{name}_count") == 3
            assert total("vllm:request_generation_tokens_sum") == 2 * len(story_tokens()) + 6
            assert total("vllm:inter_token_latency_seconds_count") == 2 * (len(story_tokens()) - 1) + 4
            assert total("vllm:cache_config_info", block_size="16", num_gpu_blocks="64") == 2
            assert total("http_requests_total", method="POST", handler="/v1/completions", status="200") == 2
            assert total("http_requests_total", handler="/v1/completions", status="400") == 1
            assert total("http_requests_total", handler="unmatched", status="404") == 1
            assert total("process_resident_memory_bytes") > 0

    asyncio.run(run())


@pytest.fixture
def root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    others = [logging.getLogger(name) for name in ("uvicorn", logs.REQUESTS)]
    levels = [logger.level for logger in others]
    yield
    root.handlers[:], root.level = handlers, level
    for logger, old in zip(others, levels, strict=True):
        logger.setLevel(old)


@pytest.mark.usefixtures("root_logger")
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_one_line_per_request_without_prompts_or_keys(log_format: str) -> None:
    stream = io.StringIO()
    logs.configure(log_format, True, stream)

    async def run() -> None:
        async with server(ServerConfig(api_key_digests=(digest("sesame"),))) as s:
            s.http.headers["authorization"] = "Bearer sesame"
            named = {"x-request-id": "r-1"}
            await s.post("/v1/completions", {"prompt": "very secret", "max_tokens": 3}, headers=named)
            await s.http.get("/health")
            await s.http.get("/v1/nowhere?key=sesame")

    asyncio.run(run())
    lines = [line for line in stream.getvalue().splitlines() if "moesaic.requests" in line]
    assert len(lines) == 2
    ours = "\n".join(line for line in stream.getvalue().splitlines() if "httpx" not in line)  # the client logs too
    assert "secret" not in ours and "sesame" not in ours and "Once" not in ours
    if log_format == "json":
        first = json.loads(lines[0])
        assert first["request_id"] == "r-1" and first["route"] == "/v1/completions" and first["status"] == 200
        assert first["output_tokens"] == 3 and first["finish"] == "length" and first["model"] == MODEL
        assert first["ttft_ms"] <= first["e2e_ms"]
        assert json.loads(lines[1])["status"] == 404
    else:
        assert "request_id=r-1" in lines[0] and "output_tokens=3" in lines[0] and "status=404" in lines[1]


@pytest.mark.usefixtures("root_logger")
def test_log_settings() -> None:
    with pytest.raises(ValueError, match="log_format"):
        logs.configure("xml", True, io.StringIO())
    stream = io.StringIO()
    logs.configure("text", False, stream)
    logs.log_request(logs.Record("r", "GET"))
    assert not stream.getvalue()


def test_a_root_path_and_defaults_of_templates() -> None:
    async def run() -> None:
        config = ServerConfig(root_path="/models/fox", chat_template_kwargs={"enable_thinking": True})
        async with server(config) as s:
            for path in ("/models/fox/health", "/health", "/models/fox/v1/models"):
                assert (await s.http.get(path)).status_code == 200
            assert (await s.http.get("/models/foxes/health")).status_code == 404
            said = {"messages": [{"role": "user", "content": "Hi"}]}
            tokens = (await s.post("/models/fox/tokenize", said)).json()["tokens"]
            assert small_tokenizer().decode(tokens).endswith("assistant: think")
            plain = {**said, "chat_template_kwargs": {"enable_thinking": False}}
            tokens = (await s.post("/tokenize", plain)).json()["tokens"]
            assert small_tokenizer().decode(tokens).endswith("assistant:")

    asyncio.run(run())


def test_the_page_needs_no_key_and_no_other_host() -> None:
    async def run() -> None:
        async with server(ServerConfig(api_key_digests=(digest("sesame"),))) as s:
            for path, (name, kind) in FILES.items():
                answer = await s.http.get(path)
                assert answer.status_code == 200 and answer.headers["content-type"] == kind
                assert answer.content == (ROOT / name).read_bytes()
                assert "default-src 'none'; script-src 'self'" in answer.headers["content-security-policy"]
                assert "//" not in answer.text.replace("// ", "")  # no address of a host

    asyncio.run(run())
