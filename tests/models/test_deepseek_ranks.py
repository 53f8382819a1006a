"""DeepSeek over several ranks: the tokens of one rank, and only its own experts read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from deepseek_tiny import make_v3
from drive import CPU, generate_on_ranks, mailbox_models, parallel_of, prompts_of, single_rank
from hf_tiny import VOCAB, HfModel
from rank_processes import generate_in_processes

from ep.parallel import Parallel
from ep.transport.group import MailboxGroup, MailboxWorld
from layers.weights import Checkpoint
from models.registry import build, read_config

NUM_TOKENS = 16


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> HfModel:
    return make_v3(tmp_path_factory.mktemp("v3"))


@pytest.mark.parametrize(("size", "slots_per_rank"), [(1, None), (2, None), (4, None), (3, None), (2, 11)])
def test_mailbox_ranks_give_the_tokens_of_transformers(hf: HfModel, size: int, slots_per_rank: int | None) -> None:
    """3 ranks: 16 experts do not divide, some slots are unused. 11 slots on 2 ranks: some experts have two replicas."""
    prompts = [prompts_of(rank, VOCAB) for rank in range(size)]
    ours = generate_on_ranks(mailbox_models(hf.path, size, slots_per_rank), prompts, NUM_TOKENS)
    assert ours == [hf.continued(own, tokens) for own, tokens in zip(prompts, ours, strict=True)]


@pytest.mark.slow
def test_gloo_processes_give_the_tokens_of_transformers(hf: HfModel, tmp_path: Path) -> None:
    prompts = [prompts_of(rank, VOCAB) for rank in range(2)]
    ours = generate_in_processes(hf.path, tmp_path / "store", prompts, NUM_TOKENS)
    assert ours == [hf.continued(own, tokens) for own, tokens in zip(prompts, ours, strict=True)]


def test_a_rank_reads_only_its_experts(hf: HfModel) -> None:
    read = []
    for size in (1, 4):
        parallel = parallel_of(hf.path, MailboxGroup(MailboxWorld(size), 0), "mailbox")
        model = build(read_config(hf.path), parallel, torch.float32, CPU)
        checkpoint = Checkpoint(hf.path)
        with torch.inference_mode():
            model.load(checkpoint)
        checkpoint.finish()
        read.append(checkpoint.bytes_read)
    expert_bytes = 2 * 16 * (3 * 20 * 32) * 4  # layers, experts, weights of one, bytes
    assert read[0] - read[1] == expert_bytes * 3 // 4


def test_experts_need_a_placement(hf: HfModel) -> None:
    parallel = single_rank(hf.path)
    with pytest.raises(ValueError, match="placement"):
        build(read_config(hf.path), Parallel(0, 1, None, parallel.make_lanes), torch.float32, CPU)
