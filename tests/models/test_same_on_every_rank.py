"""The same bits whichever rank serves a prompt and wherever its experts are."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from amounts import combined
from deepseek_tiny import make_v3
from drive import Cache, load_ours, make_step, run_step, single_rank
from gloo_groups import gloo_group
from hf_tiny import make_qwen3_moe
from rank_threads import TIMEOUT, together
from torch import Tensor

from ep.parallel import Parallel
from ep.protocol import AllToAll
from ep.table import make_lanes
from ep.transport.group import Group
from ep.transport.shm_group import shm_group
from eplb.placement import linear_placement
from models.registry import read_config
from models.tiny import CHECKPOINT

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 89, 79, 32, 38, 46]
NUM_TOKENS = 5


@pytest.fixture(scope="module", params=["embedded", "qwen3-moe", "deepseek-v3"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    if request.param == "embedded":
        return CHECKPOINT
    return (make_qwen3_moe(folder) if request.param == "qwen3-moe" else make_v3(folder)).path


def log_probabilities(path: Path, parallel: Parallel, dtype: torch.dtype, others: int) -> Tensor:
    """Of the prompt's last token and of what follows it, chosen greedily; beside them a sequence of `others` tokens, of
    another length on every rank."""
    model = load_ours(path, parallel, dtype)
    cache = Cache.for_model(model)
    found, tokens = [], list(PROMPT)
    run_step(model, make_step(cache, [(1, PROMPT[:others], 0)] if others else []), cache)
    for _ in range(NUM_TOKENS):
        done = 0 if len(tokens) == len(PROMPT) else len(tokens) - 1
        logits_PV = run_step(model, make_step(cache, [(0, tokens[done:], done)]), cache)
        found.append(logits_PV[-1].log_softmax(-1))
        tokens.append(int(found[-1].argmax()))
    return torch.stack(found)


@pytest.mark.parametrize(
    ("dtype", "world"),
    combined(
        [torch.bfloat16, torch.float32], [("shm", 3, 2), ("gloo", 3, 2), ("shm", 2, 0), ("shm", 4, 0), ("gloo", 2, 0)]
    ),
)
def test_ranks(path: Path, dtype: torch.dtype, world: tuple[str, int, int], tmp_path: Path) -> None:
    """Every rank gives what a rank alone gives, which has all experts itself: 3 ranks are also what is left of 4, and their
    experts lie elsewhere, some of them twice."""
    facts, (backend, size, more_slots) = read_config(path), world
    slots = -(-facts.num_experts // size) + more_slots
    placement = linear_placement(facts.num_moe_layers, facts.num_experts, size, slots)
    name = uuid.uuid4().hex

    def act(rank: int) -> Tensor:
        group: Group
        if backend == "shm":
            group = shm_group(tmp_path, rank, size, TIMEOUT, name)
        else:
            group = gloo_group(str(tmp_path / "store"), rank, size, TIMEOUT, name)

        def lanes(num_slots: int, hidden_size: int) -> Sequence[AllToAll]:
            return make_lanes(backend, group, num_slots, hidden_size, dtype, num_lanes=1)

        try:
            found = log_probabilities(path, Parallel(rank, size, placement, lanes), dtype, 3 * rank)
            group.all_gather_ints([0]).wait()  # nobody leaves while another may still need it
            return found
        finally:
            group.close()

    alone = log_probabilities(path, single_rank(path), dtype, 0)
    for found in together(size, act):
        assert isinstance(found, Tensor)
        assert torch.equal(found, alone)
