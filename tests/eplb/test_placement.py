"""Placement checks itself; linear_placement covers every expert for any numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from eplb.placement import Placement, at_hand_everywhere, linear_placement, owner_shares, slots_needed
from eplb.repair import diff, repair


def two_ranks(**changes: Any) -> Placement:
    """One layer, 3 experts on 2 ranks of 2 slots; expert 0 has a replica on each."""
    fields: dict[str, Any] = {
        "epoch": 0,
        "num_experts": 3,
        "slot_to_expert": np.array([[[0, 1], [2, 0]]]),
        "share": np.array([[[0.25, 1.0], [1.0, 0.75]]]),
        "alive": (True, True),
    }
    return Placement(**{**fields, **changes})


def test_reading() -> None:
    placement = two_ranks()
    assert (placement.num_layers, placement.num_ranks, placement.slots_per_rank) == (1, 2, 2)
    assert placement.experts_of(0, 1) == (2, 0)
    assert placement.slots_of(0) == (((0, 0.25), (3, 0.75)), ((1, 1.0),), ((2, 1.0),))


def test_arrays_are_read_only_copies() -> None:
    ids = np.array([[[0, 1], [2, 0]]], dtype=np.int32)
    placement = two_ranks(slot_to_expert=ids)
    ids[:] = 7
    assert placement.experts_of(0, 0) == (0, 1)
    with pytest.raises(ValueError, match="read-only"):
        placement.slot_to_expert[0, 0, 0] = 1
    with pytest.raises(ValueError, match="read-only"):
        placement.share[0, 0, 0] = 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epoch": -1}, "epoch is -1"),
        ({"num_experts": 0}, "num_experts is 0"),
        ({"slot_to_expert": np.zeros((2, 2))}, r"shape \[2, 2\]"),
        ({"slot_to_expert": np.zeros((1, 2, 0)), "share": np.zeros((1, 2, 0))}, "at least one rank and one slot"),
        ({"share": np.ones((1, 2, 3))}, r"share has shape \[1, 2, 3\]"),
        ({"alive": (True,)}, "alive has 1 entries for 2 ranks"),
        ({"failure_domains": (0,)}, "failure_domains has 1 entries for 2 ranks"),
        ({"slot_to_expert": [[[0, 1], [2, 3]]]}, "from 0 to 3"),
        ({"slot_to_expert": [[[0, 1], [2, -2]]]}, "from -2 to 2"),
        ({"share": [[[-0.25, 1], [1, 1.25]]]}, "0 or more"),
        ({"share": [[[float("nan"), 1], [1, 1]]]}, "finite"),
        ({"share": [[[0.5, 1], [1, 0.6]]]}, "expert 0 sum to 1.1"),
        ({"slot_to_expert": [[[0, 1], [2, -1]]], "share": [[[1, 1], [1, 0.5]]]}, "unused slot holds a share"),
        ({"slot_to_expert": [[[0, 1], [1, 0]]]}, "layer 0: 1 expert.*the first is 2"),
        ({"alive": (True, False)}, "rank 1 is not alive but holds a share"),
        ({"alive": (True, False), "share": [[[1, 1], [0, 0]]]}, "no slot on a live rank, the first is 2"),
    ],
)
def test_bad_placements_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        two_ranks(**changes)


def test_a_dead_rank_may_keep_its_ids() -> None:
    placement = two_ranks(slot_to_expert=[[[0, 1, 2], [2, 0, -1]]], share=[[[1, 1, 1], [0, 0, 0]]], alive=(True, False))
    assert placement.slots_of(0) == (((0, 1.0),), ((1, 1.0),), ((2, 1.0),))


@given(st.integers(0, 3), st.integers(1, 9), st.integers(1, 4), st.booleans(), st.integers(0, 1 << 30))
def test_bytes_and_back(num_layers: int, num_experts: int, num_ranks: int, domains: bool, epoch: int) -> None:
    placement = structs.replace(
        linear_placement(num_layers, num_experts, num_ranks, failure_domains=range(num_ranks) if domains else ()),
        epoch=epoch,
    )
    data = placement.to_bytes()
    assert len(data) == placement.num_bytes
    back = Placement.from_bytes(data)
    assert (back.epoch, back.checksum()) == (epoch, placement.checksum())


def test_bytes_of_no_placement_are_refused() -> None:
    data = two_ranks().to_bytes()
    for cut in (data[:8], data[:-4], data + b"abcd"):
        with pytest.raises(ValueError, match="bytes are no"):
            Placement.from_bytes(cut)
    with pytest.raises(ValueError, match="sum to"):
        Placement.from_bytes(data[:-4] + b"\0\0\0\0")


def test_checksum_tells_placements_apart() -> None:
    placement = linear_placement(2, 8, 2, slots_per_rank=6)
    assert placement.checksum() == linear_placement(2, 8, 2, slots_per_rank=6).checksum()
    assert placement.checksum() == structs.replace(placement, epoch=5).checksum()
    # Fixed: it is compared between processes, machines and versions.
    assert linear_placement(1, 2, 2).checksum() == 5107240632597005836
    others = {
        linear_placement(2, 8, 4, slots_per_rank=3).checksum(),
        linear_placement(1, 8, 2, slots_per_rank=6).checksum(),
        structs.replace(placement, failure_domains=(0, 0)).checksum(),
    }
    assert placement.checksum() not in others and len(others) == 3
    assert 0 <= placement.checksum() < 2**63


@settings(max_examples=80, deadline=None)
@given(
    num_layers=st.integers(0, 3),
    num_experts=st.integers(1, 40),
    num_ranks=st.integers(1, 9),
    num_redundant=st.integers(0, 20),
)
def test_linear_placement_properties(num_layers: int, num_experts: int, num_ranks: int, num_redundant: int) -> None:
    slots = slots_needed(num_experts, num_ranks, num_redundant)
    assert (slots - 1) * num_ranks < num_experts + num_redundant <= slots * num_ranks
    plain = linear_placement(num_layers, num_experts, num_ranks)
    filled = linear_placement(num_layers, num_experts, num_ranks, slots_per_rank=slots)
    for layer in range(num_layers):
        ids = plain.slot_to_expert[layer].ravel()
        assert ids[ids >= 0].tolist() == list(range(num_experts))  # contiguous, each once
        assert (filled.slot_to_expert[layer] >= 0).all()
        counts = np.bincount(filled.slot_to_expert[layer].ravel(), minlength=num_experts)
        assert counts.sum() == slots * num_ranks
        kept = filled.slot_to_expert[layer][:, : plain.slots_per_rank]
        assert (kept[plain.slot_to_expert[layer] >= 0] == ids[ids >= 0]).all() or filled.everywhere
        work = filled.share[layer] > 0  # one slot of each expert works, and the work is spread over the ranks
        assert sorted(filled.slot_to_expert[layer][work].tolist()) == list(range(num_experts))
        assert work.sum(1).max() <= slots_needed(num_experts, num_ranks) + 1
        if slots <= num_experts:
            for rank in range(num_ranks):
                assert len(set(filled.experts_of(layer, rank))) == slots  # never the same expert twice on a rank


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.tuples(st.integers(0, 4), st.integers(1, 12), st.integers(1, 5), st.integers(1, 6)),
    same=st.booleans(),
    seed=st.integers(0, 999),
)
def test_owner_shares(sizes: tuple[int, int, int, int], same: bool, seed: int) -> None:
    """One expert after the other, those with fewest slots first: on the rank that has fewest by then."""
    layers, num_experts, num_ranks, slots = sizes
    ids = np.random.default_rng(seed).integers(-1, num_experts, (layers, num_ranks, slots), dtype=np.int32)
    ids = np.array([ids[0]] * layers) if same and layers else ids
    expected = np.zeros(ids.shape, dtype=np.float32)
    for layer, held in enumerate(ids):
        places = [np.argwhere(held == expert).tolist() for expert in range(num_experts)]
        owned = [0] * num_ranks
        for choices in sorted(filter(None, places), key=len):
            rank, slot = min(choices, key=lambda place: owned[place[0]])
            owned[rank] += 1
            expected[layer, rank, slot] = 1
    assert (owner_shares(ids, num_experts) == expected).all()


@pytest.mark.store
def test_every_expert_at_hand_everywhere() -> None:
    """The shares of work stay what they were; without a rank the others have them all."""
    linear = linear_placement(2, 6, 3, slots_per_rank=3)
    everywhere = at_hand_everywhere(linear)
    assert everywhere.everywhere and not linear.everywhere
    for layer in range(2):
        for rank in range(3):
            shares = np.zeros(6, dtype=np.float32)
            shares[linear.slot_to_expert[layer, rank]] = linear.share[layer, rank]
            assert (everywhere.share[layer, rank] == shares).all()
    left = repair(everywhere, (False, True, False), 1)
    assert left.everywhere and left.experts_of(0, 1) == tuple(range(6)) and left.experts_of(0, 0) == (-1,) * 6
    back = repair(left, (True, True, False, True), 2)
    assert back.everywhere and not [load for load in diff(everywhere, back) if load.rank < 3]


def test_replicas_go_to_other_failure_domains() -> None:
    placement = linear_placement(1, 8, 4, slots_per_rank=4, failure_domains=(0, 0, 1, 1))
    for pairs in placement.slots_of(0):
        assert {slot // 4 // 2 for slot, _ in pairs} == {0, 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 0, 1), "num_experts is 0"),
        ((1, 1, 0), "num_ranks is 0"),
        ((-1, 1, 1), "num_layers is -1"),
        ((1, 8, 2, 3), "need at least 4 slots"),
        ((1, 8, 2, 6, (0,)), "failure_domains has 1 entries"),
    ],
)
def test_linear_placement_refuses(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear_placement(*arguments)


def test_slots_needed_refuses() -> None:
    with pytest.raises(ValueError, match="num_redundant is -1"):
        slots_needed(4, 2, -1)
