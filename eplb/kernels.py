"""The balancer's algorithms, in native/src/eplb_*.cpp; eplb/reference.py says what they guarantee. Each function here
returns None where there is no native library; its caller then takes the simpler policy of eplb/simple.py.

Legend: L MoE layers, G ranks, S slots of a rank, E logical experts.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from native.library import function, library

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]
Shares = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

_POINTER, _INT, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_ARGUMENTS: dict[str, list[type]] = {
    "eplb_reweight": [*[_POINTER] * 5, *[_INT] * 4],
    "eplb_pack": [*[_POINTER] * 4, _REAL, _INT, _INT, _POINTER, *[_INT] * 4],
    "eplb_improve": [*[_POINTER] * 4, _INT, _INT, _REAL, _INT, *[_POINTER] * 3, *[_INT] * 4],
    "eplb_relabel": [*[_POINTER] * 4, *[_INT] * 4],
}


class LayerMoves(NamedTuple):
    """What one layer could do: experts to bring, each (rank, slot, expert), and the balancedness they gain together."""

    loads: list[tuple[int, int, int]]
    gain: float


@functools.cache
def _kernels() -> dict[str, Callable[..., None]] | None:
    if library() is None:
        return None
    return {name: function(name, *arguments) for name, arguments in _ARGUMENTS.items()}


def native_reweight(ids_LGS: Ids, load_LE: Floats, alive_G: npt.NDArray[np.bool_]) -> tuple[Shares, int] | None:
    """(shares, -1), or (anything, layer * E + expert) of the first expert without a live slot."""
    kernels = _kernels()
    if kernels is None:
        return None
    ids, load, alive = _c(ids_LGS, np.int32), _c(load_LE, np.float64), _c(alive_G, np.uint8)
    share, missing = np.zeros(ids.shape, np.float32), np.full(1, -1, np.int64)
    kernels["eplb_reweight"](*_at(ids, load, alive, share, missing), *ids.shape, load.shape[1])
    return share, int(missing[0])


def native_pack(
    load_LE: Floats,
    slots_L: Integers,
    widest: int,
    first_L: Integers,
    domain_G: Sequence[int],
    theta: float,
    min_copies: int,
    linked: bool,
) -> Ids | None:
    """For each rank of each layer its experts, at most slots_L of them: int32 [L, G, widest], -1 unused; all slots are
    used unless every expert is on every rank.

    domain_G: the failure domain of each rank, 0 <= label < G. theta: heavy experts get further copies until no copy
    carries more than theta times the mean rank load; then experts with a single copy get a second one, the heaviest
    first; then again the greatest load per copy. 0 lets the load alone decide, 1 covers as many experts as the load
    allows. linked False: largest copy first onto the emptiest rank, nothing else. first_L (modulo G): the rank that
    ties go to.
    """
    kernels = _kernels()
    if kernels is None:
        return None
    load, slots, first = _c(load_LE, np.float64), _c(slots_L, np.int64), _c(first_L, np.int64)
    domain = np.array(domain_G, dtype=np.int32)
    assert max(domain_G, default=0) < max(1, len(domain_G))
    ids = np.full((len(load), len(domain), widest), -1, np.int32)
    settings = (theta, min_copies, linked)
    kernels["eplb_pack"](*_at(load, slots, first, domain), *settings, *_at(ids), *ids.shape, load.shape[1])
    return ids


def native_improve(
    ids_LGS: Ids,
    load_LE: Floats,
    alive_G: npt.NDArray[np.bool_],
    domain_G: Sequence[int],
    min_copies: int,
    max_loads: int,
    min_gain: float,
    keep_coverage: bool,
) -> list[LayerMoves] | None:
    """The moves to make in each layer, at most max_loads experts brought, and the balancedness they gain.

    The best move is taken again and again, however small its gain, for often only several together help; then it goes
    back to the last point where every expert brought was worth min_gain on average. keep_coverage: no rank and no
    failure domain comes to hold alone more experts than the worst one did, or than one per rank above the least
    possible (eplb.coverage).
    """
    kernels = _kernels()
    if kernels is None:
        return None
    ids, load, alive = ids_LGS.astype(np.int32), _c(load_LE, np.float64), _c(alive_G, np.uint8)
    domain = np.array(domain_G, dtype=np.int32)
    assert max(domain_G, default=0) < max(1, len(domain_G)) and ids.max(initial=-1) < load.shape[1]
    moves, gain = np.zeros((len(ids), max_loads, 3), np.int32), np.zeros(len(ids))
    counts = np.zeros(len(ids), np.int64)
    kernels["eplb_improve"](
        *_at(ids, load, alive, domain),
        min_copies,
        max_loads,
        min_gain,
        keep_coverage,
        *_at(moves, gain, counts),
        *ids.shape,
        load.shape[1],
    )
    return [
        LayerMoves([(r, s, e) for r, s, e in moves[layer, :count].tolist()], float(gain[layer]))
        for layer, count in enumerate(counts.tolist())
    ]


def native_relabel(new_LGS: Ids, old_LGS: Ids, num_experts: int, groups: list[list[int]]) -> Ids | None:
    """eplb.assign.relabel."""
    kernels = _kernels()
    if kernels is None:
        return None
    new, old, out = _c(new_LGS, np.int32), _c(old_LGS, np.int32), new_LGS.astype(np.int32)
    group_G = np.full(new.shape[1], -1, np.int32)
    for number, ranks in enumerate(groups):
        group_G[ranks] = number
    kernels["eplb_relabel"](*_at(new, old, group_G, out), *new.shape, num_experts)
    return out


def _c(array: npt.NDArray[np.generic], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
    return np.ascontiguousarray(array, dtype=dtype)


def _at(*arrays: npt.NDArray[np.generic]) -> list[int]:
    return [array.ctypes.data for array in arrays]
