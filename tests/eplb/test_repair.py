"""Repair after a loss and return of a rank: guarantees F0, F3 and F6 of the design, on random placements."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb.placement import Placement, linear_placement
from eplb.repair import SlotUpdate, diff, even_shares, lost_experts, ranks_needed, repair, widen


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Every expert somewhere, the other slots at random: replicas (also two on one rank) and unused ones."""
    num_ranks, num_layers = draw(st.integers(1, 5)), draw(st.integers(1, 2))
    num_experts = draw(st.integers(1, 12))
    slots = draw(st.integers(-(-num_experts // num_ranks), -(-num_experts // num_ranks) + 3))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ids = random.integers(-1, num_experts, (num_layers, num_ranks * slots)).astype(np.int32)
    for layer in ids:
        layer[random.permutation(num_ranks * slots)[:num_experts]] = np.arange(num_experts)
    shaped = ids.reshape(num_layers, num_ranks, slots)
    return Placement(0, num_experts, shaped, even_shares(shaped, num_experts), (True,) * num_ranks)


@given(placements(), st.data())
@settings(max_examples=150, deadline=None)
def test_a_loss_is_survived_exactly_when_the_slots_suffice(placement: Placement, data: st.DataObject) -> None:
    """F0, F3 (what is lost is loaded, nothing else moves) and F6."""
    alive = data.draw(st.lists(st.booleans(), min_size=placement.num_ranks, max_size=placement.num_ranks))
    lost = lost_experts(placement, alive)
    if sum(alive) * placement.slots_per_rank < placement.num_experts:
        needed = ranks_needed(placement.num_experts, placement.slots_per_rank)
        with pytest.raises(ValueError, match=f"it takes {needed} ranks"):
            repair(placement, alive, 1)
        return
    repaired = repair(placement, alive, 1)
    assert repaired.epoch == 1 and repaired.alive == tuple(alive)
    loads = diff(placement, repaired)
    assert sorted((load.layer, load.expert) for load in loads) == [
        (layer, expert) for layer, experts in enumerate(lost) for expert in experts
    ]
    assert all(alive[load.rank] for load in loads)
    loaded = {(load.layer, load.rank, load.slot) for load in loads}
    for layer, rank, slot in np.ndindex(placement.slot_to_expert.shape):
        if not alive[rank]:
            assert repaired.slot_to_expert[layer, rank, slot] == -1
        elif (layer, rank, slot) not in loaded:
            assert repaired.slot_to_expert[layer, rank, slot] == placement.slot_to_expert[layer, rank, slot]
    again = repair(placement, alive, 1)
    assert again.checksum() == repaired.checksum()


@given(placements(), st.data())
@settings(max_examples=100, deadline=None)
def test_ranks_leave_and_come_back(placement: Placement, data: st.DataObject) -> None:
    """Whoever goes on keeps its slots when others return; the returned have what they read at their start."""
    fewest = ranks_needed(placement.num_experts, placement.slots_per_rank)
    current = placement
    home = linear_placement(
        placement.num_layers, placement.num_experts, placement.num_ranks, placement.slots_per_rank
    ).slot_to_expert
    for epoch in range(1, 6):
        alive = data.draw(st.lists(st.booleans(), min_size=current.num_ranks, max_size=current.num_ranks))
        if sum(alive) < fewest:
            continue
        following = repair(current, alive, epoch)
        lost = {(layer, expert) for layer, experts in enumerate(lost_experts(current, alive)) for expert in experts}
        back = [alive[rank] and not current.alive[rank] for rank in range(current.num_ranks)]
        for load in diff(current, following):
            if not back[load.rank] or home[load.layer, load.rank, load.slot] != load.expert:
                assert (load.layer, load.expert) in lost
        current = following


@given(placements(), st.integers(1, 4), st.data())
@settings(max_examples=60, deadline=None)
def test_ranks_are_added(placement: Placement, num_new: int, data: st.DataObject) -> None:
    """New ranks have what they have read at their start, and the others keep what they have."""
    size = placement.num_ranks + num_new
    alive = [True] * placement.num_ranks + data.draw(st.lists(st.booleans(), min_size=num_new, max_size=num_new))
    grown = repair(placement, alive, 1)
    assert grown.num_ranks == size and grown.alive == tuple(alive)
    assert (grown.slot_to_expert[:, : placement.num_ranks] == placement.slot_to_expert).all()
    home = linear_placement(placement.num_layers, placement.num_experts, size, placement.slots_per_rank).slot_to_expert
    for rank in range(placement.num_ranks, size):
        assert (grown.slot_to_expert[:, rank] == (home[:, rank] if alive[rank] else -1)).all()
    assert {load.rank for load in diff(placement, grown)} == {
        rank for rank in range(placement.num_ranks, size) if alive[rank]
    }
    shrunk = repair(grown, [True] * placement.num_ranks + [False] * num_new, 2)
    assert (shrunk.slot_to_expert[:, : placement.num_ranks] == placement.slot_to_expert).all()


def test_a_new_rank_is_a_failure_domain_of_its_own() -> None:
    placement = linear_placement(1, 4, 2, 4, failure_domains=(7, 7))
    grown = widen(placement, 4)
    assert grown.failure_domains == (7, 7, 8, 9) and grown.alive == (True, True, False, False)
    assert widen(grown, 3) is grown


def test_the_loss_of_one_of_four() -> None:
    """Spare slots are used up first; then the least loaded rank gives up a replica."""
    placement = linear_placement(1, 12, 4, 4)
    repaired = repair(placement, (True, False, True, True), 3)
    assert lost_experts(placement, repaired.alive) == ((4, 5),)  # 3 has a replica elsewhere
    assert len(diff(placement, repaired)) == 2
    counts = np.bincount(repaired.slot_to_expert[repaired.slot_to_expert >= 0], minlength=12)
    assert counts.min() == 1 and counts.sum() == 12
    back = repair(repaired, (True,) * 4, 4)
    assert (back.slot_to_expert[0, 1] == placement.slot_to_expert[0, 1]).all()
    assert {load.rank for load in diff(repaired, back)} == {1}
    assert all(np.bincount(back.slot_to_expert[0].ravel(), weights=back.share[0].ravel()) == 1)


def test_unused_slots_are_taken_before_replicas() -> None:
    ids = np.array([[[0, 1, -1], [2, 3, 3], [4, 4, 5]]], dtype=np.int32)
    placement = Placement(0, 6, ids, even_shares(ids, 6), (True, True, True))
    repaired = repair(placement, (True, False, True), 1)
    # Expert 2 takes the unused slot, expert 3 the doubled one of rank 2.
    assert diff(placement, repaired) == (SlotUpdate(0, 0, 2, 2), SlotUpdate(0, 2, 0, 3))


def test_too_few_ranks_are_named() -> None:
    placement = linear_placement(2, 8, 4, 3)
    with pytest.raises(ValueError, match=r"2 live rank\(s\) of 3 slots cannot hold 8 experts: it takes 3 ranks"):
        repair(placement, (True, True, False, False), 1)
    with pytest.raises(ValueError, match="alive has 3 entries for 4 ranks"):
        repair(placement, (True, True, False), 1)


def test_placements_of_another_shape_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match=r"shapes \[1, 4, 4\] and \[1, 4, 2\]"):
        diff(linear_placement(1, 8, 2), linear_placement(1, 8, 4))
    with pytest.raises(ValueError, match="shapes"):
        diff(linear_placement(1, 8, 4, 4), linear_placement(1, 8, 2, 4))


def test_a_model_without_experts_survives_everything() -> None:
    placement = linear_placement(0, 4, 4)
    assert repair(placement, (True, False, False, False), 1).num_layers == 0


def test_the_reads_are_spread_over_the_survivors() -> None:
    """Serving goes on when the last one has read its experts."""
    placement = linear_placement(20, 64, 8, 10)
    after = repair(placement, [True] * 3 + [False] + [True] * 4, epoch=1)
    reads = np.bincount([load.rank for load in diff(placement, after)], minlength=8)
    lost = sum(map(len, lost_experts(placement, after.alive)))
    assert reads.sum() == lost and reads[3] == 0
    assert reads.max() <= -(-lost // 7) + 1
