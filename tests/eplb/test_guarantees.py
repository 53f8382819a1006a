"""What a placement survives, F0 to F6 of docs/eplb.md: properties of placements, over random shapes and loads."""

from __future__ import annotations

import subprocess
import sys
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb.balance import placement_balance
from eplb.balancer import Balancer, BalancerConfig
from eplb.coverage import (
    domains_of,
    fewest_uncovered,
    host_matrix,
    survivable_losses,
    uncovered,
    uncovered_by_group,
    worst_node,
    worst_rank,
)
from eplb.mover import improve
from eplb.placement import Placement
from eplb.planner import plan
from eplb.repair import diff, repair
from eplb.shares import reweight
from native import library, why_absent

needs_native = pytest.mark.skipif(library() is None, reason=why_absent())  # the simple policies reach less


class Case(NamedTuple):
    num_experts: int
    num_ranks: int
    slots: int
    domains: tuple[int, ...]
    load: npt.NDArray[np.float64]

    def placement(self, min_copies: int = 1) -> Placement:
        made = plan(self.load, self.num_ranks, self.slots, failure_domains=self.domains, min_copies=min_copies)
        return made.placement


@st.composite
def cases(draw: st.DrawFn, least_copies: int = 1) -> Case:
    """1 to 4 nodes of 1 to 4 ranks; loads from even to very uneven; any number of experts that fits."""
    nodes, per_node = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    num_ranks = nodes * per_node
    num_ranks = max(num_ranks, least_copies)
    num_experts = draw(st.integers(2, 24))
    slots = -(-num_experts * least_copies // num_ranks) + draw(st.integers(0, 3))
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    load = rng.lognormal(0, draw(st.sampled_from([0.0, 1.0, 2.0])), (2, num_experts))
    domains = tuple(rank // per_node for rank in range(num_ranks))
    return Case(num_experts, num_ranks, slots, domains, load)


PROPERTY = settings(max_examples=60, deadline=None)


@PROPERTY
@given(case=cases(), order=st.randoms(use_true_random=False))
def test_f0_any_k_losses_are_survived_exactly_when_the_slots_suffice(case: Case, order: object) -> None:
    placement = case.placement()
    k = survivable_losses(case.num_experts, case.slots, case.num_ranks)
    ranks = list(range(case.num_ranks))
    order.shuffle(ranks)  # type: ignore[attr-defined]
    for lost in range(case.num_ranks):
        alive = [rank not in ranks[:lost] for rank in range(case.num_ranks)]
        if lost <= k:
            repair(placement, alive, epoch=1)
        else:
            with pytest.raises(ValueError, match="cannot hold"):
                repair(placement, alive, epoch=1)


@PROPERTY
@given(case=cases(least_copies=2))
def test_f1_two_copies_of_everything_need_no_reload_after_any_one_loss(case: Case) -> None:
    placement = case.placement(min_copies=2)
    for rank in range(case.num_ranks):
        assert not any(uncovered(placement, [rank]))
    assert worst_rank(placement)[1].max() == 0
    if len(set(case.domains)) > 1:
        assert worst_node(placement)[1].max() == 0  # F5: the second copy is on another node


def test_f1_is_refused_where_the_slots_do_not_suffice() -> None:
    with pytest.raises(ValueError, match=r"2 copies of 8 experts on 4 live rank.* need at least 4 slots"):
        plan(np.ones((1, 8)), 4, 3, min_copies=2)
    with pytest.raises(ValueError, match="min_copies is 2; with 1 live rank"):
        plan(np.ones((1, 8)), 1, 16, min_copies=2)


@PROPERTY
@given(case=cases())
def test_f2_reloads_are_bounded_from_below_and_even_loads_reach_the_bound(case: Case) -> None:
    bound = fewest_uncovered(case.num_experts, case.slots * case.num_ranks, case.num_ranks)
    assert worst_rank(case.placement())[1].min() >= bound
    even = plan(np.ones((1, case.num_experts)), case.num_ranks, case.slots, failure_domains=case.domains).placement
    assert worst_rank(even)[1].max() == bound


@PROPERTY
@given(case=cases(), rank=st.integers(0, 15))
def test_f3_exactly_the_uncovered_experts_are_loaded(case: Case, rank: int) -> None:
    lost = rank % case.num_ranks
    if survivable_losses(case.num_experts, case.slots, case.num_ranks) < 1:
        return
    placement = case.placement()
    missing = uncovered(placement, [lost])
    after = repair(placement, [r != lost for r in range(case.num_ranks)], epoch=1)
    loads = diff(placement, after)
    assert sorted((load.layer, load.expert) for load in loads) == [
        (layer, expert) for layer, experts in enumerate(missing) for expert in experts
    ]
    _, count_LG = uncovered_by_group(placement, range(case.num_ranks))
    assert count_LG[:, lost].tolist() == [len(experts) for experts in missing]


@PROPERTY
@given(case=cases(), rank=st.integers(0, 15))
def test_f4_a_few_moves_after_the_repair_never_make_it_worse(case: Case, rank: int) -> None:
    if survivable_losses(case.num_experts, case.slots, case.num_ranks) < 1:
        return
    after = repair(case.placement(), [r != rank % case.num_ranks for r in range(case.num_ranks)], epoch=1)
    share = reweight(after.slot_to_expert, case.load, after.alive)
    served = Placement(1, after.num_experts, after.slot_to_expert, share, after.alive, after.failure_domains)
    before = placement_balance(served, case.load)
    better = improve(served, case.load, max_moves=4, max_moves_per_layer=2)
    if better is not None:
        assert 1 <= len(diff(served, better)) <= 4
        assert (placement_balance(better, case.load) >= before - 0.01).all()
        assert not better.slot_to_expert[:, [not lives for lives in better.alive]].max(initial=-1) >= 0


@needs_native
def test_f4_balance_comes_back_after_a_repair() -> None:
    """32 ranks of 9 slots: with as many moves as experts were reloaded most of the balance is back, and each part helps."""
    rng = np.random.default_rng(0)
    load = np.exp(rng.uniform(0.8, 1.5, 8)[:, None] * rng.normal(size=(8, 256)))
    placement = plan(load, 32, 9, failure_domains=[rank // 8 for rank in range(32)]).placement
    after = repair(placement, [rank != 3 for rank in range(32)], epoch=1)
    share = reweight(after.slot_to_expert, load, after.alive)
    served = Placement(1, 256, after.slot_to_expert, share, after.alive, after.failure_domains)
    reached = [placement_balance(served, load).mean()]
    for moves in (2, 4, 8):
        better = improve(served, load, max_moves=8 * moves, max_moves_per_layer=moves)
        assert better is not None
        reached.append(placement_balance(better, load).mean())
    assert reached == sorted(reached)
    assert reached[-1] > 0.9


@PROPERTY
@given(case=cases())
def test_f5_copies_are_in_different_failure_domains(case: Case) -> None:
    placement = case.placement()
    hosts = host_matrix(placement)
    copies_LE = hosts.sum(1)
    labels, count_LN = uncovered_by_group(placement, domains_of(placement))
    if len(labels) > 1:
        # A node takes along what has one copy, and nothing else.
        assert count_LN.sum(1).tolist() == (copies_LE == 1).sum(1).tolist()
    for layer in range(placement.num_layers):
        for label in labels:
            lost = [rank for rank, own in enumerate(case.domains) if own == label]
            assert len(uncovered(placement, lost)[layer]) == count_LN[layer, labels.index(label)]


@PROPERTY
@given(case=cases(), dead=st.integers(0, 15), seed=st.integers(0, 1000))
def test_f6_equal_inputs_give_equal_plans_and_decisions(case: Case, dead: int, seed: int) -> None:
    alive = None
    if survivable_losses(case.num_experts, case.slots, case.num_ranks) >= 1:
        alive = [rank != dead % case.num_ranks for rank in range(case.num_ranks)]
    made = [plan(case.load * 1.0, case.num_ranks, case.slots, alive=alive, epoch=7).placement for _ in range(2)]
    assert made[0].checksum() == made[1].checksum()
    assert made[0].epoch == 7
    assert alive is None or list(made[0].alive) == alive
    assert (made[0].slot_to_expert[:, [not lives for lives in made[0].alive]] < 0).all()
    both = [Balancer(made[0], BalancerConfig(memory_steps=3, reweight_interval=2, move_interval=3)) for _ in range(2)]
    rng = np.random.default_rng(seed)
    for _ in range(9):
        counts = rng.poisson(20 * case.load / case.load.mean())
        first, second = (balancer.observe(counts) for balancer in both)
        assert (first is None) == (second is None)
        if first is not None and second is not None:
            assert first.placement.checksum() == second.placement.checksum()
            assert first.moved == second.moved


def test_f6_another_process_makes_the_same_plan() -> None:
    code = (
        "import numpy as np; from eplb.planner import plan;"
        "load = np.random.default_rng(5).lognormal(0, 1.5, (3, 40));"
        "print(plan(load, 8, 6, failure_domains=[0, 0, 0, 0, 1, 1, 1, 1]).placement.checksum())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    load = np.random.default_rng(5).lognormal(0, 1.5, (3, 40))
    assert int(done.stdout) == plan(load, 8, 6, failure_domains=[0, 0, 0, 0, 1, 1, 1, 1]).placement.checksum()
