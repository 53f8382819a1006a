"""The equality test of gpt-oss, whose layers take turns between a window that gives blocks back and full attention: cut
prompts, preemption, prefixes, and kills give what transformers gives (float32)."""

from __future__ import annotations

import hf_tiny
import pytest
import torch
from amounts import combined, examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_parts import Job, check_any, drive, engine_choices, make_plan
from survivors import Survivors

from cache.manager import GONE
from cache.spec import token_groups
from dbo.steps import drain
from engine.build import build_rank
from engine.rank import Rank

pytestmark = pytest.mark.spine
torch.set_num_threads(1)

WINDOW, NUM_EXPERTS = 9, 8
STEM = [3 + 5 * i % 80 for i in range(29)]
JOBS = [Job([*STEM[: 29 - 5 * i], 7 + i], 9 + i % 4) for i in range(6)]


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> hf_tiny.HfModel:
    return hf_tiny.make_gpt_oss(tmp_path_factory.mktemp("gpt_oss"), num_hidden_layers=3, sliding_window=WINDOW)


@pytest.fixture(scope="module")
def expected(hf: hf_tiny.HfModel) -> dict[int, list[int]]:
    return {index: hf.greedy(job.prompt, job.max_tokens) for index, job in enumerate(JOBS)}


def clean(rank: Rank) -> None:
    """No block is lost."""
    rank._scheduler.kv.check([])


@settings(max_examples=examples(25), deadline=None)
@given(
    engine_choices(12),
    st.lists(st.integers(0, 12), min_size=len(JOBS), max_size=len(JOBS)),
    st.sampled_from([1, 1, 2, 4]),
)
def test_whatever_the_engine_does(
    hf: hf_tiny.HfModel, expected: dict[int, list[int]], choices: dict[str, object], arrivals: list[int], size: int
) -> None:
    check_any(hf.path, JOBS, arrivals, expected, size, max_model_len=44, **choices)


def test_the_engine_really_does_those_things(hf: hf_tiny.HfModel, expected: dict[int, list[int]]) -> None:
    rank = build_rank(make_plan(hf.path, max_model_len=44, num_kv_blocks=13, max_num_batched_tokens=16))
    jobs = [Job(job.prompt, job.max_tokens, 3 * index) for index, job in enumerate(JOBS)]
    assert {index: one.tokens for index, one in enumerate(drive([rank], jobs))} == expected
    assert rank.stats.preemptions > 0 and rank.stats.prefix_hits > 0
    clean(rank)
    rank.close()


def test_memory_is_constant_beyond_the_window(hf: hf_tiny.HfModel) -> None:
    """However long a sequence grows, it holds the blocks of its window, one that is begun and one that is left."""
    rank = build_rank(make_plan(hf.path, max_model_len=300, num_kv_blocks=80, max_num_seqs=1))
    groups = token_groups(rank._runner._kv.spec)
    (windowed,) = (index for index, group in enumerate(groups) if group.kind == "window")
    rank.submit(Job(STEM[:20], 200).message(0))
    held: dict[int, int] = {}  # tokens computed -> blocks
    while rank.has_work or not held:
        drain(rank.steps())
        for request in rank._scheduler.running:
            held[request.num_computed] = sum(block != GONE for block in request.held.tables[windowed])
    assert max(held) > 200
    most = -(-WINDOW // rank._scheduler.kv.block_size) + 2
    assert all(count <= most for tokens, count in held.items() if tokens > 30)
    assert rank._runner._kv.sizes.num_window_blocks < 80
    clean(rank)
    rank.close()


@pytest.mark.parametrize(("asynchronous", "turns"), combined([False, True], [2, 0, 4, 6, 8, 10, 12]))
def test_a_kill_at_many_turns(
    hf: hf_tiny.HfModel, expected: dict[int, list[int]], asynchronous: bool, turns: int
) -> None:
    cluster = Survivors(hf.path, 3, slots_per_rank=4, async_scheduling=asynchronous)
    cluster.lose_one(JOBS, turns)
    assert cluster.released == expected
    for rank in cluster.ranks.values():
        clean(rank)
