"""The equality test of a model with sparse attention, on survivors of kills too (float32): which keys are chosen follows
from the tokens alone, so prefixes found, prompts cut, preemption and lost ranks change no token."""

from __future__ import annotations

from pathlib import Path

import hf_tiny
import pytest
import torch
from deepseek_tiny import make_glm5
from hypothesis import given, settings
from hypothesis import strategies as st
from overlapped import OFTEN
from rank_parts import Job, drive, mailbox_ranks, make_plan
from survivors import Survivors

from engine.build import build_rank

pytestmark = pytest.mark.spine
torch.set_num_threads(1)

MAX_LEN = 36
RANDOM = {"temperature": 1.0, "presence_penalty": 0.5}
STEM = [3 + 5 * i % 80 for i in range(21)]
# From fewer tokens than are chosen (8) to many more.
JOBS = [Job([*STEM[: 21 - 4 * i], 7 + i], 9 + i % 4, params=RANDOM if i % 3 == 2 else {}) for i in range(6)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_glm5(tmp_path_factory.mktemp("glm5"), n_routed_experts=8).path


@pytest.fixture(scope="module")
def expected(path: Path) -> dict[int, list[int]]:
    """Greedy ones from a model without an engine, seeded ones from an engine that does nothing but that."""
    model = hf_tiny.load_ours(path)
    alone = [
        got.tokens for got in drive([build_rank(make_plan(path, enable_prefix_caching=False, max_num_seqs=1))], JOBS)
    ]
    for job, tokens in zip(JOBS, alone, strict=True):
        if not job.params:
            assert [tokens] == hf_tiny.generate_greedy(model, [job.prompt], job.max_tokens)
    return dict(enumerate(alone))


@settings(max_examples=20, deadline=None)
@given(
    choices=st.fixed_dictionaries(
        {
            "num_kv_blocks": st.integers(10, 24),
            "max_num_seqs": st.integers(1, 5),
            "max_num_batched_tokens": st.sampled_from([3, 7, 16, 64]),
            "enable_prefix_caching": st.booleans(),
            "async_scheduling": st.booleans(),
        }
    ),
    arrivals=st.lists(st.integers(0, 12), min_size=len(JOBS), max_size=len(JOBS)),
    size=st.sampled_from([1, 2, 4]),
)
def test_whatever_the_engine_does(
    path: Path, expected: dict[int, list[int]], choices: dict[str, object], arrivals: list[int], size: int
) -> None:
    jobs = [
        Job(job.prompt, job.max_tokens, arrive, params=job.params) for job, arrive in zip(JOBS, arrivals, strict=True)
    ]
    plan = {"max_model_len": MAX_LEN, **choices}
    ranks = [build_rank(make_plan(path, **plan))] if size == 1 else mailbox_ranks(path, size, **plan)
    assert {index: one.tokens for index, one in enumerate(drive(ranks, jobs))} == expected
    for rank in ranks:
        rank.close()


def test_preemption_and_prefixes_really_happen(path: Path, expected: dict[int, list[int]]) -> None:
    rank = build_rank(make_plan(path, max_model_len=MAX_LEN, num_kv_blocks=10, max_num_batched_tokens=16))
    jobs = [Job(job.prompt, job.max_tokens, 2 * index, params=job.params) for index, job in enumerate(JOBS)]
    assert {index: one.tokens for index, one in enumerate(drive([rank], jobs))} == expected
    assert rank.stats.preemptions > 0 and rank.stats.prefix_hits > 0
    rank.close()


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_kills_at_any_moment(path: Path, expected: dict[int, list[int]], data: st.DataObject) -> None:
    cluster = Survivors(
        path,
        3,
        slots_per_rank=8,
        async_scheduling=data.draw(st.booleans()),
        max_num_batched_tokens=data.draw(st.sampled_from([5, 64])),
        num_kv_blocks=data.draw(st.sampled_from([10, 64])),
        max_model_len=MAX_LEN,
        dbo=data.draw(st.sampled_from(OFTEN)),
    )
    for index, job in enumerate(JOBS):
        cluster.add(index, job)
    for _ in range(data.draw(st.integers(1, 6))):
        for _ in range(data.draw(st.integers(0, 5))):
            cluster.round()
        if len(cluster.ranks) > 1:
            cluster.round(data.draw(st.sampled_from(sorted(cluster.ranks))), data.draw(st.integers(0, 15)))
            cluster.tell_all()
            cluster.replay()
        missing = sorted(set(range(3)) - set(cluster.ranks))
        if missing and data.draw(st.booleans()):
            cluster.start(missing[0])
            cluster.round()
            cluster.tell_all()
    cluster.finish()
    assert cluster.released == expected
    for rank in cluster.ranks.values():
        rank.close()
