"""Re-weighting: exact against trying every set of ranks, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb.balance import balancedness, checked_load, placement_balance, rank_load
from eplb.bounds import balance_bound, lower_bound
from eplb.placement import linear_placement
from eplb.reference import min_max_loads
from eplb.shares import reweight


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 100_000), sharp=st.sampled_from([0.0, 1.0, 2.5]))
def test_exact(seed: int, sharp: float) -> None:
    rng = np.random.default_rng(seed)
    num_ranks, slots = int(rng.integers(1, 7)), int(rng.integers(1, 5))
    num_experts = int(rng.integers(1, num_ranks * slots + 1))
    held = np.concatenate([np.arange(num_experts), rng.integers(-1, num_experts, num_ranks * slots - num_experts)])
    ids = rng.permutation(held).reshape(1, num_ranks, slots).astype(np.int32)
    load = rng.lognormal(0, sharp, (1, num_experts))
    hosts = [frozenset(np.flatnonzero((ids[0] == e).any(1)).tolist()) for e in range(num_experts)]
    best = min_max_loads(hosts, load[0].tolist(), frozenset(range(num_ranks)))
    found = rank_load(ids, reweight(ids, load), load)[0]
    np.testing.assert_allclose(found, [best[rank] for rank in range(num_ranks)], atol=2e-6 * load.sum())


def test_the_published_example_reaches_its_mean() -> None:
    """vLLM pull request 37656: loads on which the usual greedy plan leaves a rank with 232, and 181.25 is the mean."""
    load = np.array([[600, 560, 120, 120, 20, 10, 10, 10.0]])
    ids = np.array([[[0, 4], [0, 5], [0, 1], [0, 6], [1, 2], [1, 3], [1, 7], [2, 3]]], dtype=np.int32)
    assert rank_load(ids, reweight(ids, load), load).max() == pytest.approx(181.25)
    assert lower_bound(load, 16, 8) == pytest.approx([181.25])


def test_an_expert_twice_on_a_rank_and_one_without_load() -> None:
    ids = np.array([[[0, 0], [1, 2], [2, -1]]], dtype=np.int32)
    share = reweight(ids, np.array([[4.0, 1.0, 0.0]]))
    np.testing.assert_allclose(share, [[[1, 0], [1, 0.5], [0.5, 0]]])


def test_dead_ranks_get_nothing() -> None:
    ids = np.array([[[0, 1], [0, 1], [1, 0]]], dtype=np.int32)
    share = reweight(ids, np.array([[3.0, 1.0]]), [True, False, True])
    assert not share[0, 1].any()
    np.testing.assert_allclose(rank_load(ids, share, np.array([[3.0, 1.0]]))[0], [2, 0, 2])


@pytest.mark.parametrize(
    ("ids", "load", "alive", "words"),
    [
        ([[[0], [1]]], [[1.0, np.nan]], None, "layer 0, expert 1 is nan"),
        ([[[0], [1]]], [[1.0, -1.0]], None, "expert 1 is -1.0"),
        ([[[0], [1]]], [1.0, 1.0], None, r"\[layers, experts\]"),
        ([[[0], [1]]], [[1.0, 1.0, 1.0]], None, "expert 2 has no slot"),
        ([[[0], [1]]], [[1.0, 1.0]], [True, False], "expert 1 has no slot on a live rank"),
        ([[[0], [1]]], [[1.0, 1.0]], [True], "alive has 1 entries for 2 ranks"),
        ([[[0], [2]]], [[1.0, 1.0]], None, "ids from 0 to 2"),
        ([[[0], [1]]], [[1.0, 1.0]] * 2, None, "layers must be equal"),
    ],
)
def test_refusals(ids: list[object], load: list[object], alive: list[bool] | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        reweight(np.array(ids, dtype=np.int32), np.array(load), alive)


def test_bounds_by_hand() -> None:
    load = np.array([[8.0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    assert lower_bound(load, 5, 2).tolist() == [8, 2.5]  # one slot each: the heavy expert is on one rank
    assert lower_bound(load, 6, 2).tolist() == [6, 2.5]  # two copies: the mean is the limit
    assert balance_bound(load, [5, 6], 2).tolist() == [0.75, 1]
    assert lower_bound(load, 10, 2, min_copies=2).tolist() == [6, 2.5]
    with pytest.raises(ValueError, match="cannot hold 2 copies of 5 experts: it takes 10"):
        lower_bound(load, 9, 2, min_copies=2)


def test_the_bound_holds_for_every_split() -> None:
    """Copies given out by brute force: no choice of copies has a smaller largest part."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        load, slots = rng.lognormal(0, 1.5, 3), int(rng.integers(3, 8))
        choices = [
            (a, b, slots - a - b)
            for a in range(1, slots)
            for b in range(1, slots)
            if slots - a - b >= 1 and max(a, b) <= 9
        ]
        best = min(max(load / np.array(copies)) for copies in choices)
        assert lower_bound(load[None], slots, 9)[0] == pytest.approx(max(best, load.sum() / 9))


def test_balances() -> None:
    placement = linear_placement(2, 4, 2)
    load = np.array([[1.0, 1, 1, 1], [0, 0, 0, 0]])
    assert placement_balance(placement, load).tolist() == [1, 1]
    assert balancedness(np.array([[3.0, 1, 0]]), [True, True, False]).tolist() == [2 / 3]
    with pytest.raises(ValueError, match="load has 4 experts; the placement has 5"):
        checked_load(load, 5)
