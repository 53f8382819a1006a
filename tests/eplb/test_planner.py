"""Full plans: valid for every shape, close to their bound, covering, stable against renaming; and what they refuse."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb.coverage import fewest_uncovered, uncovered_by_group, worst_rank
from eplb.mover import improve
from eplb.placement import Placement, linear_placement
from eplb.planner import Coverage, Method, plan
from eplb.repair import diff
from native import library, why_absent

needs_native = pytest.mark.skipif(library() is None, reason=why_absent())  # the simple policies reach less

NODES = [rank // 8 for rank in range(32)]


def skewed(num_layers: int, seed: int = 0, num_experts: int = 256) -> npt.NDArray[np.float64]:
    rng = np.random.default_rng(seed)
    base = np.exp(rng.uniform(0.8, 1.5, (3, num_layers, 1)) * rng.normal(size=(3, num_layers, num_experts)))
    load: npt.NDArray[np.float64] = np.einsum("d,dle->le", [0.6, 0.25, 0.15], base / base.mean(2, keepdims=True))
    return load


@settings(max_examples=100, deadline=None)
@given(
    num_ranks=st.integers(1, 9),
    num_experts=st.integers(1, 30),
    extra=st.lists(st.integers(0, 4), min_size=3, max_size=3),
    method=st.sampled_from(["auto", "flat"]),
    coverage=st.sampled_from(["load", "spread"]),
    dead=st.integers(0, 20),
    seed=st.integers(0, 1000),
)
def test_any_shape(
    num_ranks: int, num_experts: int, extra: list[int], method: Method, coverage: Coverage, dead: int, seed: int
) -> None:
    """Nothing has to divide anything; slots may differ from layer to layer; Placement checks that every expert is served."""
    rng = np.random.default_rng(seed)
    alive = [rank != dead for rank in range(num_ranks)]
    live = max(1, sum(alive))
    alive = alive if any(alive) else [True]
    load = rng.lognormal(0, 1, (3, num_experts)) * rng.integers(0, 2, (3, 1))
    slots = [-(-num_experts // live) + more for more in extra]
    made = plan(load, num_ranks, slots, alive=alive, method=method, coverage=coverage)
    used = (made.placement.slot_to_expert >= 0).sum(2)
    assert made.placement.slots_per_rank == max(slots)
    assert (used <= np.array(slots)[:, None]).all()
    assert not used[:, [not lives for lives in alive]].any()
    most = (load.sum(1) / live) / made.balance
    assert (most >= made.lower_bound * (1 - 1e-6)).all()
    if method == "flat":
        for layer in range(3):
            for pairs in made.placement.slots_of(layer):
                assert len({round(share, 6) for _, share in pairs}) == 1
    if method == "auto":  # every slot is used, unless every expert is everywhere
        assert (used.sum(1) == np.minimum(np.array(slots) * live, num_experts * live)).all()


@needs_native
def test_near_the_bound_and_covering() -> None:
    load = skewed(12)
    spread, by_load = (plan(load, 32, 9, failure_domains=NODES, coverage=way) for way in ("spread", "load"))
    assert spread.balance.mean() > 0.99
    assert by_load.balance.mean() > 0.9999
    uncovered = uncovered_by_group(spread.placement, range(32))[1]
    assert uncovered.mean() < 7.05
    assert uncovered.mean(0).max() < 7.2
    assert worst_rank(by_load.placement)[1].mean() > worst_rank(spread.placement)[1].mean()
    assert fewest_uncovered(256, 288, 32) == 7
    flat = plan(load, 32, 9, method="flat")
    assert flat.balance.mean() > 0.98


def test_a_plan_for_the_same_loads_moves_nothing() -> None:
    load = skewed(4)
    first = plan(load, 32, 9, failure_domains=NODES).placement
    again = plan(load, 32, 9, failure_domains=NODES, current=first).placement
    assert diff(first, again) == ()
    order = np.random.default_rng(0).permutation(8)
    shuffled = first.slot_to_expert.copy()
    shuffled[:, :8] = shuffled[:, order][:, :, ::-1]  # ranks of one node change places, and slots within them
    renamed = Placement(0, 256, shuffled, first.share * 0 + _even(shuffled), first.alive, first.failure_domains)
    assert diff(renamed, plan(load, 32, 9, failure_domains=NODES, current=renamed).placement) == ()


def _even(ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    copies = np.stack([np.bincount(row.ravel(), minlength=256) for row in ids])
    return (
        (1 / np.take_along_axis(copies, ids.reshape(len(ids), -1).astype(np.int64), 1))
        .reshape(ids.shape)
        .astype(np.float32)
    )


@needs_native
def test_renaming_saves_moves_and_keeps_coverage() -> None:
    now, later = skewed(4), skewed(4) * np.random.default_rng(1).lognormal(0, 0.3, (4, 256))
    current = plan(now, 32, 9, failure_domains=NODES).placement
    fresh = plan(later, 32, 9, failure_domains=NODES)
    renamed = plan(later, 32, 9, failure_domains=NODES, current=current)
    assert len(diff(current, renamed.placement)) < 0.9 * len(diff(current, fresh.placement))
    np.testing.assert_allclose(renamed.balance, fresh.balance, atol=1e-5)
    by_node = [uncovered_by_group(made.placement, NODES)[1].sum(1).tolist() for made in (fresh, renamed)]
    assert by_node[0] == by_node[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"slots_per_rank": 2}, "slots_per_rank is 2; 10 experts on 4 live rank.s. need at least 3 slots a rank"),
        ({"alive": [True, False, False, True]}, "need at least 5 slots"),
        ({"alive": [True]}, "alive has 1 entries for 4 ranks"),
        ({"alive": [False] * 4}, "no live rank"),
        ({"failure_domains": [1, 2]}, "failure_domains has 2 entries"),
        ({"slots_per_rank": [3, 3]}, "one number or one per layer"),
        ({"num_ranks": 0}, "num_ranks is 0"),
        ({"min_copies": 0}, "min_copies is 0"),
        ({"min_copies": 2}, "2 copies of 10 experts on 4 live rank.s. need at least 5"),
        ({"load_LE": [[float("nan")] * 10]}, "expert 0 is nan"),
        ({"load_LE": [[1.0] * 9], "num_experts": 10}, "load has 9 experts"),
        ({"method": "best"}, "method 'best'"),
        ({"current": linear_placement(1, 10, 5)}, "current has shape"),
    ],
)
def test_refusals(options: dict[str, object], words: str) -> None:
    arguments = {"load_LE": [[1.0] * 10], "num_ranks": 4, "slots_per_rank": 3, **options}
    with pytest.raises(ValueError, match=words):
        plan(**arguments)  # type: ignore[arg-type]


def test_moves_within_their_budgets() -> None:
    load = skewed(4)
    stale = plan(skewed(4, seed=9), 32, 9, failure_domains=NODES).placement
    for moves in (1, 3, 10):
        better = improve(stale, load, max_moves=moves)
        assert better is not None
        assert 1 <= len(diff(stale, better)) <= moves
    narrow = improve(stale, load, max_moves=100, bytes_per_expert=10, budget_bytes=10)
    assert narrow is not None
    assert max(np.bincount([move.rank for move in diff(stale, narrow)])) == 1
    assert improve(stale, load, max_moves=100, bytes_per_expert=10, budget_bytes=9) is None
    assert improve(stale, load, max_moves=0) is None
    assert improve(plan(load, 32, 9).placement, load, max_moves=10, min_gain=0.05) is None
    two = plan(load, 32, 17, min_copies=2).placement
    moved = improve(two, skewed(4, seed=3), max_moves=40, min_copies=2, min_gain=0.001)
    assert moved is None or worst_rank(moved)[1].max() == 0
    with pytest.raises(ValueError, match="load has 3 layers; the placement has 4"):
        improve(stale, load[:3], max_moves=1)


def test_moves_keep_coverage() -> None:
    load = skewed(6)
    stale = plan(skewed(6, seed=9), 32, 9, failure_domains=NODES).placement
    better = improve(stale, load, max_moves=200, max_moves_per_layer=30)
    assert better is not None
    assert (worst_rank(better)[1] <= np.maximum(worst_rank(stale)[1], fewest_uncovered(256, 288, 32) + 1)).all()
