"""EAGLE-3: drafts of a layer that was trained for a model are those of the formulas in plain torch, and streams are
those without drafts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepseek_tiny
import hf_tiny
import pytest
import torch
from eagle3_parts import Drafter
from hf_tiny import HfModel
from rank_parts import Job, drive, mailbox_ranks, make_plan
from test_mtp import PROMPTS, drafted

from configs.speculation import SpeculativeConfig
from engine.build import build_rank
from models.eagle3.directory import model_directory

pytestmark = pytest.mark.speculation
torch.set_num_threads(1)

KINDS: dict[str, tuple[Callable[..., HfModel], tuple[int, ...], dict[str, Any]]] = {
    "own head": (hf_tiny.make_qwen3_moe, (0, 1, 2), {"few": 40}),
    "the model's": (hf_tiny.make_llama, (1, 2), {"norm_output": True}),
    "speculators": (hf_tiny.make_qwen3, (1,), {"few": 50, "prefix": "layers.0", "fc_norm": True}),
    "latents": (deepseek_tiny.make_v3, (1, 3), {"few": 60, "norm_before_residual": True}),
}


def made(tmp_path: Path, kind: str) -> tuple[HfModel, Drafter, Path]:
    make, layers, more = KINDS[kind]
    hf = make(tmp_path / "model")
    drafter = Drafter(hf, layers, **more)
    return hf, drafter, model_directory(hf.path, drafter.write(tmp_path / "drafter"), tmp_path / "both")


def config_of(tmp_path: Path, count: int = 4) -> SpeculativeConfig:
    return SpeculativeConfig(
        method="eagle3", model=str(tmp_path / "drafter"), num_speculative_tokens=count, adaptive=False
    )


@pytest.mark.parametrize("graphs", ["none", "full_decode_only"])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_the_formulas(tmp_path: Path, kind: str, graphs: str) -> None:
    _, drafter, path = made(tmp_path, kind)
    config = config_of(tmp_path)
    for prompt in PROMPTS:
        rank = build_rank(make_plan(path, speculation=config, max_num_batched_tokens=8, cudagraph_mode=graphs))
        rank.submit(Job(prompt, 12).message(0))
        for tokens, drafts in drafted(rank, prompt):
            assert drafts == drafter.drafts(tokens[:-1], 4)
        rank.close()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_streams_with_it(tmp_path: Path, kind: str, size: int) -> None:
    hf, _, path = made(tmp_path, kind)
    jobs = [Job(prompt, 20 + 3 * index, arrive=index) for index, prompt in enumerate(PROMPTS)]
    expected = [got.tokens for got in drive([build_rank(make_plan(hf.path, max_num_seqs=1))], jobs)]
    plan = {"speculation": config_of(tmp_path), "max_num_batched_tokens": 16, "num_kv_blocks": 40}
    ranks = mailbox_ranks(path, size, **plan) if size > 1 else [build_rank(make_plan(path, **plan))]
    assert [got.tokens for got in drive(ranks, jobs)] == expected
    assert sum(rank.stats.spec_drafts for rank in ranks) > 0
    for rank in ranks:
        rank._scheduler.kv.check([])
        rank.close()
