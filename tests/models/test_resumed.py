"""A step that goes on at any layer whose start is kept gives the bits of one that begins at the embedding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import deepseek_tiny
import hf_tiny
import numpy as np
import pytest
import torch
from drive import Cache, load_ours, make_step
from msgspec.structs import replace

from cache.residuals import NUM_PLACES, KeptTokens, Residuals
from dbo.steps import drain
from layers.step import Resumed

MODELS: dict[str, Callable[[Path], hf_tiny.HfModel]] = {
    "dense": hf_tiny.make_qwen3,
    "grouped": hf_tiny.make_qwen3_moe,
    "window": hf_tiny.make_gpt_oss,
    "latent": deepseek_tiny.make_v3,
    "index": deepseek_tiny.make_v32,
    "shared index": partial(deepseek_tiny.make_glm5, index_topk=3),
}
NUM_ROWS, MOST = 4, 16


class Noted(Residuals):
    """Remembers what it has kept before it is written over."""

    def __init__(self, *sizes: int) -> None:
        memory = np.zeros(KeptTokens.num_bytes(sizes[0]) + NUM_PLACES * sizes[1] * sizes[2], dtype=np.uint8)
        super().__init__(memory, *sizes)
        self.seen: dict[int, torch.Tensor] = {}

    def place(self, number: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        self.note(dtype)
        return super().place(number, dtype)

    def note(self, dtype: torch.dtype) -> None:
        for number in range(NUM_PLACES):
            rows_TD, layer = super().place(number, dtype)
            if int(layer) >= 0:
                self.seen[int(layer)] = rows_TD.clone()


def with_residuals(cache: Cache, row_bytes: int) -> Noted:
    residuals = Noted(NUM_ROWS, MOST, row_bytes)
    cache.kv = replace(cache.kv, residuals=residuals)
    return residuals


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", MODELS)
def test_from_every_layer(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    """A prompt of some tokens beside a sequence that is decoded."""
    model = load_ours(MODELS[kind](tmp_path).path, dtype=dtype)
    cache = Cache.for_model(model)
    residuals = with_residuals(cache, model.config.hidden_size * dtype.itemsize)
    with torch.inference_mode():
        drain(model.steps(make_step(cache, [(0, [5, 6, 7], 0)]), cache.kv))
        residuals.clear()
        residuals.seen.clear()
        step = make_step(cache, [(0, [8], 3), (1, [9, 8, 7, 6, 5], 0)])
        residuals.begin(np.array([1, 2]), [3, 0], np.array([1, 5]), [0, 1])
        expected = drain(model.steps(step, cache.kv))
        residuals.note(dtype)
        kept = residuals.seen
        num_layers = model.config.num_layers
        moe = model.moe_layer_ids or range(num_layers)
        assert sorted(kept) == [layer for layer in moe if layer and model.can_begin_at(layer)] + [num_layers]
        for layer, residual_TD in kept.items():
            again = replace(step, resumed=Resumed(layer, residual_TD[: step.num_tokens].clone()))
            assert torch.equal(drain(model.steps(again, cache.kv)), expected), layer
