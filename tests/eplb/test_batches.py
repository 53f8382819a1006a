"""A change of placement in parts: every part covers all experts and brings no rank too much."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb.offline.batches import next_batch
from eplb.placement import Placement
from eplb.repair import even_shares


def random_placement(
    seed: int, layers: int, ranks: int, slots: int, experts: int, alive: tuple[bool, ...]
) -> Placement:
    """Every expert somewhere on a live rank, the slots left over at random (some unused)."""
    rng = np.random.default_rng(seed)
    live = np.flatnonzero(alive)
    ids = np.full((layers, ranks, slots), -1, dtype=np.int32)
    for layer in range(layers):
        values = rng.integers(-1, experts, len(live) * slots)
        values[:experts] = np.arange(experts)
        ids[layer, live] = rng.permutation(values).reshape(len(live), slots)
    return Placement(0, experts, ids, even_shares(ids, experts), alive)


@settings(max_examples=60, deadline=None)
@given(
    seeds=st.tuples(st.integers(0, 999), st.integers(0, 999)),
    ranks=st.integers(1, 5),
    slots=st.integers(1, 4),
    fill=st.floats(0.2, 1),
    experts_per_rank=st.integers(1, 4),
    dead=st.booleans(),
)
def test_batches_lead_to_the_target(
    seeds: tuple[int, int], ranks: int, slots: int, fill: float, experts_per_rank: int, dead: bool
) -> None:
    alive = tuple(not (dead and ranks > 1 and rank == 0) for rank in range(ranks))
    experts = max(1, int(sum(alive) * slots * fill))
    current, target = (random_placement(seed, 3, ranks, slots, experts, alive) for seed in seeds)
    goal = target.slot_to_expert
    for _ in range(3 * ranks * slots + 1):
        if np.array_equal(current.slot_to_expert, goal):
            return
        old = current.slot_to_expert
        ids = next_batch(current, goal, experts_per_rank)
        changed = ids != old
        assert changed.any() and (ids[changed] == goal[changed]).all()
        brought_G = np.zeros(ranks, dtype=int)
        for layer, rank, slot in np.argwhere(changed & (ids >= 0)):
            brought_G[rank] += ids[layer, rank, slot] not in old[layer, rank]
        layers = np.flatnonzero(changed.any((1, 2)))
        # More than the budget only where experts depend on each other, in one layer.
        assert brought_G.max() <= experts_per_rank or len(layers) == 1
        current = Placement(0, experts, ids, even_shares(ids, experts), alive)  # refuses an expert without a slot
    raise AssertionError("the target was not reached")


def test_a_ring_is_one_batch() -> None:
    """Two ranks swap their experts: neither may be overwritten first."""
    ids = np.array([[[0, 1], [2, 3]]], dtype=np.int32)
    current = Placement(0, 4, ids, even_shares(ids, 4), (True, True))
    target = np.array([[[2, 3], [0, 1]]], dtype=np.int32)
    first = next_batch(current, target, 1)
    assert first.tolist() == [[[2, 1], [0, 3]]]


def test_replicas_move_one_by_one() -> None:
    ids = np.array([[[0, 0], [1, 1]], [[0, 1], [1, 0]]], dtype=np.int32)
    current = Placement(0, 2, ids, even_shares(ids, 2), (True, True))
    target = np.array([[[0, 1], [1, 0]], [[0, 1], [1, 0]]], dtype=np.int32)
    assert next_batch(current, target, 1).tolist() == target.tolist()
    assert next_batch(current, ids, 1).tolist() == ids.tolist()
