"""The balancer's algorithms, native and simple, hold what eplb/reference.py says of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from eplb import simple
from eplb.assign import rank_groups
from eplb.balance import balancedness, rank_load
from eplb.coverage import fewest_uncovered, numbered, uncovered_by_group
from eplb.kernels import LayerMoves, native_improve, native_pack, native_relabel, native_reweight
from eplb.placement import Placement
from eplb.reference import min_max_loads, most_kept
from native import library, why_absent

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

needs_native = pytest.mark.skipif(library() is None, reason=why_absent())
both = pytest.mark.parametrize("native", [pytest.param(True, marks=needs_native), False], ids=["native", "simple"])


def reweighted(native: bool, ids: Ids, load: Floats, alive: Bools) -> npt.NDArray[np.float32]:
    if native:
        found = native_reweight(ids, load, alive)
        assert found is not None and found[1] == -1
        return found[0]
    share = np.zeros(ids.shape, dtype=np.float32)
    assert all(simple.reweight_layer(*layer[:2], alive, layer[2]) == -1 for layer in zip(ids, load, share, strict=True))
    return share


def packed(
    native: bool, load: Floats, slots: int, domains: Sequence[int], theta: float, min_copies: int, first: int = 0
) -> list[list[int]]:
    if not native:
        return simple.pack_layer(load[0], slots, domains, theta, min_copies, first)
    found = native_pack(load, np.array([slots]), slots + 1, np.array([first]), domains, theta, min_copies, True)
    assert found is not None and (found[0, :, slots:] == -1).all()
    return [[e for e in row if e >= 0] for row in found[0].tolist()]


def improved(
    native: bool, ids: Ids, load: Floats, alive: Bools, domains: list[int], copies: int, most: int, keep: bool
) -> LayerMoves:
    settings = alive, domains, copies, most, 0.002, keep
    if not native:
        return LayerMoves(*simple.improve_layer(ids[0], load[0], *settings))
    found = native_improve(ids, load, *settings)
    assert found is not None
    return found[0]


def drawn(seed: int, even: bool = False, most_ranks: int = 12) -> tuple[Ids, Floats, Bools]:
    """ids [1, G, S] with every expert on a live rank, unused slots and doubled copies; loads [1, E]; live ranks."""
    rng = np.random.default_rng(seed)
    num_ranks, slots = int(rng.integers(1, most_ranks)), int(rng.integers(1, 7))
    alive = rng.random(num_ranks) < 0.8
    alive[rng.integers(num_ranks)] = True
    room = int(alive.sum()) * slots
    num_experts = int(rng.integers(1, room + 1))
    held = np.concatenate([np.arange(num_experts), rng.integers(-1, num_experts, room - num_experts)])
    ids = np.full((1, num_ranks, slots), -1, dtype=np.int32)
    ids[0, alive] = rng.permutation(held).reshape(-1, slots)
    load = np.ones((1, num_experts)) if even else rng.lognormal(0, 1.5, (1, num_experts))
    load[rng.random(load.shape) < 0.1] = 0.0
    return ids, load, alive


@both
@pytest.mark.parametrize("seed", range(100))
def test_shares_are_the_least_there_are(native: bool, seed: int) -> None:
    ids, load, alive = drawn(seed, even=seed % 5 == 0, most_ranks=9)
    share = reweighted(native, ids, load, alive)
    hosts = [frozenset(np.flatnonzero((ids[0] == e).any(1) & alive).tolist()) for e in range(load.shape[1])]
    best = min_max_loads(hosts, load[0].tolist(), frozenset(np.flatnonzero(alive).tolist()))
    found = rank_load(ids, share, load)[0]
    np.testing.assert_allclose(found, [best.get(rank, 0.0) for rank in range(len(alive))], atol=2e-6 * load.sum())
    sums = [share[0][ids[0] == e].sum() for e in range(load.shape[1])]
    np.testing.assert_allclose(sums, 1, atol=1e-5)


@both
@pytest.mark.parametrize("seed", range(100))
def test_packing(native: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    nodes, per_node = int(rng.integers(1, 4)), int(rng.integers(1, 5))
    num_ranks, slots = nodes * per_node, int(rng.integers(1, 7))
    min_copies = int(rng.integers(1, min(3, num_ranks) + 1)) if num_ranks * slots >= 3 else 1
    num_experts = int(rng.integers(1, max(1, num_ranks * slots // min_copies) + 1))
    load = np.ones((1, num_experts)) if seed % 5 == 0 else rng.lognormal(0, 1.5, (1, num_experts))
    domains = [rank // per_node for rank in range(num_ranks)]
    theta = float(rng.choice([0.0, 0.5, 1.0]))
    ids = packed(native, load, slots, domains, theta, min_copies, first=seed % num_ranks)
    assert all(len(row) == len(set(row)) <= slots for row in ids)
    copies = np.bincount([e for row in ids for e in row], minlength=num_experts)
    assert copies.min() >= min_copies
    assert copies.sum() == min(num_ranks * slots, num_ranks * num_experts)
    hosts = [{domains[rank] for rank, row in enumerate(ids) if e in row} for e in range(num_experts)]
    if nodes > 1 and min_copies > 1:
        assert all(len(labels) > 1 for labels in hosts)
    if seed % 5 == 0 and theta == 1.0:  # even loads: nothing is lost with a rank that could be covered
        alone = max(sum(copies[e] == 1 for e in row) for row in ids)
        assert alone == fewest_uncovered(num_experts, num_ranks * slots, num_ranks)


@both
@pytest.mark.parametrize("seed", range(100))
def test_moves(native: bool, seed: int) -> None:
    ids, load, alive = drawn(seed + 1000)
    rng = np.random.default_rng(seed)
    domains = numbered(np.sort(rng.integers(0, len(alive), len(alive))).tolist())
    keep, min_copies, most = bool(seed % 2), 1 + seed % 3 // 2, int(rng.integers(1, 7))
    found = improved(native, ids, load, alive, domains, min_copies, most, keep)
    assert len(found.loads) <= most and found.gain >= 0.002 * len(found.loads)
    after = ids.copy()
    for rank, slot, expert in found.loads:
        assert alive[rank] and expert not in after[0, rank]
        after[0, rank, slot] = expert
    live, num_experts = int(alive.sum()), load.shape[1]
    copies = [np.array([(of[0, alive] == e).any(1).sum() for e in range(num_experts)]) for of in (ids, after)]
    assert (copies[1] >= np.minimum(copies[0], min_copies)).all() and copies[1].min() >= 1
    shares = [reweighted(native, of, load, alive) for of in (ids, after)]
    before, now = (
        balancedness(rank_load(of, share, load), alive)[0] for of, share in zip((ids, after), shares, strict=True)
    )
    assert now >= before - (0.01 if native else 1e-6)
    if keep:
        allowed = -(-max(0, 2 * num_experts - live * ids.shape[2]) // live) + 1
        largest = max(np.bincount(np.array(domains)[alive]))
        made = [
            Placement(0, num_experts, of, share, tuple(alive)) for of, share in zip((ids, after), shares, strict=True)
        ]
        for labels, room in ((range(len(alive)), allowed), (domains, allowed * largest)):
            worst = [uncovered_by_group(one, list(labels))[1].max() for one in made]
            assert worst[1] <= max(room, worst[0])


@both
@pytest.mark.parametrize("seed", range(60))
def test_renaming(native: bool, seed: int) -> None:
    new, _, alive = drawn(seed, most_ranks=7)
    rng = np.random.default_rng(seed)
    num_experts = int(new.max()) + 1
    old = rng.permutation(new[0, alive].ravel()).reshape(-1, new.shape[2])
    before = np.full_like(new, -1)
    before[0, alive] = old
    domains = np.sort(rng.integers(0, 3, len(alive))).tolist() if seed % 3 else ()
    groups = rank_groups(alive.tolist(), domains)
    out = native_relabel(new, before, num_experts, groups) if native else simple.relabel(new, before, groups)
    assert out is not None
    live = np.flatnonzero(alive)
    contents = [sorted(row) for row in new[0].tolist()]
    assert sorted(sorted(row) for row in out[0].tolist()) == sorted(contents)
    assert (out[0, ~alive] == new[0, ~alive]).all()
    for group in groups:  # its ranks' contents came from the ranks of one group
        mine = sorted(sorted(row) for row in out[0, group].tolist())
        assert mine in [sorted(contents[rank] for rank in other) for other in groups]
    for rank in live:  # what stays keeps a slot that it had
        kept = {*out[0, rank].tolist()} & {*before[0, rank].tolist()} - {-1}
        assert all((out[0, rank] == e)[before[0, rank] == e].any() for e in kept)
    if native and len(groups) == 1:
        kept = [{*a} & {*b} - {-1} for a, b in zip(out[0, live].tolist(), old.tolist(), strict=True)]
        assert sum(map(len, kept)) == most_kept(new[0, live].tolist(), old.tolist())
