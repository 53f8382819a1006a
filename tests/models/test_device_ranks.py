"""Whole models over the backends for GPUs, whose libraries are fakes: the experts spread over ranks give what one rank gives.

Those that carry any dtype must give the tokens of transformers; those that carry bfloat16 only are compared in the logits, with
a model as wide as the low-latency kernels want it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from deepseek_tiny import make_v3
from drive import CPU, Cache, generate_on_ranks, load_ours, make_step, relative_error
from hf_tiny import VOCAB, HfModel, make_qwen3_moe
from puts_in_threads import fakes_for
from rank_threads import on_ranks
from torch import Tensor
from use_fakes import use_fakes

from dbo.steps import drain
from ep.backends.dispatchers import StepState
from ep.parallel import Parallel
from ep.protocol import AllToAll
from ep.table import make_lanes
from ep.transport.device_group import DeviceGroup
from eplb.placement import linear_placement
from models.base import CausalLM
from models.registry import read_config

pytestmark = pytest.mark.fakes

NUM_TOKENS = 8
PROMPTS = [[[3, 1, 4, 1, 5], [9]], [[2, 6, 5, 3, 5, 8, 9, 7, 9]]]  # of each rank


def model_over(
    name: str, path: Path, group: DeviceGroup, dtype: torch.dtype, state: StepState | None = None
) -> CausalLM:
    facts = read_config(path)
    placement = linear_placement(facts.num_moe_layers, facts.num_experts, group.size)

    def lanes(num_slots: int, hidden_size: int) -> Sequence[AllToAll]:
        return make_lanes(name, group, num_slots, hidden_size, dtype, max_tokens=64, few_tokens=4, state=state)

    return load_ours(path, Parallel(group.rank, group.size, placement, lanes), dtype)


@pytest.fixture(scope="module", params=["qwen3", "deepseek_v3"])
def hf(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HfModel:
    make = {"qwen3": make_qwen3_moe, "deepseek_v3": make_v3}[request.param]
    return make(tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=["qwen3", "deepseek_v3"])
def wide(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    make = {"qwen3": make_qwen3_moe, "deepseek_v3": make_v3}[request.param]
    return make(tmp_path_factory.mktemp("wide"), hidden_size=2048, num_hidden_layers=2).path


@pytest.mark.parametrize("name", ["nccl", "nvshmem"])
def test_the_tokens_of_transformers(name: str, hf: HfModel, tmp_path: Path) -> None:
    def act(group: DeviceGroup) -> list[list[int]]:
        model = model_over(name, hf.path, group, torch.float32)
        [tokens] = generate_on_ranks([model], [PROMPTS[group.rank]], NUM_TOKENS)
        return tokens

    with use_fakes():
        ours = on_ranks(tmp_path, 2, act)
    assert ours == [hf.continued(own, tokens) for own, tokens in zip(PROMPTS, ours, strict=True)]


@pytest.mark.parametrize(
    "name",
    [
        "deepep_high_throughput",
        "deepep_low_latency",
        "deepep_v2",
        "flashinfer_nvlink_one_sided",
        "pplx",
        "deepep_high_throughput+deepep_low_latency",
        "nvshmem+nvshmem_low_latency",
    ],
)
def test_the_logits_of_one_rank(name: str, wide: Path, tmp_path: Path) -> None:
    """A prompt, then two tokens one by one: with a pair the first step goes by the one and the others by the other."""
    alone = load_ours(wide, dtype=torch.bfloat16)
    tokens = [[(7 * rank + 3 * i) % VOCAB for i in range(9)] for rank in range(2)]
    expected = [logits_of(alone, own, StepState()) for own in tokens]

    def act(group: DeviceGroup) -> Tensor:
        state = StepState()
        model = model_over(name, wide, group, torch.bfloat16, state)
        return logits_of(model, tokens[group.rank], state)

    with fakes_for(name):
        ours = on_ranks(tmp_path, 2, act)
    for logits, reference in zip(ours, expected, strict=True):
        assert isinstance(logits, Tensor) and relative_error(logits, reference) < 0.05


@torch.inference_mode()
def logits_of(model: CausalLM, tokens: list[int], state: StepState) -> Tensor:
    cache, parts = Cache.for_model(model), []
    for start, stop in ((0, len(tokens) - 2), (len(tokens) - 2, len(tokens) - 1), (len(tokens) - 1, len(tokens))):
        step = make_step(cache, [(0, tokens[start:stop], start)], all_logits=True)
        state.begin(stop - start)
        hidden_TD = drain(model.steps(step, cache.kv))
        state.confirm()
        parts.append(model.logits(hidden_TD).float())
    return torch.cat(parts).to(CPU)
