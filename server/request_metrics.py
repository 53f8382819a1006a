"""What requests took, as histograms and counters of each rank. The names, and what each measures, are vLLM's."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence

from front.sequences import FinishedRequest

LATENCIES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0)
SIZES = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0)
FEW = (1.0, 2.0, 5.0, 10.0, 20.0)
PREEMPTIONS = (0.0, 1.0, 2.0, 3.0, 5.0, 10.0)
GAP_NAME = "vllm:inter_token_latency_seconds"


def _prefill(request: FinishedRequest) -> float | None:
    first, started = request.first_token, _started(request)
    return None if first is None or started is None else max(0.0, first - started)


def _decode(request: FinishedRequest) -> float | None:
    return None if request.first_token is None else request.finish - request.first_token


def _inference(request: FinishedRequest) -> float | None:
    started = _started(request)
    return None if started is None else max(0.0, request.finish - started)


def _started(request: FinishedRequest) -> float | None:
    """When its first step began."""
    return None if request.queued is None else request.arrival + request.queued


def _per_token(request: FinishedRequest) -> float | None:
    decode = _decode(request)
    return None if decode is None or request.most_output_tokens < 2 else decode / (request.most_output_tokens - 1)


# name, bounds, help, value of one request; None: it has none
_HISTOGRAMS: tuple[tuple[str, Sequence[float], str, Callable[[FinishedRequest], float | None]], ...] = (
    (
        "vllm:time_to_first_token_seconds",
        LATENCIES,
        "From arrival to the first token.",
        lambda request: None if request.first_token is None else request.first_token - request.arrival,
    ),
    (
        "vllm:e2e_request_latency_seconds",
        LATENCIES,
        "From arrival to the end.",
        lambda request: request.finish - request.arrival,
    ),
    (
        "vllm:request_queue_time_seconds",
        LATENCIES,
        "From arrival on the rank to the first step.",
        lambda request: request.queued,
    ),
    ("vllm:request_prefill_time_seconds", LATENCIES, "From the first step to the first token.", _prefill),
    ("vllm:request_decode_time_seconds", LATENCIES, "From the first token to the end.", _decode),
    ("vllm:request_inference_time_seconds", LATENCIES, "From the first step to the end.", _inference),
    (
        "vllm:request_time_per_output_token_seconds",
        GAPS,
        "Decode time of a request by its tokens after the first (of its longest choice).",
        _per_token,
    ),
    (
        "vllm:request_prompt_tokens",
        SIZES,
        "Prompt tokens of a request.",
        lambda request: float(request.num_prompt_tokens),
    ),
    (
        "vllm:request_generation_tokens",
        SIZES,
        "Output tokens of a request, all choices.",
        lambda request: float(request.num_output_tokens),
    ),
    (
        "vllm:request_max_num_generation_tokens",
        SIZES,
        "Output tokens of a request's longest choice.",
        lambda request: float(request.most_output_tokens),
    ),
    (
        "vllm:request_prefill_kv_computed_tokens",
        SIZES,
        "Prompt tokens that were not found in the prefix cache.",
        lambda request: float(request.num_prompt_tokens - request.num_cached_tokens),
    ),
    ("vllm:request_params_n", FEW, "Choices that a request asked for.", lambda request: float(request.params.n)),
    (
        "vllm:request_params_max_tokens",
        SIZES,
        "The most output tokens that a request may have.",
        lambda request: float(request.params.max_tokens or 0),
    ),
    (
        "vllm:request_num_preemptions",
        PREEMPTIONS,
        "Times that a request was put back for want of KV blocks.",
        lambda request: float(request.num_preemptions),
    ),
)


class Histogram:
    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        return buckets(self.bounds, self.counts)


def buckets(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Cumulative, as Prometheus wants them. counts: one more than bounds."""
    result, total = [], 0
    for bound, count in zip((*bounds, float("inf")), counts, strict=True):
        total += count
        result.append(("+Inf" if bound == float("inf") else str(float(bound)), float(total)))
    return result


class RankRequests:
    """What the requests of one rank took."""

    TEXTS = {name: text for name, _, text, _ in _HISTOGRAMS} | {GAP_NAME: "Between two deltas of a choice, as sent."}

    def __init__(self) -> None:
        self.finished: Counter[str] = Counter(stop=0, length=0, abort=0, error=0)
        self.histograms = {name: Histogram(bounds) for name, bounds, _, _ in _HISTOGRAMS}
        self.gaps = self.histograms[GAP_NAME] = Histogram(GAPS)

    def add(self, request: FinishedRequest) -> None:
        for name, _, _, value_of in _HISTOGRAMS:
            value = value_of(request)
            if value is not None:
                self.histograms[name].observe(value)
        self.finished.update(request.finish_reasons)


def trace_times(request: FinishedRequest) -> dict[str, float | None]:
    """Seconds of a request's phases, by the names that vLLM's spans have for them; None: it had no such phase."""
    return {
        "time_in_queue": request.queued,
        "time_to_first_token": None if request.first_token is None else request.first_token - request.arrival,
        "e2e": request.finish - request.arrival,
        "time_in_model_prefill": _prefill(request),
        "time_in_model_decode": _decode(request),
        "time_in_model_inference": _inference(request),
    }
