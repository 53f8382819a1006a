"""The equality test of a model with sparse attention, on survivors of kills too (float32): which keys are chosen follows
from the tokens alone, so prefixes found, prompts cut, preemption and lost ranks change no token."""

from __future__ import annotations

from pathlib import Path

import hf_tiny
import pytest
import torch
from amounts import examples
from deepseek_tiny import make_glm5
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_parts import Job, check_any, drive, engine_choices, make_plan
from survivors import Survivors, tight

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


@settings(max_examples=examples(20), deadline=None)
@given(
    engine_choices(10), st.lists(st.integers(0, 12), min_size=len(JOBS), max_size=len(JOBS)), st.sampled_from([1, 2, 4])
)
def test_whatever_the_engine_does(
    path: Path, expected: dict[int, list[int]], choices: dict[str, object], arrivals: list[int], size: int
) -> None:
    check_any(path, JOBS, arrivals, expected, size, max_model_len=MAX_LEN, **choices)


def test_preemption_and_prefixes_really_happen(path: Path, expected: dict[int, list[int]]) -> None:
    rank = build_rank(make_plan(path, max_model_len=MAX_LEN, num_kv_blocks=10, max_num_batched_tokens=16))
    jobs = [Job(job.prompt, job.max_tokens, 2 * index, params=job.params) for index, job in enumerate(JOBS)]
    assert {index: one.tokens for index, one in enumerate(drive([rank], jobs))} == expected
    assert rank.stats.preemptions > 0 and rank.stats.prefix_hits > 0
    rank.close()


@settings(max_examples=examples(15), deadline=None)
@given(st.data())
def test_kills_at_any_moment(path: Path, expected: dict[int, list[int]], data: st.DataObject) -> None:
    cluster = Survivors(path, 3, slots_per_rank=8, max_model_len=MAX_LEN, **tight(data, 10))
    cluster.endure(JOBS, data)
    assert cluster.released == expected
