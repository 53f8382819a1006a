"""Ranks that share a store of weights are nearest, then those of one machine: as a placement sees them, and where experts come from."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ep.migrate import plan_moves
from eplb.placement import Distance, Placement, at_hand_everywhere, linear_placement
from eplb.planner import plan
from eplb.repair import repair, widen

# Of each rank the machine and the store on it.
PLACES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), min_size=1, max_size=6)


def placed(places: list[tuple[int, int]], num_experts: int = 6, slots: int | None = None) -> Placement:
    machines = [machine for machine, _ in places]
    stores = [2 * machine + store for machine, store in places]
    needed = -(-num_experts // len(places))
    return linear_placement(2, num_experts, len(places), max(needed, slots or 0), machines, stores)


@settings(max_examples=60, deadline=None)
@given(PLACES)
def test_distances_are_those_of_a_tree(places: list[tuple[int, int]]) -> None:
    """Symmetric, none to itself, and no way around is shorter."""
    placement = placed(places)
    ranks = range(len(places))
    for a in ranks:
        assert placement.distance(a, a) is Distance.SAME_STORE
        for b in ranks:
            there = placement.distance(a, b)
            assert there is placement.distance(b, a)
            assert (there is Distance.SAME_STORE) == (a == b or places[a] == places[b])
            assert (there is Distance.OTHER_MACHINE) == (places[a][0] != places[b][0])
            assert all(there <= max(placement.distance(a, c), placement.distance(c, b)) for c in ranks)


@settings(max_examples=60, deadline=None)
@given(PLACES, st.integers(0, 999))
def test_an_expert_comes_from_the_nearest_rank_that_has_it(places: list[tuple[int, int]], seed: int) -> None:
    generator = np.random.default_rng(seed)
    current = placed(places, slots=3)
    load_LE = generator.random((2, 6)) + 0.01
    target = plan(load_LE, len(places), current.slots_per_rank, failure_domains=current.failure_domains).placement
    for move in plan_moves(current, target):
        expert = target.slot_to_expert[move.layer, move.rank, move.slot]
        holders = [rank for rank in range(len(places)) if expert in current.slot_to_expert[move.layer, rank]]
        assert move.from_rank in holders
        nearest = min(current.distance(move.rank, rank) for rank in holders)
        assert current.distance(move.rank, move.from_rank) is nearest
        assert move.from_rank == move.rank or move.rank not in holders


@settings(max_examples=60, deadline=None)
@given(PLACES, st.data())
def test_who_shares_a_store_is_kept(places: list[tuple[int, int]], data: st.DataObject) -> None:
    """Over the wire, when ranks are lost, and when every rank has every expert: then nothing is brought."""
    everywhere = at_hand_everywhere(placed(places))
    assert Placement.from_bytes(everywhere.to_bytes()).stores == everywhere.stores
    assert len(everywhere.to_bytes()) == everywhere.num_bytes
    alive = data.draw(st.lists(st.booleans(), min_size=len(places), max_size=len(places)).filter(any))
    left = repair(everywhere, alive, 1)
    assert left.stores == everywhere.stores and left.everywhere
    back = repair(left, [True] * len(places), 2)
    assert back.everywhere and not [move for move in plan_moves(everywhere, back) if move.from_rank != move.rank]


def test_ranks_that_are_added_share_the_one_store() -> None:
    one = linear_placement(1, 4, 2, 4, stores=(0, 0))
    assert widen(one, 3).stores == (0, 0, 0)
    several = placed([(0, 0), (1, 0)])
    assert widen(several, 3).stores == (0, 2, 3)
    assert widen(linear_placement(1, 4, 2), 3).stores == ()


def test_no_store_is_on_two_machines() -> None:
    placement = placed([(0, 0), (1, 0)])
    with pytest.raises(ValueError, match=r"stores: store 0 is in failure domains \[0, 1\]"):
        replace(placement, stores=(0, 0))
    with pytest.raises(ValueError, match="stores has 1 entries for 2 ranks"):
        replace(placement, stores=(0,))
