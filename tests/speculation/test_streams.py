"""Whatever drafts, and whatever else the engine does: every stream is the one without drafts (float32)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from balanced import RESTLESS
from hypothesis import given, settings
from hypothesis import strategies as st
from overlapped import OFTEN
from rank_parts import Job, drive, mailbox_ranks, make_plan
from survivors import Survivors, tight

from configs.eplb import EplbConfig
from configs.speculation import SpeculativeConfig
from engine.build import build_rank
from engine.rank import Rank
from models.tiny import CHECKPOINT

pytestmark = pytest.mark.speculation
torch.set_num_threads(1)

RANDOM = {"temperature": 0.8, "top_k": 20}
EDITS = {
    "temperature": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.2, "min_tokens": 4, "stop_token_ids": (5, 9),
    "bad_words_token_ids": ((7,), (3, 8), (11, 12)), "logprobs": 1,
}  # fmt: skip
STEM = [1, 300, 412, 250, 611, 300, 412, 250, 611, 300, 412]
JOBS = [
    Job([*STEM[: 11 - 2 * (i % 4)], 7 + i], 14 + i % 3, params=[{}, RANDOM, EDITS][i % 3] if i else {})
    for i in range(6)
]
SIZES: dict[str, Any] = {"max_model_len": 36}
METHODS = st.builds(
    SpeculativeConfig,
    method=st.sampled_from(["prediction", "ngram", "suffix", "mtp"]),
    num_speculative_tokens=st.integers(1, 5),
    prompt_lookup_min=st.just(1),
    prompt_lookup_max=st.just(3),
    adaptive=st.booleans(),
)


@pytest.fixture(scope="module")
def expected() -> dict[int, list[int]]:
    rank = build_rank(make_plan(CHECKPOINT, enable_prefix_caching=False, max_num_seqs=1, **SIZES))
    return {index: got.tokens for index, got in enumerate(drive([rank], JOBS))}


def foretold(expected: dict[int, list[int]]) -> list[Job]:
    """Every second request brings a prediction, with a mistake in it."""
    jobs = []
    for index, job in enumerate(JOBS):
        text = expected[index]
        more = {"prediction_token_ids": (*text[:5], 3, *text[6:])} if index % 2 else {}
        jobs.append(Job(job.prompt, job.max_tokens, params={**job.params, **more}))
    return jobs


def clean(rank: Rank) -> None:
    rank._scheduler.kv.check([])
    speculation = rank._scheduler.speculation
    assert not speculation._sources and not speculation._cold and not speculation._predictions._readings


@settings(max_examples=40, deadline=None)
@given(
    choices=st.fixed_dictionaries(
        {
            "speculation": METHODS,
            "num_kv_blocks": st.integers(9, 30),
            "max_num_seqs": st.integers(1, 5),
            "max_num_batched_tokens": st.sampled_from([2, 7, 16, 64]),
            "enable_prefix_caching": st.booleans(),
            "async_scheduling": st.booleans(),
            "dbo": st.sampled_from(OFTEN),
        }
    ),
    arrivals=st.lists(st.integers(0, 12), min_size=len(JOBS), max_size=len(JOBS)),
    aborted=st.sets(st.integers(0, len(JOBS) - 1), max_size=2),
    size=st.sampled_from([1, 2]),
)
def test_whatever_the_engine_does(
    expected: dict[int, list[int]], choices: dict[str, Any], arrivals: list[int], aborted: set[int], size: int
) -> None:
    jobs = foretold(expected)
    for index, (job, at) in enumerate(zip(jobs, arrivals, strict=True)):
        job.arrive, job.abort = at, at + 5 if index in aborted else None
    if size == 1:
        ranks = [build_rank(make_plan(CHECKPOINT, **SIZES, **{**choices, "dbo": None}))]
    else:
        ranks = mailbox_ranks(CHECKPOINT, size, **SIZES, **choices)
    for index, got in enumerate(drive(ranks, jobs)):
        whole = expected[index]
        assert got.tokens == whole if index not in aborted else got.tokens == whole[: len(got.tokens)]
    for rank in ranks:
        clean(rank)
        rank.close()


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_kills_and_moves_at_any_moment(expected: dict[int, list[int]], data: st.DataObject) -> None:
    """A request goes on elsewhere, where other drafts are proposed; experts move, those of the layer that drafts too."""
    eplb: EplbConfig | None = data.draw(st.sampled_from([None, RESTLESS]))
    plan = {"speculation": data.draw(METHODS), "eplb": eplb, **tight(data, 9), **SIZES}
    cluster = Survivors(CHECKPOINT, 3, slots_per_rank=16, **plan)
    cluster.endure(foretold(expected), data)
    assert cluster.released == expected
    for rank in cluster.ranks.values():
        clean(rank)
