"""Experts travel in chunks and are swapped in: every slot then holds the bytes of its expert, and the layer computes as before."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from a2a_cases import HIDDEN, MOE_EXPERTS, MOE_WIDTH, moe_input, moe_parts, sharded_moe
from hypothesis import given, settings
from hypothesis import strategies as st
from shm_threads import team, together
from torch import Tensor

from dbo.steps import drain, weave
from ep.backends.mailbox import Mailbox
from ep.experts import Experts
from ep.migrate import Migration, plan_moves
from ep.place import SlotTable
from ep.table import make_parcels
from ep.transport.group import Group, LocalGroup, MailboxGroup, MailboxWorld
from ep.transport.parcels import Parcels
from eplb.placement import Placement, linear_placement
from eplb.repair import even_shares

LAYERS = 2


def placement(seed: int, ranks: int, slots: int, alive: tuple[bool, ...], domains: tuple[int, ...] = ()) -> Placement:
    """Every expert once on a live rank, then replicas and unused slots at random."""
    rng = np.random.default_rng(seed)
    live = np.flatnonzero(alive)
    ids = np.full((LAYERS, ranks, slots), -1, dtype=np.int32)
    for layer in range(LAYERS):
        values = rng.integers(-1, MOE_EXPERTS, len(live) * slots)
        values[:MOE_EXPERTS] = np.arange(MOE_EXPERTS)
        ids[layer, live] = rng.permutation(values).reshape(len(live), slots)
    return Placement(3, MOE_EXPERTS, ids, even_shares(ids, MOE_EXPERTS), alive, domains)


class Slots:
    """The experts of one rank, in all layers. Expert e of layer l has bytes that only it has."""

    def __init__(self, current: Placement, rank: int) -> None:
        self.layers = [Experts(current.slots_per_rank, HIDDEN, MOE_WIDTH, torch.float32) for _ in range(LAYERS)]
        for layer, experts in enumerate(self.layers):
            for slot, expert in enumerate(current.experts_of(layer, rank)):
                for part, tensor in enumerate(experts.slot_storage(slot)):
                    tensor.copy_(content(layer, expert, part, tensor))

    def storage(self, layer: int, slot: int) -> tuple[Tensor, ...]:
        return self.layers[layer].slot_storage(slot)

    def check(self, now: Placement, rank: int) -> None:
        for layer in range(LAYERS):
            for slot, expert in enumerate(now.experts_of(layer, rank)):
                for part, tensor in enumerate(self.storage(layer, slot)):
                    assert expert < 0 or torch.equal(tensor, content(layer, expert, part, tensor)), (layer, slot, part)


def content(layer: int, expert: int, part: int, like: Tensor) -> Tensor:
    seed = 1_000_000 * (layer + 1) + 10_000 * (expert + 1) + 5_000 * part
    numbers = torch.randint(0, 256, (like.numel(),), generator=torch.Generator().manual_seed(seed))
    return numbers.to(like.dtype).view(like.shape)


def carry_out(migration: Migration, parcels: Parcels) -> None:
    for chunk in range(migration.num_chunks):
        pending = parcels.send(migration.sizes(chunk), migration.outgoing(chunk))
        migration.receive(chunk, pending.wait())
        parcels.release()


@torch.inference_mode()
@settings(max_examples=40, deadline=None)
@given(
    seeds=st.tuples(st.integers(0, 999), st.integers(0, 999)),
    ranks=st.integers(1, 5),
    spare=st.integers(0, 3),
    chunk_bytes=st.sampled_from([100, 3000, 4096, 1 << 20]),
    dead=st.booleans(),
)
def test_every_slot_gets_its_expert(
    seeds: tuple[int, int], ranks: int, spare: int, chunk_bytes: int, dead: bool
) -> None:
    alive = tuple(not (dead and ranks > 1 and rank == 1) for rank in range(ranks))
    live = [rank for rank in range(ranks) if alive[rank]]
    slots = -(-MOE_EXPERTS // len(live)) + spare
    old, new = (placement(seed, ranks, slots, alive) for seed in seeds)
    world = MailboxWorld(len(live))
    hosts = [Slots(old, rank) for rank in live]
    migrations = [Migration(old, new, rank, host.storage, chunk_bytes) for rank, host in zip(live, hosts, strict=True)]
    parcels = [make_parcels(MailboxGroup(world, index), 0) for index in range(len(live))]
    (chunks,) = {migration.num_chunks for migration in migrations}
    for chunk in range(chunks):
        sizes = [migration.sizes(chunk) for migration in migrations]
        assert all(np.array_equal(sizes[0], other) for other in sizes)
        assert sizes[0].sum(0).max() <= chunk_bytes and sizes[0].trace() == 0
        pending = [
            one.send(size, migration.outgoing(chunk))
            for one, size, migration in zip(parcels, sizes, migrations, strict=True)
        ]
        for migration, arrived in zip(migrations, pending, strict=True):
            migration.receive(chunk, arrived.wait())
    for rank, host in zip(live, hosts, strict=True):
        host.check(old, rank)  # nothing has changed so far
    for migration in migrations:
        migration.swap()
    for rank, host in zip(live, hosts, strict=True):
        host.check(new, rank)
    changed = (old.slot_to_expert != new.slot_to_expert) & (new.slot_to_expert >= 0)
    assert len(migrations[0].moves) == changed.sum() and world.num_waiting == 0
    expert_bytes = sum(tensor.nbytes for tensor in hosts[0].storage(0, 0))
    away = [move for move in migrations[0].moves if move.from_rank != move.rank]
    assert migrations[0].bytes_received == len(away) * expert_bytes


def test_experts_come_from_near_and_from_whoever_sends_least() -> None:
    """Expert 0 is on ranks 0, 1 and 2 (0 and 1 in one failure domain)."""
    ids = np.array([[[0, 1], [0, 2], [0, 3], [1, 2], [3, 1], [2, 3]]], dtype=np.int32)
    old = Placement(0, 4, ids, even_shares(ids, 4), (True,) * 6, (0, 0, 1, 1, 2, 2))
    after = ids.copy()
    after[0, 3, 0] = after[0, 4, 0] = after[0, 5, 0] = 0
    after[0, 0] = (1, 0)
    new = Placement(0, 4, after, even_shares(after, 4), (True,) * 6, old.failure_domains)
    assert [tuple(move) for move in plan_moves(old, new)] == [
        (0, 0, 0, 0, 1),  # within the rank
        (0, 0, 1, 0, 0),
        (0, 3, 0, 2, 0),  # from its own domain
        (0, 4, 0, 0, 0),
        (0, 5, 0, 1, 0),
    ]
    assert plan_moves(old, old) == []


@pytest.mark.parametrize("size", [2, 4])
@torch.inference_mode()
def test_through_shared_memory(tmp_path: Path, size: int) -> None:
    """Rooms of exactly one chunk, used again and again."""
    alive = (True,) * size
    slots = -(-MOE_EXPERTS // size) + 1
    route = [placement(seed, size, slots, alive) for seed in (1, 2, 3, 1)]
    groups = team(tmp_path, size)

    def act(rank: int) -> str:
        host, parcels = Slots(route[0], rank), make_parcels(groups[rank], 1000)
        for old, new in itertools.pairwise(route):
            migration = Migration(old, new, rank, host.storage, 1000)
            assert migration.num_chunks > 10
            carry_out(migration, parcels)
            migration.swap()
            host.check(new, rank)
        return "ok"

    assert together(size, act) == ["ok"] * size


def test_alone_there_is_nothing_to_carry() -> None:
    old, new = placement(0, 1, 13, (True,)), placement(1, 1, 13, (True,))
    host, group = Slots(old, 0), LocalGroup()
    with torch.inference_mode():
        migration = Migration(old, new, 0, host.storage, 100)
        assert migration.num_chunks == migration.bytes_received == 0
        migration.swap()
        host.check(new, 0)
    local: Group = group
    pending = make_parcels(local, 0).send(np.zeros((1, 1), dtype=np.int64), {})
    assert [part.numel() for part in pending.wait()] == [0]


@torch.inference_mode()
def test_a_layer_whose_experts_have_moved_computes_the_same() -> None:
    """To the bit where each row is computed alone; there and back again."""
    size = 3
    old = linear_placement(1, MOE_EXPERTS, size, 5)
    ids = np.roll(old.slot_to_expert, 4, axis=2)[:, ::-1].copy()
    new = Placement(0, MOE_EXPERTS, ids, old.share[:, [2, 1, 0]][:, :, [1, 2, 3, 4, 0]], old.alive)
    world = MailboxWorld(size)
    moes = [sharded_moe([Mailbox(world, rank, 5)], old, rank, shared=False) for rank in range(size)]
    _, every, _ = moe_parts(False)
    # One token per rank and expert rows of one token each: no product of matrices depends on who else is there.
    inputs = [moe_input(rank, 1) for rank in range(size)]

    def compute() -> list[Tensor]:
        return drain(weave(*(moe.steps(x_TD.clone()) for moe, x_TD in zip(moes, inputs, strict=True))))

    outputs = [compute()]
    for before, after in ((old, new), (new, old)):
        parcels = [make_parcels(MailboxGroup(world, rank), 0) for rank in range(size)]
        migrations = [
            Migration(before, after, rank, lambda _, slot, moe=moe: moe.experts.slot_storage(slot), 1 << 20)
            for rank, moe in enumerate(moes)
        ]
        pending = [one.send(move.sizes(0), move.outgoing(0)) for one, move in zip(parcels, migrations, strict=True)]
        for rank, (moe, move) in enumerate(zip(moes, migrations, strict=True)):
            move.receive(0, pending[rank].wait())
            move.swap()
            moe.table = SlotTable(after, 0, rank)
            for slot, expert in enumerate(after.experts_of(0, rank)):
                for ours, theirs in zip(moe.experts.slot_storage(slot), every.slot_storage(expert), strict=True):
                    assert torch.equal(ours, theirs)
        outputs.append(compute())
    for other in outputs[1:]:
        for a, b in zip(outputs[0], other, strict=True):
            assert torch.equal(a, b)
