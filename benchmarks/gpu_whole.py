"""The parts of gpu_check.py that run whole models: how long a step takes beside what it must take, and where its time goes."""

from __future__ import annotations

import functools
import importlib
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_clock import Limits
from gpu_models import WHOLE, Captured, Driver, Floor, StepSizes, floor_of, steps_of
from gpu_rows import Options, attempt, row
from torch import Tensor
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity

from engine.capture import GraphLibrary, GraphPolicy
from engine.prepared import PreparedStep
from ep.experts import WeightFormat
from layers.step import StepInput
from models.base import CausalLM

ROOT = Path(__file__).resolve().parent.parent
TOP = 12  # kernels of a profile that are rows
GAPS = 4  # of the longest pauses between kernels


def graph_library(options: Options) -> GraphLibrary:
    if options.on_gpu:
        return importlib.import_module("engine.device").graph_library(options.device)  # type: ignore[no-any-return]
    sys.path.insert(0, str(ROOT / "tests/fakes/fake_parts"))
    return importlib.import_module("fake_cuda_graph").FakeGraphLibrary()  # type: ignore[no-any-return]


def qwen3(options: Options) -> None:
    _model(options, "qwen3")


def deepseek(options: Options) -> None:
    _model(options, "deepseek")


@dataclass
class _Loaded:
    model: CausalLM
    driver: Driver
    steps: StepSizes
    form: WeightFormat


def _load(options: Options, name: str) -> _Loaded:
    """With a cache that is full of something: what does not matter, but it must be finite and not zero."""
    whole, steps = WHOLE[name], steps_of(options.tiny)
    began = time.monotonic()
    model = whole.make(options.device, options.tiny)
    driver = steps.driver(model, options.device)
    for layer in driver.kv.layers:
        for tensor in layer:
            if tensor.dtype.is_floating_point:
                tensor.normal_()
    label = f"{whole.preset}, {model.config.num_layers} layers, {whole.form.value} experts"
    row(label, None, made_s=time.monotonic() - began)
    return _Loaded(model, driver, steps, whole.form)


def _model(options: Options, name: str) -> None:
    """Prefill and decode, tokens a second, and beside what the weights, the cache and the products cost at least."""
    loaded = _load(options, name)
    model, driver, steps, form = loaded.model, loaded.driver, loaded.steps, loaded.form
    found, num_layers = options.limits(), model.config.num_layers
    for sequences, queries in steps.prompts:
        with attempt(f"prefill {sequences} x {queries}"):
            step = driver.step(range(sequences), 0, queries)
            tokens = sequences * queries
            seconds = _wall(options, functools.partial(_sampled, driver, step), 5)
            floor = floor_of(model, tokens, sequences, tokens, sequences * queries * (queries + 1) // 2, form)
            _timed(f"prefill {sequences} x {queries}", seconds, tokens, num_layers, found, floor)
    captured = _captured(options, driver, steps.decodes)
    context = steps.context
    for count in steps.decodes:
        floor = floor_of(model, count, count, count * context, count * context, form)
        for how, ran in (("eager", driver), ("graph", captured)):
            if ran is None or not options.left(3):
                continue
            with attempt(f"decode {count} x {context} {how}"):
                sampled = functools.partial(_sampled, ran, ran.step(range(count), context, 1))
                seconds = _wall(options, sampled)
                _timed(f"decode {count} x {context} {how}", seconds, count, num_layers, found, floor)


def _captured(options: Options, driver: Driver, counts: tuple[int, ...]) -> Captured | None:
    captured = None
    if options.on_gpu:
        with attempt("capture of decode graphs"):
            began = time.monotonic()
            captured = driver.capture(graph_library(options), GraphPolicy(full=counts))
            row(f"capture of {len(counts)} decode graphs", None, seconds=time.monotonic() - began)
    return captured


def _sampled(ran: Driver | Captured, step: StepInput | PreparedStep) -> Tensor:
    """A whole step, greedy."""
    hidden_TD = ran.run(step)  # type: ignore[arg-type]
    model = ran.driver.model if isinstance(ran, Captured) else ran.model
    return model.greedy_tokens(hidden_TD[step.logits_rows_P], model.config.vocab_size)


def _wall(options: Options, run: Callable[[], object], repeats: int = 20) -> float:
    """Seconds per call of several calls, the host's part included."""
    repeats = repeats if options.on_gpu else 1
    for _ in range(3 if options.on_gpu else 0):
        run()
    _wait(options)
    began = time.perf_counter()
    for _ in range(repeats):
        run()
    _wait(options)
    return (time.perf_counter() - began) / repeats


def _wait(options: Options) -> None:
    if options.on_gpu:
        torch.cuda.synchronize(options.device)


def _timed(name: str, seconds: float, tokens: int, num_layers: int, found: Limits, floor: Floor) -> None:
    """The floor is the longer of two times: all bytes at the copy's speed, all products at theirs."""
    least = max(floor.bytes / found.memory, sum(count / found.products[kind] for kind, count in floor.flops.items()))
    row(
        name, None, ms=seconds * 1e3, tokens_s=tokens / seconds, ms_per_layer=seconds * 1e3 / num_layers, floor_ms=least * 1e3,
        times_floor=seconds / least,
    )  # fmt: skip


# ---- where a step's time goes ----


@dataclass(frozen=True)
class Span:
    """What ran on the device, in microseconds."""

    name: str
    began: float
    ended: float


def profile(options: Options) -> None:
    """One prefill and one decode step of each model under torch's profiler: the kernels that take longest, and the pauses between."""
    for name in WHOLE:
        if not options.left(5):
            row(f"{name} left out", None, note="no time was left")
            return
        loaded = _load(options, name)
        driver, steps = loaded.driver, loaded.steps
        sequences, queries = steps.prompts[0]
        prompt = driver.step(range(sequences), 0, queries)
        count = steps.decodes[-2]
        decode = driver.step(range(count), steps.context, 1)
        _profiled(options, f"{name} prefill {sequences} x {queries}", functools.partial(_sampled, driver, prompt))
        _profiled(
            options, f"{name} decode {count} x {steps.context} eager", functools.partial(_sampled, driver, decode)
        )
        captured = _captured(options, driver, (count,))
        if captured is not None:
            run = functools.partial(_sampled, captured, captured.step(range(count), steps.context, 1))
            _profiled(options, f"{name} decode {count} x {steps.context} graph", run)


def _profiled(options: Options, label: str, run: Callable[[], object]) -> None:
    with attempt(label):
        for _ in range(2 if options.on_gpu else 0):
            run()
        _wait(options)
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if options.on_gpu else [])]
        with torch.profiler.profile(activities=kinds) as seen:
            run()
            _wait(options)
        describe(label, spans_of(seen.events() or (), options.on_gpu))


def spans_of(events: Iterable[Any], on_gpu: bool) -> list[Span]:
    """Kernels and copies in their order; on a CPU the operations that call no others."""
    if on_gpu:
        taken = [e for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    else:
        taken = [e for e in events if not e.cpu_children and not e.name.startswith(("Profiler", "[memory]"))]
    return sorted((Span(e.name, e.time_range.start, e.time_range.end) for e in taken), key=lambda span: span.began)


def describe(label: str, spans: list[Span]) -> None:
    """Rows of one step: the whole, the longest kernels (of one name together), and the longest pauses."""
    if not spans:
        row(label, None, note="the profiler saw nothing on the device")
        return
    spent: dict[str, list[float]] = defaultdict(list)
    gaps: list[tuple[float, str, str]] = []
    busy, until, last = 0.0, spans[0].began, ""
    for span in spans:
        spent[span.name].append(span.ended - span.began)
        if span.began > until:
            gaps.append((span.began - until, last, span.name))
        busy += max(0.0, span.ended - max(span.began, until))
        if span.ended >= until:
            until, last = span.ended, span.name
    whole = until - spans[0].began
    row(
        label, None, ms=whole / 1e3, busy_ms=busy / 1e3, idle_pct=100 * (1 - busy / max(whole, 1e-9)), kernels=len(spans), gaps=len(gaps),
        mean_gap_us=sum(gap[0] for gap in gaps) / max(1, len(gaps)),
    )  # fmt: skip
    for name, times in sorted(spent.items(), key=lambda item: -sum(item[1]))[:TOP]:
        row(
            f"{label}: {name[:90]}", None, ms=sum(times) / 1e3, pct=100 * sum(times) / max(busy, 1e-9), count=len(times)
        )
    for gap, before, after in sorted(gaps, reverse=True)[:GAPS]:
        row(f"{label}: pause before {after[:70]}", None, us=gap, after=before[:70])
