"""The native balancer equals the plain one: the same slots, the same moves, the same rank loads."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from eplb.assign import _relabel_plain, assign, rank_groups
from eplb.kernels import native_improve, native_pack, native_relabel, native_reweight
from eplb.moves import improve_layer
from eplb.pack import pack_layer
from eplb.shares import _reweight_plain
from native import library, why_absent

needs_native = pytest.mark.skipif(library() is None, reason=why_absent())


def drawn(
    seed: int, even: bool = False
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """ids [1, G, S] with every expert on a living rank, unused slots and doubled copies; loads [1, E]; living ranks."""
    rng = np.random.default_rng(seed)
    num_ranks, slots = int(rng.integers(1, 12)), int(rng.integers(1, 7))
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


@needs_native
@pytest.mark.parametrize("seed", range(150))
def test_shares(seed: int) -> None:
    ids, load, alive = drawn(seed, even=seed % 5 == 0)
    native = native_reweight(ids, load, alive)
    assert native is not None
    plain = _reweight_plain(ids, load, alive)
    np.testing.assert_allclose(native[0], plain, atol=1e-6)


@needs_native
@pytest.mark.parametrize("seed", range(100))
def test_packing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_ranks, slots = int(rng.integers(1, 13)), int(rng.integers(1, 7))
    min_copies = int(rng.integers(1, min(3, num_ranks) + 1)) if num_ranks * slots >= 3 else 1
    num_experts = int(rng.integers(1, max(1, num_ranks * slots // min_copies) + 1))
    load = rng.lognormal(0, 1.5, (2, num_experts))
    if seed % 5 == 0:
        load = load.round()
    domains = rng.integers(0, min(3, num_ranks), num_ranks).tolist()
    theta, linked = float(rng.choice([0.0, 0.5, 1.0])), bool(seed % 4)
    slots_L, first_L = np.array([slots, slots + 1]), np.array([0, 7])
    native = native_pack(load, slots_L, slots + 1, first_L, domains, theta, min_copies, linked)
    assert native is not None
    for layer in range(2):
        how: dict[str, Any] = {"theta": theta, "min_copies": min_copies, "linked": linked, "first": int(first_L[layer])}
        plain = pack_layer(load[layer].tolist(), int(slots_L[layer]), domains, **how)
        assert [[e for e in row if e >= 0] for row in native[layer].tolist()] == plain


@needs_native
@pytest.mark.parametrize("seed", range(100))
def test_moves(seed: int) -> None:
    ids, load, alive = drawn(seed + 1000)
    rng = np.random.default_rng(seed)
    domains = np.sort(rng.integers(0, len(alive), len(alive))).tolist()
    keep, min_copies, max_loads = bool(seed % 2), 1 + seed % 3 // 2, int(rng.integers(1, 7))
    native = native_improve(ids, load, alive, domains, min_copies, max_loads, 0.002, keep)
    assert native is not None
    options: dict[str, Any] = {
        "max_loads": max_loads,
        "min_gain": 0.002,
        "min_copies": min_copies,
        "keep_coverage": keep,
    }
    plain = improve_layer(ids[0].tolist(), load[0].tolist(), alive.tolist(), domains, **options)
    assert native[0].loads == plain.loads
    assert native[0].gain == pytest.approx(plain.gain, abs=1e-9)


@needs_native
@pytest.mark.parametrize("seed", range(60))
def test_renaming(seed: int) -> None:
    new, _, alive = drawn(seed)
    rng = np.random.default_rng(seed)
    old = rng.permutation(new.ravel()).reshape(new.shape)
    num_experts = int(new.max()) + 1
    groups = rank_groups(alive.tolist(), np.sort(rng.integers(0, 3, len(alive))).tolist() if seed % 3 else ())
    native = native_relabel(new, old, num_experts, groups)
    assert native is not None
    np.testing.assert_array_equal(native, _relabel_plain(new, old, num_experts, groups))


def test_the_best_assignment_is_found() -> None:
    """Against all permutations."""
    for seed in range(30):
        value = np.random.default_rng(seed).random((5, 5))
        best = max(sum(value[i, p[i]] for i in range(5)) for p in itertools.permutations(range(5)))
        assert sum(value[i, j] for i, j in enumerate(assign(value))) == pytest.approx(best)
