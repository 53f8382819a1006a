"""What monitors and routers made for vLLM read: metric names, the load, its header, the API's description, traces."""

from __future__ import annotations

import asyncio
import http.server
import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families
from server_parts import MODEL, server, small_tokenizer, until

from configs.server import ServerConfig
from server import tracing
from server.middleware import digest

# Grafana dashboards that vLLM publishes (grafana.json, performance_statistics.json, query_statistics.json), the Gateway
# API endpoint picker, and the rest of the core set.
HISTOGRAMS = """
    e2e_request_latency_seconds time_to_first_token_seconds inter_token_latency_seconds request_prompt_tokens
    request_generation_tokens request_max_num_generation_tokens request_queue_time_seconds request_prefill_time_seconds
    request_decode_time_seconds request_inference_time_seconds request_time_per_output_token_seconds
    request_params_n request_params_max_tokens request_num_preemptions request_prefill_kv_computed_tokens
    iteration_tokens_total
"""
COUNTERS = """
    prompt_tokens generation_tokens prompt_tokens_cached prompt_tokens_by_source prefix_cache_queries prefix_cache_hits
    num_preemptions request_success admission_rejections spec_decode_num_drafts spec_decode_num_draft_tokens
    spec_decode_num_accepted_tokens external_prefix_cache_queries external_prefix_cache_hits
"""
GAUGES = """
    num_requests_running num_requests_waiting num_requests_waiting_by_reason kv_cache_usage_perc cache_config_info
    lora_requests_info engine_sleep_state
"""
LABELS = {
    "vllm:cache_config_info": {"block_size": "16", "num_gpu_blocks": "64", "kv_cache_size_tokens": "1024"},
    "vllm:num_requests_waiting_by_reason": {"reason": "capacity"},
    "vllm:engine_sleep_state": {"sleep_state": "awake"},
    "vllm:prompt_tokens_by_source_total": {"source": "local_cache_hit"},
    "vllm:lora_requests_info": {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""},
    "vllm:request_success_total": {"finished_reason": "length"},
}


def test_the_names_that_dashboards_and_routers_read() -> None:
    async def run() -> None:
        async with server() as s:
            await s.complete(max_tokens=5, n=2)
            text = (await s.http.get("/metrics")).text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        wanted = [f"vllm:{name}_{end}" for name in HISTOGRAMS.split() for end in ("bucket", "count", "sum")]
        wanted += [f"vllm:{name}_total" for name in COUNTERS.split()] + [f"vllm:{name}" for name in GAUGES.split()]
        wanted += ["http_requests_total", "http_request_duration_seconds_bucket"]
        assert not set(wanted) - {sample.name for sample in samples}
        for name, labels in LABELS.items():
            assert any(sample.name == name and labels.items() <= sample.labels.items() for sample in samples), name
        total = {name: sum(sample.value for sample in samples if sample.name == name) for name in wanted}
        assert total["vllm:request_queue_time_seconds_sum"] == 0.125
        assert total["vllm:request_params_n_sum"] == 2 and total["vllm:request_params_max_tokens_sum"] == 5
        assert total["vllm:request_max_num_generation_tokens_sum"] == 5
        assert total["vllm:iteration_tokens_total_count"] * 2 == total["vllm:iteration_tokens_total_sum"]
        phases = [total[f"vllm:request_{phase}_time_seconds_count"] for phase in ("prefill", "decode", "inference")]
        assert phases == [1, 1, 1]

    asyncio.run(run())


def test_the_load_as_a_page_and_as_a_header() -> None:
    async def run() -> None:
        async with server() as s:
            assert (await s.http.get("/load")).json() == {
                "server_load": 0,
                "kv_cache_usage_perc": 0.0,
                "num_requests_waiting": 0.0,
                "num_requests_running": 0.0,
            }
            body = {"model": MODEL, "prompt": "Once", "max_tokens": 2}
            for wanted in ("TEXT", "json"):
                headers = {"endpoint-load-metrics-format": wanted}
                answer = await s.post("/v1/completions", body, headers=headers)
                kind, _, report = answer.headers["endpoint-load-metrics"].partition(" ")
                assert kind == wanted.upper()
                if kind == "JSON":
                    metrics = json.loads(report)["named_metrics"]
                else:
                    pairs = (item.removeprefix("named_metrics.").split("=") for item in report.split(", "))
                    metrics = {name: float(value) for name, value in pairs}
                assert metrics["kv_cache_usage_perc"] == 0.25 and metrics["num_requests_waiting"] == 0
            for headers in ({}, {"endpoint-load-metrics-format": "BIN"}):
                assert "endpoint-load-metrics" not in (await s.post("/v1/completions", body, headers=headers)).headers
            s.ranks.paused = True
            running = asyncio.create_task(s.post("/v1/completions", body))
            await until(lambda: len(s.service.in_flight), "a request in flight")
            assert (await s.http.get("/load")).json()["server_load"] == 1
            s.ranks.resume()
            await running

    asyncio.run(run())


def test_the_description_of_the_api_has_every_route_and_needs_no_key() -> None:
    async def run() -> None:
        async with server(ServerConfig(api_key_digests=(digest("sesame"),))) as s:
            document = (await s.http.get("/openapi.json")).json()
            assert document["openapi"].startswith("3.1")
            served = {(method.upper(), path) for path, entry in document["paths"].items() for method in entry}
            assert {("POST", "/v1/chat/completions"), ("GET", "/v1/models/{model}"), ("GET", "/load")} <= served
            chat = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
            form = document["components"]["schemas"][chat["schema"]["$ref"].rpartition("/")[2]]
            assert "temperature" in form["properties"] and form["required"] == ["messages"]
            for reference in re.findall(r'"\$ref": *"#/components/schemas/([^"]+)"', json.dumps(document)):
                assert reference in document["components"]["schemas"]
            docs = await s.http.get("/docs")
            assert docs.headers["content-type"].startswith("text/html") and "/v1/chat/completions" in docs.text
            assert "<script" not in docs.text and "//" not in docs.text.replace("</", "")
            assert (await s.http.get("/tokenizer_info")).status_code == 401

    asyncio.run(run())


ANSWERED: list[tuple[str, dict[str, Any] | None]] = [
    ("/v1/completions", {"prompt": "a", "max_tokens": 2, "logprobs": 1, "echo": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "logprobs": True}),
    ("/v1/responses", {"input": "a", "max_output_tokens": 2}),
    ("/v1/responses/input_tokens", {"input": "a"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a"}]}),
    ("/tokenize", {"prompt": "a"}),
    ("/detokenize", {"tokens": [5]}),
    *((path, None) for path in ("/v1/models", "/health", "/live", "/ready", "/load", "/version")),
]  # fmt: skip


def test_answers_are_what_the_document_says() -> None:
    async def run() -> None:
        async with server() as s:
            document = (await s.http.get("/openapi.json")).json()
            for path, body in ANSWERED:
                answer = await (s.http.get(path) if body is None else s.post(path, body))
                entry = document["paths"][path]["get" if body is None else "post"]
                assert answer.status_code == 200, answer.text
                schema = entry["responses"]["200"]["content"]["application/json"]["schema"]
                Draft202012Validator({**schema, "components": document["components"]}).validate(answer.json())
                if body is not None:
                    asked = entry["requestBody"]["content"]["application/json"]["schema"]
                    Draft202012Validator({**asked, "components": document["components"]}).validate(body)
            assert "text/plain" in document["paths"]["/metrics"]["get"]["responses"]["200"]["content"]

    asyncio.run(run())


def test_tokenizer_info() -> None:
    async def run() -> None:
        async with server() as s:
            info = (await s.http.get("/tokenizer_info")).json()
            assert info["tokenizer_class"] and info["eos_token"] == "<|end|>"
            assert info["chat_template"] == small_tokenizer().chat_template

    asyncio.run(run())


# ---- traces -------------------------------------------------------------------------------------------------------


class Collector(http.server.ThreadingHTTPServer):
    """Takes OTLP over HTTP."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Any] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1/traces"


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
        assert isinstance(self.server, Collector)
        for resource in body.resource_spans:
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = Collector()
    yield server
    server.shutdown()
    server.server_close()


def test_a_span_per_request_with_the_clients_trace(collector: Collector) -> None:
    trace_id, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"

    async def run() -> None:
        async with server(ServerConfig(otlp_traces_endpoint=collector.endpoint)) as s:
            body = {"model": MODEL, "prompt": "Once", "max_tokens": 3, "temperature": 0.5}
            headers = {"traceparent": f"00-{trace_id}-{parent}-01", "x-request-id": "r-1"}
            assert (await s.post("/v1/completions", body, headers=headers)).status_code == 200
            assert (await s.post("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 1})).status_code == 200
            await s.http.get("/health")
            await until(lambda: len(collector.spans) == 2, "two spans", timeout=20.0)

    asyncio.run(run())
    span = next(span for span in collector.spans if span.trace_id.hex() == trace_id)
    assert span.name == "llm_request" and span.parent_span_id.hex() == parent
    assert span.end_time_unix_nano > span.start_time_unix_nano
    values = {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in span.attributes}
    assert values["gen_ai.request.id"] == "r-1" and values["gen_ai.response.model"] == MODEL
    assert values["gen_ai.request.max_tokens"] == 3 and values["gen_ai.request.temperature"] == 0.5
    assert values["gen_ai.usage.completion_tokens"] == 3 and values["gen_ai.usage.num_sequences"] == 1
    assert values["gen_ai.latency.time_in_queue"] == 0.125
    for name in ("time_to_first_token", "e2e", "time_in_model_prefill", "time_in_model_decode"):
        assert values[f"gen_ai.latency.{name}"] >= 0
    (other,) = [span for span in collector.spans if span.trace_id.hex() != trace_id]
    assert not other.parent_span_id


def test_a_collector_that_is_down_costs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with server(ServerConfig(otlp_traces_endpoint="http://127.0.0.1:9/v1/traces")) as s:
            for _ in range(3):
                await s.complete(max_tokens=2)

    asyncio.run(run())  # closing waits for CLOSE_SECONDS at most
    assert sum("traces_lost" in record.getMessage() for record in caplog.records) <= 1
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


def test_what_is_missing_is_said_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"must be http://\.\.\."):
        tracing.Traces("localhost:4317", "moesaic")
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ValueError, match=r"--otlp-traces-endpoint: .*moesaic\[otel\]"):
        tracing.Traces("http://localhost:4318/v1/traces", "moesaic")
