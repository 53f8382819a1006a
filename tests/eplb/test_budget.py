"""Slots shared out over layers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb.bounds import lower_bound
from eplb.offline.budget import layer_slots


def loads(seed: int, layers: int, experts: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.lognormal(0, rng.uniform(0.1, 2.0, (layers, 1)), (layers, experts))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 5), st.integers(2, 24), st.integers(1, 8), st.integers(0, 12))
def test_the_sum_is_kept_and_every_layer_fits(seed: int, layers: int, experts: int, ranks: int, extra: int) -> None:
    least = -(-experts // ranks)
    slots = layer_slots(loads(seed, layers, experts), ranks, least * layers + extra)
    assert min(slots) >= least and max(slots) <= experts
    assert sum(slots) == min(least * layers + extra, experts * layers)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(3, 12), st.integers(2, 6), st.integers(0, 5))
def test_no_other_way_to_share_them_out_has_a_lower_sum_of_bounds(
    seed: int, experts: int, ranks: int, extra: int
) -> None:
    """Against every way there is, for three layers: the bound falls ever slower with slots, so the greedy choice is best
    but for steps of a whole slot per rank, for which a little is allowed."""
    load = loads(seed, 3, experts)
    load /= load.sum(1, keepdims=True)
    least = -(-experts // ranks)
    total = 3 * least + extra

    def bound(slots: tuple[int, ...]) -> float:
        return float(lower_bound(load, np.array(slots) * ranks, ranks).sum())

    ways = [
        way for way in itertools.product(range(least, experts + 1), repeat=3) if sum(way) == min(total, 3 * experts)
    ]
    assert bound(layer_slots(load, ranks, total)) <= min(bound(way) for way in ways) * 1.05 + 1e-9


def test_uneven_layers_get_more() -> None:
    load = np.ones((2, 32))
    load[1, 0] = 40
    assert layer_slots(load, 8, 10) == (4, 6)


def test_what_does_not_fit_names_the_smallest_sum() -> None:
    with pytest.raises(ValueError, match=r"need at least 12 \(4 a layer\)"):
        layer_slots(np.ones((3, 16)), 4, 11)
    with pytest.raises(ValueError, match=r"need at least 24 \(8 a layer\)"):
        layer_slots(np.ones((3, 16)), 4, 23, min_copies=2)


def test_more_slots_than_experts_are_left_over() -> None:
    assert layer_slots(np.ones((2, 4)), 2, 100) == (4, 4)
