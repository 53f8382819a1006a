"""From expert to slot: always a slot that hosts the expert, and replicas in their share."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ep.place import SlotTable
from eplb.placement import Placement, linear_placement
from eplb.repair import even_shares


@settings(max_examples=40, deadline=None)
@given(
    num_experts=st.integers(1, 24),
    num_ranks=st.integers(1, 5),
    num_extra=st.integers(0, 4),
    steps=st.lists(st.integers(0, 40), max_size=4),
    seed=st.integers(0, 999),
)
def test_every_slot_hosts_its_expert(
    num_experts: int, num_ranks: int, num_extra: int, steps: list[int], seed: int
) -> None:
    slots = -(-num_experts // num_ranks) + num_extra
    plain = linear_placement(2, num_experts, num_ranks, slots if num_extra else None)
    permuted = np.random.default_rng(seed).permutation(num_ranks * slots)
    shuffled = Placement(
        epoch=0,
        num_experts=num_experts,
        slot_to_expert=plain.slot_to_expert.reshape(2, -1)[:, permuted].reshape(2, num_ranks, slots),
        share=plain.share.reshape(2, -1)[:, permuted].reshape(2, num_ranks, slots),
        alive=(True,) * num_ranks,
    )
    for placement in (plain, shuffled):
        table = SlotTable(placement, layer=1, rank=num_ranks - 1)
        hosted = torch.from_numpy(placement.slot_to_expert[1].ravel().copy())
        for tokens in steps:
            expert_TK = torch.randint(0, num_experts, (tokens, 2))
            slot_TK = table(expert_TK)
            assert slot_TK.dtype == torch.int64
            assert torch.equal(hosted[slot_TK].long(), expert_TK)


def shared(share: list[float]) -> Placement:
    """Expert 0 in slot 0 of each of several ranks, in these shares; the last rank also has expert 1."""
    ids = np.full((1, len(share), 2), -1)
    ids[0, :, 0] = 0
    ids[0, -1, 1] = 1
    shares = np.zeros((1, len(share), 2))
    shares[0, :, 0] = share
    shares[0, -1, 1] = 1
    return Placement(0, 2, ids, shares, (True,) * len(share))


def test_a_spare_takes_no_place_in_a_table() -> None:
    placement = linear_placement(2, 8, 2, slots_per_rank=8)  # every expert on both ranks, at work on one of them
    assert SlotTable(placement, layer=1).num_replicas == 1


def test_replicas_are_used_in_their_share_whatever_the_size_of_the_steps() -> None:
    share = [0.5, 0.0, 0.3, 0.2]
    for tokens in (1, 7, 512):
        table = SlotTable(shared(share), 0)
        counts = torch.zeros(8)
        steps = -(-4000 // tokens)
        for _ in range(steps):
            counts += torch.bincount(table(torch.zeros(tokens, 1, dtype=torch.int64)).flatten(), minlength=8)
        np.testing.assert_allclose(counts[::2] / counts.sum(), share, atol=5e-3)
        assert counts[2] == 0  # a replica without a share gets nothing, not even by rounding


def test_shares_at_the_ends() -> None:
    for share, slot in (([1.0, 0.0], 0), ([0.0, 1.0], 2)):
        table = SlotTable(shared(share), 0)
        assert set(table(torch.zeros(70_000, 1, dtype=torch.int64)).flatten().tolist()) == {slot}


def test_the_stream_of_hashes_runs_on_past_its_period() -> None:
    table = SlotTable(shared([0.5, 0.5]), 0)
    for tokens in (65_000, 1000, 130_000, 3):
        slots = table(torch.zeros(tokens, 1, dtype=torch.int64))
        assert slots.shape == (tokens, 1)
        assert abs((slots == 0).float().mean() - 0.5) < 0.2


def test_equal_numbers_cost_nothing() -> None:
    expert_TK = torch.tensor([[3, 1]])
    assert SlotTable(linear_placement(1, 8, 2), 0)(expert_TK) is expert_TK
    uneven = SlotTable(linear_placement(1, 5, 2), 0)
    assert uneven.num_replicas == 1
    assert uneven(torch.tensor([[0, 4]])).tolist() == [[0, 4]]
    assert SlotTable(linear_placement(1, 5, 3), 0)(torch.tensor([[2, 4]])).tolist() == [[2, 4]]
    assert SlotTable(linear_placement(1, 7, 3), 0)(torch.tensor([[2, 3, 5]])).tolist() == [[2, 3, 6]]


def test_slots_are_counted_among_the_live_ranks() -> None:
    """Ranks 0 and 2 of three live: they are 0 and 1 to each other."""
    ids = np.array([[[0, 1, 2], [-1, -1, -1], [3, 1, -1]]], dtype=np.int32)
    placement = Placement(4, 4, ids, even_shares(ids, 4), (True, False, True))
    table = SlotTable(placement, layer=0)
    expert_TK = torch.tensor([[0, 1], [2, 3], [1, 3], [1, 0]])
    slot_TK = table(expert_TK)
    hosted = torch.tensor([0, 1, 2, 3, 1, -1])
    assert torch.equal(hosted[slot_TK], expert_TK)
    spread = table(torch.ones(100, 1, dtype=torch.int64)).flatten().bincount()
    assert spread.sum() == spread[[1, 4]].sum() == 100 and spread[[1, 4]].min() > 45


@settings(max_examples=30, deadline=None)
@given(
    parts=st.lists(st.integers(0, 1 << 16), min_size=1, max_size=9).filter(any),
    start=st.integers(0, 70_000),
)
def test_a_period_of_hashes_gives_every_replica_its_share_to_16_bits(parts: list[int], start: int) -> None:
    share = [part / sum(parts) for part in parts]
    table = SlotTable(shared(share), 0)
    table(torch.zeros(start, 1, dtype=torch.int64))
    counts = table(torch.zeros(1 << 16, 1, dtype=torch.int64)).flatten().bincount(minlength=2 * len(share))[::2]
    running = np.cumsum(np.asarray(share, dtype=np.float32), dtype=np.float64)
    thresholds = np.rint((1 << 16) * running / running[-1])
    np.testing.assert_allclose(counts, np.diff(thresholds, prepend=0), atol=1)
    assert counts.sum() == 1 << 16
