"""On a GPU every family gives what it gives on the CPU, eager and captured; skipped without one.

The same functions run on the CPU in tests/benchmarks/test_gpu_check.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from gpu_models import TINY, Driver, make_model
from gpu_parts import ALL_EXPERTS, logits_of
from gpu_rows import relative

from engine.capture import GraphPolicy
from engine.device import graph_library
from ep.experts import WeightFormat

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.inference_mode():
        torch.manual_seed(3)
        yield


@pytest.mark.parametrize("family", list(TINY))
def test_float32_equals_the_cpu(family: str) -> None:
    exact = make_model(TINY[family], torch.float32, CPU)
    ours = logits_of(make_model(TINY[family], torch.float32, GPU, like=exact), GPU)
    assert relative(ours, logits_of(exact, CPU)) < 1e-3


@pytest.mark.parametrize("family", list(TINY))
def test_bfloat16_errs_no_more_than_twice_as_much_as_torch(family: str) -> None:
    raw = {**TINY[family], **ALL_EXPERTS}
    half = make_model(raw, torch.bfloat16, CPU)
    expected = logits_of(make_model(raw, torch.float32, CPU, like=half), CPU)
    ours = logits_of(make_model(raw, torch.bfloat16, GPU, like=half), GPU)
    assert relative(ours, expected) < max(2 * relative(logits_of(half, CPU), expected), 0.02)


def test_experts_in_fp8() -> None:
    raw = {**TINY["deepseek-v3"], **ALL_EXPERTS}
    fp8 = make_model(raw, torch.bfloat16, GPU, WeightFormat.FP8)
    expected = logits_of(make_model(raw, torch.float32, CPU, like=fp8), CPU)
    assert relative(logits_of(fp8, GPU), expected) < 0.1


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe", "deepseek-v2", "deepseek-v3"])
@pytest.mark.parametrize("kind", ["full", "piecewise"])
def test_captured_steps_equal_eager_ones(family: str, kind: str) -> None:
    model = make_model({**TINY[family], **ALL_EXPERTS}, torch.bfloat16, GPU)
    policy = GraphPolicy(full=(1, 2, 4, 8)) if kind == "full" else GraphPolicy(piecewise=(4, 8, 64))
    driver, eager = Driver(model, 7, 64, 16, GPU), Driver(model, 7, 64, 16, GPU)
    captured = driver.capture(graph_library(GPU), policy)
    first = 0
    for count, live in ((9, 7), (1, 7), (1, 3), (1, 5), (4, 7), (1, 7)):
        step = eager.step(range(live), first, count)
        ours = driver.logits(captured.run(captured.step(range(live), first, count, step.token_ids_T)))
        assert relative(ours, eager.logits(eager.run(step))) < 2e-2
        first += count
