"""Experts spread over ranks give the tokens of one rank: ranks inside one process, and ranks in processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from drive import Cache, generate_on_ranks, mailbox_models, make_step, prompts_of
from hf_tiny import VOCAB, HfModel, make_qwen3_moe
from rank_processes import generate_in_processes

from dbo.steps import drain, weave

NUM_TOKENS = 16


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> HfModel:
    return make_qwen3_moe(tmp_path_factory.mktemp("moe"), mlp_only_layers=[1])


@pytest.mark.parametrize(("size", "slots_per_rank"), [(1, None), (2, None), (4, None), (3, None), (2, 6)])
def test_mailbox_ranks_give_the_tokens_of_transformers(hf: HfModel, size: int, slots_per_rank: int | None) -> None:
    """3 ranks: 8 experts do not divide, some slots are unused. 6 slots on 2 ranks: some experts have two replicas."""
    prompts = [prompts_of(rank, VOCAB) for rank in range(size)]
    ours = generate_on_ranks(mailbox_models(hf.path, size, slots_per_rank), prompts, NUM_TOKENS)
    assert ours == [hf.continued(own, tokens) for own, tokens in zip(prompts, ours, strict=True)]


def test_two_lanes_overlap_on_each_rank(hf: HfModel) -> None:
    """Half of each rank's sequences go through either lane, all four passes woven."""
    models = mailbox_models(hf.path, 2)
    expected, passes, steps = [], [], []
    for rank, model in enumerate(models):
        for lane, tokens in enumerate([[3 + rank, 5, 8], [9, 2 + rank]]):
            cache = Cache.for_model(model)
            steps.append(make_step(cache, [(0, tokens, 0)]))
            passes.append(model.steps(steps[-1], cache.kv, lane))
            expected.append(hf.logits(tokens)[-1])
    with torch.inference_mode():
        hidden = drain(weave(*passes))
        ours = torch.cat([models[0].logits(h[step.logits_rows_P]) for h, step in zip(hidden, steps, strict=True)])
    torch.testing.assert_close(ours, torch.stack(expected), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_gloo_processes_give_the_tokens_of_transformers(hf: HfModel, tmp_path: Path, size: int) -> None:
    prompts = [prompts_of(rank, VOCAB) for rank in range(size)]
    ours = generate_in_processes(hf.path, tmp_path / "store", prompts, NUM_TOKENS)
    assert ours == [hf.continued(own, tokens) for own, tokens in zip(prompts, ours, strict=True)]
