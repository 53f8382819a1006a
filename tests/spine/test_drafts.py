"""Several tokens per step: whatever a drafter proposes, the stream is the plain one (float32, greedy and seeded)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import hf_tiny
import pytest
import torch
from amounts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Oracle, poison_kept_inputs, poison_what_nobody_may_read, take_drafts
from overlapped import OFTEN
from rank_parts import Job, drive, mailbox_ranks, make_plan
from survivors import Survivors, tight

from configs.speculation import SpeculativeConfig
from engine.build import build_rank
from engine.rank import Rank

pytestmark = pytest.mark.spine
torch.set_num_threads(1)

RANDOM = {"temperature": 0.8, "top_k": 20}
PENALTY = {
    "temperature": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.2, "min_tokens": 4, "stop_token_ids": (5, 9),
    "bad_words_token_ids": ((7,), (3, 8), (11, 12)),
}  # fmt: skip
SPECULATION = SpeculativeConfig(method="prediction", num_speculative_tokens=4)
STEM = [3 + 5 * i % 80 for i in range(13)]
JOBS = [
    Job([*STEM[: 13 - 2 * i], 7 + i], 14 + i % 3, params=[{}, RANDOM, PENALTY][i % 3] if i else {}) for i in range(6)
]
MAX_DRAFTS = 4


# Attention only; and models that keep states, which nothing can be taken back from.
MODELS = {
    "attention": hf_tiny.make_qwen3_moe,
    "delta-net": hf_tiny.make_qwen3_next,
    "delta-attention": hf_tiny.make_kimi_linear,
    "bounded-decay": hf_tiny.make_ling,
}


@pytest.fixture(scope="module", params=list(MODELS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODELS[request.param](tmp_path_factory.mktemp("drafts")).path


# For tests that take many examples.
SOME_SLOW = pytest.mark.parametrize(
    "checkpoint",
    [name if name == "attention" else pytest.param(name, marks=pytest.mark.slow) for name in MODELS],
    indirect=True,
)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[int, list[int]]:
    rank = build_rank(make_plan(checkpoint, enable_prefix_caching=False, max_num_seqs=1))
    return {index: got.tokens for index, got in enumerate(drive([rank], JOBS))}


def answers(expected: dict[int, list[int]]) -> dict[int, tuple[list[int], list[int]]]:
    return {index: (job.prompt, expected[index]) for index, job in enumerate(JOBS)}


@SOME_SLOW
@settings(max_examples=examples(25), deadline=None)
@given(
    choices=st.fixed_dictionaries(
        {
            "num_kv_blocks": st.integers(9, 30),
            "max_num_seqs": st.integers(1, 5),
            "max_num_batched_tokens": st.sampled_from([2, 7, 16, 64]),
            "enable_prefix_caching": st.booleans(),
            "async_scheduling": st.booleans(),
            "dbo": st.sampled_from(OFTEN),
        }
    ),
    arrivals=st.lists(st.integers(0, 12), min_size=len(JOBS), max_size=len(JOBS)),
    right=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    size=st.sampled_from([1, 2]),
)
def test_whatever_the_engine_does(
    checkpoint: Path,
    expected: dict[int, list[int]],
    choices: dict[str, object],
    arrivals: list[int],
    right: float,
    size: int,
) -> None:
    jobs = [Job(job.prompt, job.max_tokens, at, params=job.params) for job, at in zip(JOBS, arrivals, strict=True)]
    if size == 1:
        ranks = [
            build_rank(make_plan(checkpoint, max_model_len=36, speculation=SPECULATION, **{**choices, "dbo": None}))
        ]
    else:
        ranks = mailbox_ranks(checkpoint, size, max_model_len=36, speculation=SPECULATION, **choices)
    for rank in ranks:
        take_drafts(rank, Oracle(answers(expected), right), MAX_DRAFTS)
    assert {index: one.tokens for index, one in enumerate(drive(ranks, jobs))} == expected
    for rank in ranks:
        rank._scheduler.kv.check([])
        rank.close()


def test_every_number_of_accepted_drafts_comes_up_and_steps_are_saved(
    checkpoint: Path, expected: dict[int, list[int]]
) -> None:
    seen: Counter[tuple[int, int]] = Counter()
    steps = {}
    for right in (0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        rank = build_rank(make_plan(checkpoint, speculation=SPECULATION))
        oracle = Oracle(answers(expected), right)
        take_drafts(rank, oracle, MAX_DRAFTS)
        assert {index: one.tokens for index, one in enumerate(drive([rank], JOBS))} == expected
        steps_before = rank.stats.steps
        drive([rank], JOBS[:2])
        seen += oracle.accepted
        steps[right] = rank.stats.steps - steps_before
        rank.close()
    assert {(drafts, right) for drafts in range(1, MAX_DRAFTS + 1) for right in range(drafts + 1)} <= set(seen)
    assert steps[1.0] < steps[0.0]


def test_rejected_rows_are_never_read(checkpoint: Path, expected: dict[int, list[int]]) -> None:
    rank = build_rank(make_plan(checkpoint, num_kv_blocks=24, speculation=SPECULATION))
    take_drafts(rank, Oracle(answers(expected), 0.5), MAX_DRAFTS)
    for index, job in enumerate(JOBS):
        rank.submit(job.message(index))
    released: dict[int, list[int]] = {index: [] for index in range(len(JOBS))}
    while rank.has_work:
        for output in rank.step():
            released[output.request_id] += output.new_token_ids
        poison_what_nobody_may_read(rank)
        poison_kept_inputs(rank)
    assert released == expected
    rank.close()


class DraftingSurvivors(Survivors):
    """Every rank drafts, each with luck of its own."""

    def __init__(self, path: Path, size: int, known: dict[int, list[int]], right: float, **overrides: object) -> None:
        self.known, self.right, self.started = answers(known), right, 0
        self.told: dict[int, tuple[list[int], list[int]]] = {}  # by what ranks call the requests
        super().__init__(path, size, **overrides)

    def start(self, rank: int, join: bool = True) -> None:
        super().start(rank, join)
        self.started += 1
        take_drafts(self.ranks[rank], Oracle(self.told, self.right, self.started), MAX_DRAFTS)

    def _send(self, request_id: int) -> None:
        super()._send(request_id)
        self.told[self.names[request_id]] = self.known[request_id]


@SOME_SLOW
@settings(max_examples=examples(15), deadline=None)
@given(st.data())
def test_kills_at_any_moment(checkpoint: Path, expected: dict[int, list[int]], data: st.DataObject) -> None:
    """A request goes on elsewhere, where other drafts are proposed."""
    right = data.draw(st.sampled_from([0.3, 0.8, 1.0]))
    plan = {"max_model_len": 36, "speculation": SPECULATION, **tight(data, 9)}
    cluster = DraftingSurvivors(checkpoint, 3, expected, right, slots_per_rank=8, **plan)
    cluster.endure(JOBS, data)
    assert cluster.released == expected


def clean(rank: Rank) -> None:
    rank._scheduler.kv.check([])
