"""A kernel that is compiled while requests wait costs a second: steps of other sizes, whose numbers lie elsewhere in what was uploaded,
need no other kernels."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from triton_support import Compiled, compiling, kernel_modules, report

import layers.choice
import moe_kernels.backends
import moe_kernels.choice
import moe_kernels.token_sums
from engine.sampling.sampler import sample
from engine.sampling.sampling_table import RANDOM, TOP_K, SamplingBatch
from ep.experts import WeightFormat
from layers.step import StepInput

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "benchmarks"))
from gpu_models import TINY, Driver, make_model

pytestmark = pytest.mark.triton

META = torch.device("meta")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Compiled]]:
    """What every room launches for tensors of "meta" is compiled for a Hopper."""
    for room in (layers.choice, moe_kernels.choice, moe_kernels.backends, moe_kernels.token_sums):
        monkeypatch.setattr(room, "on_gpu", lambda device: True)
    with compiling(90, *kernel_modules()) as found, torch.inference_mode():
        yield found


def elsewhere(x: Tensor, offset: int) -> Tensor:
    """The same shape, so many numbers further in a larger tensor, which begins where a GPU's allocator begins."""
    return torch.empty(offset + x.numel(), dtype=x.dtype, device=META)[offset:].view(x.shape)


def moved(step: StepInput, offset: int) -> StepInput:
    parts = ("token_ids_T", "positions_T", "slots_T", "kv_lens_B", "block_table_BN")
    return replace(step, **{name: elsewhere(vars_of(step)[name], offset + i) for i, name in enumerate(parts)})


def vars_of(step: StepInput) -> dict[str, Tensor]:
    return {
        "token_ids_T": step.token_ids_T, "positions_T": step.positions_T, "slots_T": step.slots_T,
        "kv_lens_B": step.kv_lens_B, "block_table_BN": step.block_table_BN,
    }  # fmt: skip


def test_addresses_are_looked_at() -> None:
    assert elsewhere(torch.empty(3, device=META), 3).data_ptr() % 16 == 12


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("qwen3", WeightFormat.PLAIN),
        pytest.param("qwen3-moe", WeightFormat.PLAIN, marks=pytest.mark.slow),
        pytest.param("deepseek-v3", WeightFormat.FP8, marks=pytest.mark.slow),
    ],
)
def test_steps_of_other_sizes(family: str, form: WeightFormat, compiled: list[Compiled]) -> None:
    model = make_model(TINY[family], torch.bfloat16, META, form, filled=False)
    driver = Driver(model, 8, 2048, 16, META)
    for first, count, members in ((0, 32, 4), (32, 1, 4), (1000, 1, 4)):
        driver.run(driver.step(range(members), first, count))
    before = len(compiled)
    report(compiled)
    assert all(item.spills == 0 for item in compiled)
    for offset, (first, count, members) in enumerate(((0, 19, 3), (19, 12, 5), (31, 1, 3), (40, 1, 7), (1900, 1, 5))):
        driver.run(moved(driver.step(range(members), first, count), offset))
    assert len(compiled) == before, compiled[before:]


def test_sampling_of_other_sizes(compiled: list[Compiled]) -> None:
    for rows in (2, 3, 8):
        needs = RANDOM | TOP_K
        batch = SamplingBatch(rows, 120, needs, np.full(rows, needs))
        batch.positions_P, batch.seed_keys_P = np.arange(rows), np.arange(rows).astype(np.uint64)
        batch.temperature_P = batch.top_p_P = batch.min_p_P = np.full(rows, 0.5, np.float32)
        batch.top_k_P = np.full(rows, 5)
        sample(torch.empty(rows, 128, dtype=torch.bfloat16, device=META), batch)
    assert len(compiled) == 1
