"""The GPU's way through whole models on torch's "meta" device: shapes without memory. Whatever a step leaves on the CPU, or reads back
from the device, fails here. Kernels are not run.

Legend: P rows sampled, V vocabulary.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.jit import JITFunction
from triton_support import ROOT

import layers.choice
import moe_kernels.backends
import moe_kernels.choice
import moe_kernels.token_sums
from configs.presets import PRESETS
from engine.device import PinnedUpload
from engine.sampling.sampler import sample
from engine.sampling.sampling_table import LOGPROBS, MIN_P, RANDOM, TOP_K, TOP_P, SamplingBatch
from engine.step_memory import StepMemory
from ep.experts import WeightFormat

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "benchmarks"))
from gpu_models import TINY, Driver, floor_of, make_model, weight_bytes

pytestmark = pytest.mark.triton

META = torch.device("meta")


class NoLaunch:
    """Stands for a kernel; what it is given must be on the device."""

    def __init__(self, name: str, launched: set[str]) -> None:
        self._name, self._launched = name, launched

    def __getitem__(self, grid: Any) -> Any:
        assert all(isinstance(size, int) for size in grid)

        def launch(*args: Any, **kwargs: Any) -> None:
            self._launched.add(self._name)
            for x in (*args, *kwargs.values()):
                assert not isinstance(x, torch.Tensor) or x.device == META, "a kernel is given memory of the host"

        return launch


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Every room takes "meta" for a GPU. The names of the kernels that were launched."""
    names: set[str] = set()
    for room in (layers.choice, moe_kernels.choice, moe_kernels.backends, moe_kernels.token_sums):
        monkeypatch.setattr(room, "on_gpu", lambda device: device == META)
    for room in ("layers", "mla", "moe_kernels"):
        for path in (ROOT / room / "triton").glob("[a-z]*.py"):
            module = importlib.import_module(f"{room}.triton.{path.stem}")
            for name, kernel in list(vars(module).items()):
                if isinstance(kernel, JITFunction) and name.endswith("_kernel"):
                    monkeypatch.setattr(module, name, NoLaunch(name, names))
    with torch.inference_mode():
        yield names


@pytest.mark.parametrize("form", [WeightFormat.PLAIN, WeightFormat.FP8])
@pytest.mark.parametrize("family", list(TINY))
def test_a_forward_pass_stays_on_the_device(family: str, form: WeightFormat, launched: set[str]) -> None:
    model = make_model(TINY[family], torch.bfloat16, META, form, filled=False)
    driver = Driver(model, 4, 64, 16, META)
    for first, count, members in ((0, 19, 4), (19, 3, 4), (22, 1, 3), (23, 1, 0)):
        hidden = driver.run(driver.step(range(members), first, count))
        assert hidden.device == META and hidden.shape == (members * count, 256)
    assert model.greedy_tokens(hidden, 128).device == META
    assert len(launched) >= 4, launched


@pytest.mark.parametrize(("preset", "form"), [("qwen3-30b-a3b", WeightFormat.PLAIN), ("deepseek-v3", WeightFormat.FP8)])
def test_published_models_of_full_size(preset: str, form: WeightFormat, launched: set[str]) -> None:
    model = make_model(PRESETS[preset], torch.bfloat16, META, form, filled=False)
    driver = Driver(model, 128, 8192, 64, META)
    for first, count, members in ((0, 2048, 1), (8000, 1, 128), (6000, 2000, 1)):
        hidden = driver.run(driver.step(range(members), first, count))
        assert hidden.shape == (members * count, model.config.hidden_size)
    expert, others = weight_bytes(model)
    floor = floor_of(model, 128, 128, 128 * 8000, 128 * 8000, form)
    assert floor.bytes > others + 0.9 * expert * model.config.num_experts * model.config.num_moe_layers
    assert len(launched) >= 8, launched


@pytest.mark.parametrize("needs", [0, RANDOM, RANDOM | TOP_K, RANDOM | TOP_P | MIN_P])
def test_sampling_stays_on_the_device(needs: int) -> None:
    rows = 3
    batch = SamplingBatch(rows, 128, needs, np.full(rows, needs))
    batch.positions_P, batch.seed_keys_P = np.arange(rows), np.arange(rows).astype(np.uint64)
    batch.temperature_P = batch.top_p_P = batch.min_p_P = np.full(rows, 0.5, np.float32)
    batch.top_k_P = np.full(rows, 5)
    sampled = sample(torch.empty(rows, 128, dtype=torch.bfloat16, device=META), batch)
    assert sampled.token_ids_P.device == META and sampled.token_ids_P.shape == (rows,)
    assert not needs & LOGPROBS


def test_a_step_lies_in_one_memory() -> None:
    class Event:
        def record(self) -> None: ...
        def synchronize(self) -> None: ...
        def query(self) -> bool:
            return True

    memory = StepMemory((0, 0, 0), (1,), 8, 4, 2, 1, 0, META, PinnedUpload(Event, pinned=False))
    place = memory.place(3, 2)
    parts = [*place.token_tensors, *place.sequence_tensors, memory.more(np.arange(2))]
    table = memory.write_table(0, place, np.zeros((2, 1), dtype=np.int64))
    memory.send()
    assert all(part.device == META for part in (*parts, table))
    assert len({part.untyped_storage()._cdata for part in parts}) == 1
