"""The live policy: what it decides from sampled counts, and that nothing confuses it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from eplb.balance import placement_balance
from eplb.balancer import Balancer, BalancerConfig, Decision
from eplb.offline.scoring import policy
from eplb.placement import Placement, linear_placement
from eplb.planner import plan
from eplb.repair import diff, repair
from native import library, why_absent

needs_native = pytest.mark.skipif(library() is None, reason=why_absent())  # the simple policies reach less

RANKS, SLOTS, EXPERTS = 8, 5, 32
NODES = [rank // 4 for rank in range(RANKS)]


def loads(seed: int) -> npt.NDArray[np.float64]:
    load = np.random.default_rng(seed).lognormal(0, 1.0, (3, EXPERTS))
    return np.asarray(load / load.sum(1, keepdims=True))


def counts(load: npt.NDArray[np.float64], rng: np.random.Generator, tokens: int = 4096) -> npt.NDArray[np.int64]:
    return np.stack([rng.multinomial(tokens, row) for row in load])


def started(load: npt.NDArray[np.float64], **config: int | float) -> Balancer:
    placement = plan(load, RANKS, SLOTS, failure_domains=NODES).placement
    return Balancer(placement, BalancerConfig(**config))  # type: ignore[arg-type]


def run(balancer: Balancer, load: npt.NDArray[np.float64], steps: int, seed: int = 0) -> list[Decision]:
    rng = np.random.default_rng(seed)
    found = [balancer.observe(counts(load, rng)) for _ in range(steps)]
    return [decision for decision in found if decision is not None]


@needs_native
def test_new_shares_follow_a_drift_without_moving_anything() -> None:
    now = loads(0)
    later = now * np.random.default_rng(5).lognormal(0, 0.1, now.shape)
    later /= later.sum(1, keepdims=True)
    balancer = started(now, move_interval=0)
    stale = placement_balance(balancer.placement, later).mean()
    decisions = run(balancer, later, 60)
    assert len(decisions) == 12
    assert not any(decision.moved for decision in decisions)
    assert {decision.reason for decision in decisions} == {"new shares"}
    assert placement_balance(balancer.placement, later).mean() > max(stale, 0.97)


def test_a_change_of_workload_is_followed_by_a_few_moves() -> None:
    balancer = started(loads(0))
    run(balancer, loads(0), 30)
    before = balancer.placement
    stale = placement_balance(before, loads(7)).mean()
    decisions = run(balancer, loads(7), 150)
    moved = [move for decision in decisions for move in decision.moved]
    assert placement_balance(balancer.placement, loads(7)).mean() > max(0.9, stale)
    assert 0 < len(moved) < 0.6 * before.slot_to_expert.size
    assert all(move.expert >= 0 for move in moved)


@needs_native
def test_a_steady_load_moves_next_to_nothing() -> None:
    balancer = started(loads(0))
    moved = [move for decision in run(balancer, loads(0), 200) for move in decision.moved]
    assert len(moved) <= 0.02 * balancer.placement.slot_to_expert.size


def test_few_tokens_are_no_reason_to_move() -> None:
    balancer = started(loads(0), reweight_interval=0)
    rng = np.random.default_rng(0)
    assert [balancer.observe(counts(loads(0), rng, tokens=8)) for _ in range(50)] == [None] * 50
    quiet = started(loads(0))
    assert [quiet.observe(np.zeros((3, EXPERTS))) for _ in range(30)] == [None] * 30


def test_budget_in_bytes_per_rank() -> None:
    config = {"move_interval": 10, "move_budget_bytes": 100, "bytes_per_expert": 1000}
    balancer = started(loads(0), **config)
    for decision in run(balancer, loads(7), 100):
        assert np.bincount([move.rank for move in decision.moved], minlength=RANKS).max() <= 1


def test_a_decision_says_exactly_what_moves() -> None:
    balancer = started(loads(0))
    before = balancer.placement
    for decision in run(balancer, loads(7), 100):
        assert decision.moved == diff(before, decision.placement)
        before = decision.placement
    assert balancer.placement is before


def test_the_seed_may_have_any_unit() -> None:
    first, second = started(loads(0)), started(loads(0))
    first.seed(loads(0))
    second.seed(loads(0) * 2.0**20)
    for one, other in zip(run(first, loads(3), 40), run(second, loads(3), 40), strict=True):
        np.testing.assert_array_equal(one.placement.slot_to_expert, other.placement.slot_to_expert)
        np.testing.assert_allclose(one.placement.share, other.placement.share, atol=1e-5)


def test_it_goes_on_after_a_loss() -> None:
    balancer = started(loads(0))
    run(balancer, loads(0), 23)
    alive = [rank != 2 for rank in range(RANKS)]
    balancer.resync(repair(balancer.placement, alive, epoch=1))
    decisions = run(balancer, loads(0), 60)
    assert decisions
    assert all(decision.placement.epoch == 1 and list(decision.placement.alive) == alive for decision in decisions)
    assert (balancer.placement.slot_to_expert[:, 2] < 0).all()
    with pytest.raises(ValueError, match="the placement has 1 layers"):
        balancer.resync(linear_placement(1, EXPERTS, RANKS))


def test_bad_counts_are_refused_and_change_nothing() -> None:
    balancer, other = started(loads(0)), started(loads(0))
    for bad, words in (
        (np.full((3, EXPERTS), np.nan), "is nan"),
        (np.full((3, EXPERTS), -1), "is -1"),
        (np.ones((2, EXPERTS)), "counts have 2 layers"),
        (np.ones((3, EXPERTS + 1)), "experts"),
    ):
        with pytest.raises(ValueError, match=words):
            balancer.observe(bad)
    for one, same in zip(run(balancer, loads(3), 20), run(other, loads(3), 20), strict=True):
        assert one.placement.checksum() == same.placement.checksum()


def test_the_scored_policy() -> None:
    """The adapter gives what the script checks: ids and shares of the live balancer."""
    scored = policy()
    ids, share = scored.start(loads(0), RANKS, SLOTS, 4)
    Placement(0, EXPERTS, ids, share, (True,) * RANKS)
    rng = np.random.default_rng(0)
    given = [scored.observe(counts(loads(2), rng)) for _ in range(20)]
    assert sum(plan is not None for plan in given) == 4
