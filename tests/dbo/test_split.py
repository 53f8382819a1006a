"""Cutting a step: every token in one part, in order, and as much work in each part as in any other."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo.split import Cut, context_cost, cut, work

ENTRIES = st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 700)), max_size=12)
DECODES = st.lists(st.tuples(st.integers(0, 5000), st.just(1)), max_size=40)
COSTS = st.sampled_from([0.0, context_cost(64), context_cost(1024), 1.0])

Piece = tuple[int, int, int]  # entry, start, count


def pieces(starts: list[int], counts: list[int], cuts: list[Cut]) -> list[list[Piece]]:
    """What each part has, from the definition of a cut."""
    bounds = [Cut(0, 0), *cuts, Cut(len(starts), 0)]
    parts = []
    for first, last in pairwise(bounds):
        part = []
        for entry, (start, count) in enumerate(zip(starts, counts, strict=True)):
            low = first.tokens if entry == first.entry else (0 if entry > first.entry else count)
            high = last.tokens if entry == last.entry else (0 if entry > last.entry else count)
            if low < high:
                part.append((entry, start + low, high - low))
        parts.append(part)
    return parts


@settings(max_examples=200, deadline=None)
@given(entries=st.one_of(ENTRIES, DECODES), num_ubatches=st.integers(1, 5), per_context=COSTS)
def test_parts_are_the_step_and_equal(entries: list[tuple[int, int]], num_ubatches: int, per_context: float) -> None:
    starts, counts = [start for start, _ in entries], [count for _, count in entries]
    cuts = cut(starts, counts, num_ubatches, per_context)
    assert len(cuts) == num_ubatches - 1 and cuts == sorted(cuts)
    assert all(0 <= tokens < counts[entry] for entry, tokens in cuts if entry < len(counts))
    parts = pieces(starts, counts, cuts)
    tokens = [(entry, position) for part in parts for entry, start, n in part for position in range(start, start + n)]
    assert tokens == [(e, p) for e, (start, n) in enumerate(entries) for p in range(start, start + n)]
    cut_entries = [entry for entry, tokens in cuts if tokens]
    assert sum(len(part) for part in parts) <= len(entries) + len(cut_entries), "one more piece per cut, at most"
    works = [sum(work(start, count, per_context) for _, start, count in part) for part in parts]
    dearest = max((work(start + count - 1, 1, per_context) for start, count in entries), default=0.0)
    for value in works:
        assert abs(value - sum(works) / num_ubatches) <= dearest * (1 + 1e-9) + 1e-6


@pytest.mark.parametrize(
    ("counts", "num_ubatches", "cuts"),
    [
        ([], 2, [(0, 0)]),
        ([1], 2, [(0, 0)]),
        ([1, 1, 1], 2, [(1, 0)]),
        ([1, 1, 1, 1], 2, [(2, 0)]),
        ([100], 2, [(0, 50)]),
        ([1, 1, 98], 2, [(2, 48)]),
        ([30, 30, 30], 3, [(1, 0), (2, 0)]),
        ([90], 3, [(0, 30), (0, 60)]),
        ([1, 1], 4, [(0, 0), (1, 0), (1, 0)]),
    ],
)
def test_cuts(counts: list[int], num_ubatches: int, cuts: list[tuple[int, int]]) -> None:
    assert cut([0] * len(counts), counts, num_ubatches) == cuts


def test_long_contexts_weigh_more() -> None:
    """Of two equal prompts the one that attends to more is cut; of one prompt the first half is the longer one."""
    assert cut([4000, 0], [100, 100], 2, context_cost(64)) < [Cut(1, 0)]
    ((_, tokens),) = cut([0], [2000], 2, context_cost(64))
    assert 1000 < tokens < 1500
