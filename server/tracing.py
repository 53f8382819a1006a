"""Traces by OpenTelemetry: a span per generating request, with vLLM's names, sent by a thread over OTLP/HTTP.

A request puts its span in a bounded queue and goes on; what finds the queue full is dropped. A collector that is down
is said once in the log, and once more when it is back. Needs the extra `otel`.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from server.logs import Record
from server.request_metrics import trace_times

QUEUE = 2048  # spans that wait for the thread
EXPORT_SECONDS = 5.0  # for one batch
CLOSE_SECONDS = 1.0  # for the spans that are left at the end
CONTEXT = (b"traceparent", b"tracestate")
INSTALL = "pip install 'moesaic[otel]'"
_EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"

log = logging.getLogger("moesaic.front")


class Traces:
    def __init__(self, endpoint: str, service_name: str) -> None:
        """endpoint: the collector's address for traces, such as http://localhost:4318/v1/traces. ValueError: the
        packages are missing, or that is no address."""
        if not endpoint.startswith(("http://", "https://")):
            raise ValueError(f"--otlp-traces-endpoint must be http://... or https://... (OTLP over HTTP): {endpoint!r}")
        sdk, export, resources = (_load(f"opentelemetry.sdk.{name}") for name in ("trace", "trace.export", "resources"))
        self._api = _load("opentelemetry.trace")
        self._context = _load("opentelemetry.trace.propagation.tracecontext").TraceContextTextMapPropagator()
        exporter = _quiet(_load(_EXPORTER).OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_SECONDS), export)
        for name in (_EXPORTER, "opentelemetry.sdk"):  # they would say it for every batch, and with a traceback
            logging.getLogger(name).setLevel(logging.CRITICAL)
        resource = resources.Resource.create({"service.name": service_name})
        self._provider = sdk.TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(
            export.BatchSpanProcessor(
                exporter, max_queue_size=QUEUE, schedule_delay_millis=1000, export_timeout_millis=EXPORT_SECONDS * 1000
            )
        )
        self._tracer = self._provider.get_tracer("moesaic")

    def add(self, headers: Mapping[bytes, bytes], record: Record) -> None:
        """A generating request has ended. headers: the client's, with its trace context if it has one."""
        params, finished = record.params, record.finished
        assert params is not None
        now, since = time.time_ns(), time.monotonic() - record.start
        attributes: dict[str, Any] = {
            "gen_ai.request.id": record.request_id,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.n": params.n,
            "gen_ai.response.model": record.model,
            "gen_ai.usage.num_sequences": record.num_choices,
            "gen_ai.usage.prompt_tokens": record.prompt_tokens,
            "gen_ai.usage.completion_tokens": record.output_tokens,
            "http.response.status_code": record.status or None,
            "moesaic.finish": record.finish,
        }
        given = [name for name in CONTEXT if name in headers]
        if finished:  # of several prompts the one that took longest
            longest = max(finished, key=lambda request: request.finish - request.arrival)
            attributes |= {f"gen_ai.latency.{name}": value for name, value in trace_times(longest).items()}
        span = self._tracer.start_span(
            "llm_request",
            context=self._context.extract({name.decode("latin-1"): headers[name].decode("latin-1") for name in given}),
            kind=self._api.SpanKind.SERVER,
            attributes={name: value for name, value in attributes.items() if value is not None},
            start_time=now - int(since * 1e9),
        )
        span.end(end_time=now)

    def close(self) -> None:
        """Sends what is left, within CLOSE_SECONDS."""
        last = threading.Thread(target=self._provider.shutdown, daemon=True)
        last.start()
        last.join(CLOSE_SECONDS)


def _load(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"--otlp-traces-endpoint: {error}; to install it: {INSTALL}") from None


def _quiet(exporter: Any, export: Any) -> Any:
    """The exporter, that says of a time of failures its beginning and its end."""

    class Quiet(export.SpanExporter):  # type: ignore[misc]
        lost = 0

        def export(self, spans: Sequence[Any]) -> Any:
            result = exporter.export(spans)
            if result is not export.SpanExportResult.SUCCESS:
                if not self.lost:
                    log.warning("event=traces_lost the collector does not take them")
                self.lost += len(spans)
            elif self.lost:
                log.warning("event=traces_again lost=%d", self.lost)
                self.lost = 0
            return result

        def shutdown(self) -> None:
            exporter.shutdown()

        def force_flush(self, timeout_millis: int = 30000) -> bool:
            return True

    return Quiet()
