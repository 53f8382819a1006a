"""Prometheus metrics, under the names that dashboards and routers made for vLLM read.

Everything is a plain number until it is asked for: a scrape builds the families. Engine counters come from the ranks'
own statistics; what a request took comes from the front's list of finished requests. The label `engine` is the rank.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from configs.engine import Plan
from front.async_llm import AsyncLLM
from front.members import State
from front.messages import STEP_TOKENS, RankStats
from front.sequences import FinishedRequest
from server.in_flight import InFlightRequests
from server.metric_families import balance_families, counter, gauge
from server.request_metrics import LATENCIES, Histogram, RankRequests, buckets

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# name, help, value of one rank
_COUNTERS: tuple[tuple[str, str, Callable[[RankStats], int]], ...] = (
    ("vllm:prompt_tokens", "Prompt tokens of prompts that are computed.", lambda stats: stats.prompt_tokens),
    ("vllm:prompt_tokens_cached", "Of those, found in the prefix cache.", lambda stats: stats.cached_tokens),
    ("vllm:generation_tokens", "Tokens generated.", lambda stats: stats.generation_tokens),
    ("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", lambda stats: stats.prefix_queries),
    ("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", lambda stats: stats.prefix_hits),
    ("vllm:external_prefix_cache_queries", "There is no cache of prefixes elsewhere.", lambda stats: 0),
    ("vllm:external_prefix_cache_hits", "There is no cache of prefixes elsewhere.", lambda stats: 0),
    (
        "moesaic:kv_tokens_taken_over",
        "Tokens that a lost rank had computed, and that were taken over from its cache.",
        lambda stats: stats.taken_over,
    ),
    (
        "moesaic:tokens_resumed",
        "Tokens of steps that a loss broke off, and that went on at the layer where they were.",
        lambda stats: stats.resumed,
    ),
    ("vllm:num_preemptions", "Requests put back for want of KV blocks.", lambda stats: stats.preemptions),
    ("vllm:spec_decode_num_drafts", "Steps of a sequence with drafts.", lambda stats: stats.spec_drafts),
    ("vllm:spec_decode_num_draft_tokens", "Tokens drafted.", lambda stats: stats.spec_draft_tokens),
    (
        "vllm:spec_decode_num_accepted_tokens",
        "Drafts that were what was then sampled.",
        lambda stats: stats.spec_accepted_tokens,
    ),
    ("moesaic:steps", "Steps of the engine.", lambda stats: stats.steps),
    (
        "moesaic:prefill_held_steps",
        "Steps in which prompts waited for a step that all ranks have prompts in.",
        lambda stats: stats.prefill_held_steps,
    ),
    ("moesaic:dbo_steps", "Steps that were split in parts, to overlap.", lambda stats: stats.dbo_steps),
)
_GAUGES: tuple[tuple[str, str, Callable[[RankStats], float]], ...] = (
    (
        "moesaic:prefill_interval_steps",
        "Steps from one that lets prompts in to the next.",
        lambda stats: stats.prefill_interval,
    ),
    ("vllm:num_requests_running", "Sequences that are being computed.", lambda stats: stats.running),
    ("vllm:num_requests_waiting", "Sequences that wait.", lambda stats: stats.waiting),
    (
        "vllm:kv_cache_usage_perc",
        "Used part of the KV blocks; 1 is all.",
        lambda stats: stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0,
    ),
    (
        "moesaic:dbo_overlap_ratio",
        "Of the time that tokens were lately under way between ranks, the part in which this one computed.",
        lambda stats: stats.dbo_overlap,
    ),
)


class Metrics(Collector):
    def __init__(self, engine: AsyncLLM, plan: Plan, in_flight: InFlightRequests) -> None:
        self._engine = engine
        self._plan = plan
        self._in_flight = in_flight
        self._ranks: list[RankRequests] = []
        self._recoveries = {
            phase: Histogram(LATENCIES) for phase in ("detect", "agree", "repair", "first_token", "total")
        }
        self._http: Counter[tuple[str, str, str]] = Counter()
        self._http_seconds: dict[tuple[str, str], Histogram] = {}
        self._ended: dict[str, FinishedRequest] = {}  # finished, but the stream has not reported its gaps yet
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def count_http(self, method: str, route: str, status: int, seconds: float) -> None:
        self._http[method, route, str(status)] += 1
        histogram = self._http_seconds.get((method, route))
        if histogram is None:
            histogram = self._http_seconds[method, route] = Histogram(LATENCIES)
        histogram.observe(seconds)

    def add_gaps(self, prompt_id: str, gaps: Sequence[float]) -> FinishedRequest | None:
        """Seconds between the deltas of one prompt's choices. Call it once for every prompt, when its stream has
        ended. What it took; None: the engine has not ended it."""
        self.collect_finished()
        request = self._ended.pop(prompt_id, None)
        if request is not None:
            for gap in gaps:
                self._ranks[request.rank].gaps.observe(gap)
        return request

    def collect_finished(self) -> None:
        """The front's list of finished requests is bounded, so it is read at the end of each one."""
        while len(self._ranks) < len(self._engine.stats):  # ranks may be added
            self._ranks.append(RankRequests())
        for request in self._engine.take_finished():
            self._ranks[request.rank].add(request)
            self._ended[request.request_id] = request

    def render(self) -> bytes:
        """The text of /metrics."""
        return generate_latest(self._registry)

    # ---- prometheus_client's side ------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        self.collect_finished()
        labels = ["model_name", "engine"]
        name = self._plan.served_model_names[0]
        stats = list(enumerate(self._engine.stats))
        for make, numbers in ((gauge, _GAUGES), (counter, _COUNTERS)):
            for metric, text, value in numbers:
                yield make(metric, text, labels, (((name, str(rank)), value(of_rank)) for rank, of_rank in stats))
        per_pos = (
            ((name, str(rank), str(position)), count)
            for rank, of_rank in stats
            for position, count in enumerate(of_rank.spec_accepted_per_pos)
        )
        text = "Accepted drafts by their place behind the last known token."
        yield counter("vllm:spec_decode_num_accepted_tokens_per_pos", text, [*labels, "position"], per_pos)
        yield self._step_tokens(name, labels)
        yield from self._split(name, labels)
        yield from self._surviving(name, labels)
        balance = self._engine.front.balance
        if balance is not None:
            yield from balance_families(balance, name)
        yield from self._requests(name, labels)
        yield self._cache_config(name)
        refused = [((name, "front", "queue_full"), self._in_flight.num_refused)]
        yield counter("vllm:admission_rejections", "Requests refused with 503.", [*labels, "reason"], refused)
        yield counter("http_requests", "HTTP requests.", ["method", "handler", "status"], self._http.items())
        text = "Seconds from a request's head to the end of its answer."
        family = HistogramMetricFamily("http_request_duration_seconds", text, labels=["method", "handler"])
        for key, histogram in self._http_seconds.items():
            family.add_metric(key, histogram.buckets(), histogram.sum)
        yield family

    def _step_tokens(self, name: str, labels: list[str]) -> Metric:
        family = HistogramMetricFamily(
            "vllm:iteration_tokens_total", "Tokens of prompts and outputs in a step.", labels=labels
        )
        for rank, stats in enumerate(self._engine.stats):
            if stats.step_tokens:
                counts = buckets(STEP_TOKENS, stats.step_tokens)
                family.add_metric([name, str(rank)], counts, stats.num_step_tokens)
        return family

    def _split(self, name: str, labels: list[str]) -> Iterator[Metric]:
        """Sums that others break down. Nothing is deferred, and no prompt's KV comes from elsewhere."""
        stats = [((name, str(rank)), of_rank) for rank, of_rank in enumerate(self._engine.stats)]
        waiting = (
            ((*key, reason), value)
            for key, of_rank in stats
            for reason, value in (("capacity", of_rank.waiting), ("deferred", 0))
        )
        text = "Sequences that wait, by reason."
        yield gauge("vllm:num_requests_waiting_by_reason", text, [*labels, "reason"], waiting)
        computed = (
            ((*key, source), value)
            for key, of_rank in stats
            for source, value in (
                ("local_compute", of_rank.prompt_tokens - of_rank.cached_tokens),
                ("local_cache_hit", of_rank.cached_tokens),
                ("external_kv_transfer", 0),
            )
        )
        text = "Prompt tokens by where their KV came from."
        yield counter("vllm:prompt_tokens_by_source", text, [*labels, "source"], computed)
        asleep = (
            ((*key, state), float(state == "awake"))
            for key, _ in stats
            for state in ("awake", "weights_offloaded", "discard_all")
        )
        yield gauge("vllm:engine_sleep_state", "Engines never sleep.", [*labels, "sleep_state"], asleep)
        lora = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
        yield gauge("vllm:lora_requests_info", "There are no LoRA adapters.", lora, [(("0", "", ""), time.time())])

    def _stored(self, name: str) -> Iterator[Metric]:
        """The weights that ranks share (docs/memory.md)."""
        members = self._engine.members
        serving = [rank for rank, state in enumerate(members.states[: members.count]) if state is State.UP]
        stores: dict[int, list[int]] = {0: []}
        for ready in map(members.ready.get, serving):
            if ready is not None and ready.mapped_bytes:
                stores.setdefault(ready.part, []).append(ready.mapped_bytes)
        labels, texts = ["model_name", "store"], ("Weights that the ranks of a machine share.", "Ranks that map them.")
        sizes = [((name, str(store)), max(mapped, default=0)) for store, mapped in stores.items()]
        yield gauge("moesaic:weight_store_bytes", texts[0], labels, sizes)
        counts = [((name, str(store)), len(mapped)) for store, mapped in stores.items()]
        yield gauge("moesaic:weight_store_mappings", texts[1], labels, counts)

    def _surviving(self, name: str, labels: list[str]) -> Iterator[Metric]:
        members = self._engine.members
        states = enumerate(members.states[: members.count])
        up = (((name, str(rank)), float(state is State.UP)) for rank, state in states)
        yield gauge("moesaic:rank_up", "1 for a rank that serves.", labels, up)
        yield gauge("moesaic:ranks", "Ranks that are to serve.", ["model_name"], [([name], members.count)])
        yield from self._stored(name)
        replayed = "Requests moved from a rank that was lost or left."
        for metric, text, value in (
            ("moesaic:rank_losses", "Ranks lost.", members.num_losses),
            ("moesaic:requests_replayed", replayed, self._engine.num_replayed),
            (
                "moesaic:experts_reloaded",
                "Experts read again after a change of membership.",
                members.num_experts_loaded,
            ),
            ("moesaic:reloaded_bytes", "Bytes read for them.", members.num_bytes_read),
            ("moesaic:long_waits", "Waits of ranks beyond --wait-warning-seconds.", self._engine.front.waits.total),
        ):
            yield counter(metric, text, ["model_name"], [([name], value)])
        for recovery in self._engine.take_recoveries():
            for phase, histogram in self._recoveries.items():
                if (seconds := getattr(recovery, phase)) is not None:
                    histogram.observe(seconds)
        text = "From a rank's last sign of life until tokens come again, and the phases of it."
        family = HistogramMetricFamily("moesaic:recovery_seconds", text, labels=["model_name", "phase"])
        for phase, histogram in self._recoveries.items():
            family.add_metric([name, phase], histogram.buckets(), histogram.sum)
        yield family

    def _requests(self, name: str, labels: list[str]) -> Iterator[Metric]:
        finished = (
            ((name, str(rank), reason), count)
            for rank, requests in enumerate(self._ranks)
            for reason, count in requests.finished.items()
        )
        yield counter("vllm:request_success", "Finished sequences.", [*labels, "finished_reason"], finished)
        for metric, text in RankRequests.TEXTS.items():
            family = HistogramMetricFamily(metric, text, labels=labels)
            for rank, requests in enumerate(self._ranks):
                histogram = requests.histograms[metric]
                family.add_metric([name, str(rank)], histogram.buckets(), histogram.sum)
            yield family

    def _cache_config(self, name: str) -> Metric:
        """num_gpu_blocks is the field's name for the KV blocks of a rank, wherever they are."""
        labels = ["model_name", "engine", "block_size", "num_gpu_blocks", "enable_prefix_caching"]
        labels += ["kv_cache_size_tokens", "kv_cache_max_concurrency"]
        caching = str(self._plan.enable_prefix_caching)
        samples = []
        for rank, ready in sorted(self._engine.ready.items()):
            tokens = ready.num_blocks * ready.block_size
            facts = ready.block_size, ready.num_blocks, caching, tokens, f"{tokens / ready.max_model_len:.2f}"
            samples.append(((name, str(rank), *map(str, facts)), 1.0))
        return gauge("vllm:cache_config_info", "Facts about the KV cache, as labels.", labels, samples)

    def load(self) -> dict[str, float]:
        """What a balancer in front of several servers asks: of all ranks together."""
        stats = self._engine.stats
        used = sum(of_rank.kv_blocks_used for of_rank in stats)
        total = sum(of_rank.kv_blocks_total for of_rank in stats)
        return {
            "kv_cache_usage_perc": used / total if total else 0.0,
            "num_requests_waiting": float(sum(of_rank.waiting for of_rank in stats)),
            "num_requests_running": float(sum(of_rank.running for of_rank in stats)),
        }
