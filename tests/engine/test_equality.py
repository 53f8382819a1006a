"""The equality test: whatever the engine does on the way, greedy tokens are those of plain generation (float32)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import hf_tiny
import pytest
import torch
from amounts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_parts import Got, Job, drive, mailbox_ranks, make_plan

from engine.build import build_rank
from models.base import CausalLM
from models.tiny import CHECKPOINT

torch.set_num_threads(1)

MAX_LEN = 40


class Plain:
    """One request at a time, a whole prompt at once, no engine; remembers what it was asked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._model: CausalLM = hf_tiny.load_ours(path)
        self._known: dict[tuple[int, ...], list[int]] = {}

    def continuation(self, prompt: Sequence[int], count: int) -> list[int]:
        known = self._known.get(tuple(prompt), [])
        if len(known) < count:
            known = hf_tiny.generate_greedy(self._model, [prompt], max(count, 12), num_blocks=32)[0]
            self._known[tuple(prompt)] = known
        return known[:count]


@pytest.fixture(scope="session")
def qwen3_moe(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    return Plain(hf_tiny.make_qwen3_moe(tmp_path_factory.mktemp("qwen3_moe")).path)


@pytest.fixture(scope="session")
def embedded() -> Plain:
    return Plain(CHECKPOINT)


@st.composite
def jobs_strategy(draw: st.DrawFn) -> list[Job]:
    """Prompts share prefixes (so that the cache is hit), come at any time, and some are aborted."""
    stems = draw(st.lists(st.lists(st.integers(2, 90), min_size=1, max_size=20), min_size=1, max_size=3))
    jobs = []
    for _ in range(draw(st.integers(1, 7))):
        stem = draw(st.sampled_from(stems))
        cut = draw(st.integers(1, len(stem)))
        prompt = stem[:cut] + draw(st.lists(st.integers(2, 90), max_size=4))
        arrive = draw(st.integers(0, 10))
        abort = draw(st.none() | st.integers(arrive, arrive + 12))
        jobs.append(Job(prompt, draw(st.integers(1, 12)), arrive, abort))
    return jobs


@st.composite
def settings_strategy(draw: st.DrawFn) -> dict[str, object]:
    """Tiny budgets cut prompts; tiny pools of blocks force preemption (but hold one whole sequence)."""
    return {
        "max_model_len": MAX_LEN,
        "block_size": 4,
        "num_kv_blocks": draw(st.integers(MAX_LEN // 4, 20)),
        "max_num_seqs": draw(st.integers(1, 5)),
        "max_num_batched_tokens": draw(st.sampled_from([3, 7, 16, 64])),
        "enable_prefix_caching": draw(st.booleans()),
        "async_scheduling": draw(st.booleans()),
        "scheduling_policy": draw(st.sampled_from(["fcfs", "priority"])),
    }


def check(plain: Plain, jobs: Sequence[Job], got: Sequence[Got]) -> None:
    for job, result in zip(jobs, got, strict=True):
        count = min(job.max_tokens, MAX_LEN - len(job.prompt))
        expected = plain.continuation(job.prompt, count)
        if result.finish_reason is None:
            assert job.abort is not None, "a request was lost"
            assert result.tokens == expected[: len(result.tokens)]
        else:
            assert (result.tokens, result.finish_reason) == (expected, "length")


def run(plain: Plain, jobs: Sequence[Job], choices: dict[str, object], size: int) -> None:
    if size == 1 and choices.get("all2all_backend") != "mailbox":
        ranks = [build_rank(make_plan(plain.path, **choices))]
    else:
        choices = {key: value for key, value in choices.items() if key != "all2all_backend"}
        ranks = mailbox_ranks(plain.path, size, **choices)
    try:
        check(plain, jobs, drive(ranks, jobs))
        for rank in ranks:
            assert rank.stats.kv_blocks_used == 0
            assert rank.stats.running == rank.stats.waiting == 0
    finally:
        for rank in ranks:
            rank.close()


@settings(max_examples=examples(40), deadline=None)
@given(jobs=jobs_strategy(), choices=settings_strategy())
def test_one_rank(qwen3_moe: Plain, jobs: list[Job], choices: dict[str, object]) -> None:
    run(qwen3_moe, jobs, choices, 1)


@settings(max_examples=examples(15), deadline=None)
@given(jobs=jobs_strategy(), choices=settings_strategy(), size=st.sampled_from([1, 2, 4]))
def test_ranks_in_one_thread(qwen3_moe: Plain, jobs: list[Job], choices: dict[str, object], size: int) -> None:
    run(qwen3_moe, jobs, {**choices, "all2all_backend": "mailbox"}, size)


@settings(max_examples=examples(10), deadline=None)
@given(jobs=jobs_strategy(), choices=settings_strategy(), size=st.sampled_from([1, 2]))
def test_latent_attention(embedded: Plain, jobs: list[Job], choices: dict[str, object], size: int) -> None:
    run(embedded, jobs, choices, size)


def test_preemption_happens_and_changes_nothing(qwen3_moe: Plain) -> None:
    """The property tests above mean nothing for preemption if the pools they draw were always large enough."""
    jobs = [Job([5 + i, 6, 7, 8, 9 + i], 12) for i in range(5)]
    for asynchronous in (False, True):
        plan = make_plan(
            qwen3_moe.path, max_model_len=MAX_LEN, num_kv_blocks=10, max_num_seqs=5, async_scheduling=asynchronous
        )
        rank = build_rank(plan)
        check(qwen3_moe, jobs, drive([rank], jobs))
        assert rank.stats.preemptions > 0
        assert rank.stats.kv_blocks_used == 0
        rank.close()


def test_prefixes_are_found_and_change_nothing(qwen3_moe: Plain) -> None:
    stem = list(range(20, 36))
    jobs = [Job([*stem, 50 + i], 6, arrive=4 * i) for i in range(4)]
    rank = build_rank(make_plan(qwen3_moe.path, max_model_len=MAX_LEN))
    check(qwen3_moe, jobs, drive([rank], jobs))
    assert rank.stats.prefix_hits >= 3 * len(stem)
    rank.close()
