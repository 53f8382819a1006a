"""Whatever drafts, and whatever else the engine does: every stream is the one without drafts (float32)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from amounts import examples
from balanced import RESTLESS
from drafting import METHODS, check_streams, drafting_choices, foretold, undrafted
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_parts import Job
from survivors import Survivors, tight

from configs.eplb import EplbConfig
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


@pytest.fixture(scope="module")
def expected() -> dict[int, list[int]]:
    return undrafted(JOBS, **SIZES)


def close(rank: Rank) -> None:
    rank._scheduler.kv.check([])
    speculation = rank._scheduler.speculation
    assert not speculation._sources and not speculation._cold and not speculation._predictions._readings
    rank.close()


@settings(max_examples=examples(40), deadline=None)
@given(
    choices=drafting_choices(METHODS),
    arrivals=st.lists(st.integers(0, 12), min_size=len(JOBS), max_size=len(JOBS)),
    aborted=st.sets(st.integers(0, len(JOBS) - 1), max_size=2),
    size=st.sampled_from([1, 2]),
)
def test_whatever_the_engine_does(
    expected: dict[int, list[int]], choices: dict[str, Any], arrivals: list[int], aborted: set[int], size: int
) -> None:
    check_streams(JOBS, expected, arrivals, aborted, size, close, **SIZES, **choices)


@settings(max_examples=examples(15), deadline=None)
@given(st.data())
def test_kills_and_moves_at_any_moment(expected: dict[int, list[int]], data: st.DataObject) -> None:
    """A request goes on elsewhere, where other drafts are proposed; experts move, those of the layer that drafts too."""
    eplb: EplbConfig | None = data.draw(st.sampled_from([None, RESTLESS]))
    plan = {"speculation": data.draw(METHODS), "eplb": eplb, **tight(data, 9), **SIZES}
    cluster = Survivors(CHECKPOINT, 3, slots_per_rank=16, **plan)
    cluster.endure(foretold(JOBS, expected), data)
    assert cluster.released == expected
    for rank in cluster.ranks.values():
        close(rank)
