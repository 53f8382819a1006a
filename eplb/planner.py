"""Full plans: which rank hosts which expert, from loads alone (docs/design.md, section 6).

Legend: L MoE layers, G ranks, S slots of a rank, E logical experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from eplb.assign import rank_groups, relabel
from eplb.balance import Floats, Ids, balancedness, checked_load, rank_load
from eplb.bounds import lower_bound
from eplb.coverage import numbered
from eplb.kernels import native_pack
from eplb.placement import Placement
from eplb.repair import even_shares
from eplb.shares import reweight
from eplb.simple import pack_layer

Method = Literal["auto", "flat"]
Coverage = Literal["load", "spread"]

# How far the load alone decides about copies (native/src/eplb_pack.cpp): the most covering way first.
_THETAS = {"spread": (1.0, 0.7, 0.4, 0.0), "load": (0.5, 0.0)}
# A way is good enough for a layer, as a part of what any placement could reach: with the loads as given, and with every
# expert 20 % up or down and new shares. Coverage is bought with no more than that.
_GOOD_NOW, _GOOD_LATER = 0.95, 0.88
_DRIFT = 0.2


class PlannedPlacement(Struct, frozen=True, eq=False):
    """A placement and how good it is for the loads it was made from.

    method: how it was made; balance: float64 [L], balancedness with its shares; lower_bound: float64 [L], the least
    load that the fullest rank of any placement in these slots can have (eplb.bounds).
    """

    placement: Placement
    method: str
    balance: Floats
    lower_bound: Floats


def plan(
    load_LE: npt.ArrayLike,
    num_ranks: int,
    slots_per_rank: int | Sequence[int],
    *,
    num_experts: int | None = None,
    alive: Sequence[bool] | None = None,
    failure_domains: Sequence[int] = (),
    epoch: int = 0,
    method: Method = "auto",
    coverage: Coverage = "spread",
    min_copies: int = 1,
    current: Placement | None = None,
) -> PlannedPlacement:
    """Place every expert on the live ranks from scratch; equal inputs give equal plans.

    load_LE: [L, E], any unit; slots_per_rank: one number, or one per layer (the placement then has the largest, the
    others are padded with unused slots). method: "auto" packs copies largest first, linking all ranks, with min-max
    shares (it stays good longest when loads drift); "flat" the same with even shares, for engines without shares.
    coverage: "load" gives spare slots where the load wants them; "spread" to as many experts with a single copy as the
    load allows: in each layer the most covering way that reaches 95 % of the balance possible, and 88 % after a drift.
    min_copies: copies of every expert, on different ranks. current: ranks are renamed so that most slots stay as they
    are. Raises ValueError when the experts do not fit, naming the smallest slots_per_rank that does, or an argument is
    wrong.
    """
    load = checked_load(load_LE, num_experts)
    if method not in ("auto", "flat") or coverage not in _THETAS:
        raise ValueError(f"method {method!r} or coverage {coverage!r} is unknown")
    live = _live_ranks(num_ranks, alive)
    slots_L = _slots(slots_per_rank, load.shape, len(live), min_copies)
    bound_L = lower_bound(load, slots_L * len(live), len(live), min_copies)
    layout = _Layout(len(live), slots_L, _domains(failure_domains, num_ranks, live), min_copies)
    packed = _flat(load, layout) if method == "flat" else _linked(load, layout, bound_L, coverage)
    ids = np.full((len(load), num_ranks, packed.shape[2]), -1, dtype=np.int32)
    ids[:, live] = packed
    mask = [rank in live for rank in range(num_ranks)]
    if current is None:
        _even_out(ids, load.shape[1], rank_groups(mask, failure_domains))
    else:
        if current.slot_to_expert.shape != ids.shape or current.num_experts != load.shape[1]:
            raise ValueError(f"current has shape {list(current.slot_to_expert.shape)}; the plan has {list(ids.shape)}")
        ids = relabel(ids, current.slot_to_expert, load.shape[1], mask, failure_domains)
    share = even_shares(ids, load.shape[1]) if method == "flat" else reweight(ids, load, mask)
    placement = Placement(epoch, load.shape[1], ids, share, tuple(mask), tuple(failure_domains))
    balance = balancedness(rank_load(ids, share, load), mask)
    return PlannedPlacement(placement, "lpt" if method == "auto" else method, balance, bound_L)


class _Layout(Struct, frozen=True):
    """The live ranks only, without gaps."""

    num_ranks: int
    slots_L: npt.NDArray[np.int64]
    domains: list[int]
    min_copies: int


def _pack(load: Floats, layout: _Layout, theta: float, linked: bool, layers: npt.NDArray[np.int64]) -> Ids:
    """The given layers of load [L, E], int32 [layers, G, largest S]."""
    widest, slots = int(layout.slots_L.max(initial=1)), layout.slots_L[layers]
    packed = native_pack(load[layers], slots, widest, layers, layout.domains, theta, layout.min_copies, linked)
    if packed is not None:
        return packed
    packed = np.full((len(layers), layout.num_ranks, widest), -1, dtype=np.int32)
    for out_GS, layer, num_slots in zip(packed, layers.tolist(), slots.tolist(), strict=True):
        first = layer % layout.num_ranks
        ids = pack_layer(load[layer], num_slots, layout.domains, theta, layout.min_copies, first)
        for rank, experts in enumerate(ids):
            out_GS[rank, : len(experts)] = experts
    return packed


def _linked(load: Floats, layout: _Layout, bound_L: Floats, coverage: Coverage) -> Ids:
    """Every layer the first way that is good enough, or the best of all."""
    packed = np.full((len(load), layout.num_ranks, int(layout.slots_L.max(initial=1))), -1, dtype=np.int32)
    best_L, open_L = np.full(len(load), -1.0), np.arange(len(load))
    possible_L = np.divide(load.sum(1) / layout.num_ranks, bound_L, out=np.ones(len(load)), where=bound_L > 0)
    for theta in _THETAS[coverage]:
        tried = _pack(load, layout, theta, True, open_L)
        now = _reachable(tried, load[open_L]) / possible_L[open_L]
        later = _reachable(tried, _drifted(load[open_L])) / possible_L[open_L]
        better = now + later > best_L[open_L]
        packed[open_L[better]] = tried[better]
        best_L[open_L[better]] = (now + later)[better]
        if coverage == "spread":
            enough = (now >= _GOOD_NOW) & (later >= _GOOD_LATER)
            packed[open_L[enough]] = tried[enough]
            open_L = open_L[~enough]
        if not len(open_L):
            break
    return packed


def _reachable(ids: Ids, load: Floats) -> Floats:
    """[L]: the balancedness that these ids have with the best shares."""
    return balancedness(rank_load(ids, reweight(ids, load), load))


def _drifted(load: Floats) -> Floats:
    """Half of the experts up, half down, by a fixed pattern without regard to rank or load."""
    up = (np.arange(load.shape[1]) * 2654435761 >> 16) & 1
    drifted: Floats = load * np.where(up, 1 + _DRIFT, 1 / (1 + _DRIFT))
    return drifted


def _flat(load: Floats, layout: _Layout) -> Ids:
    """The better of linked and plain packing with even shares, copies where the load wants them."""
    layers = np.arange(len(load))
    ways = [_pack(load, layout, 0.0, linked, layers) for linked in (False, True)]
    plain, linked = (balancedness(rank_load(ids, even_shares(ids, load.shape[1]), load)) for ids in ways)
    return np.where((linked > plain)[:, None, None], ways[1], ways[0])


def _even_out(ids: Ids, num_experts: int, groups: list[list[int]]) -> None:
    """Swap ranks of one failure domain, layer by layer, so that the loss of any one uncovers about as many experts in
    all layers together. Nothing else changes by that."""
    total_G = np.zeros(ids.shape[1], dtype=np.int64)
    for ids_GS in ids:
        copies = np.bincount(ids_GS.ravel() + 1, minlength=num_experts + 1)
        copies[0] = 0
        alone_G = (copies[ids_GS + 1] == 1).sum(1)
        for group in groups:
            to = np.array(group)[np.argsort(total_G[group], kind="stable")]
            source = np.array(group)[np.argsort(-alone_G[group], kind="stable")]
            ids_GS[to] = ids_GS[source]
            total_G[to] += alone_G[source]


def _live_ranks(num_ranks: int, alive: Sequence[bool] | None) -> list[int]:
    if num_ranks < 1:
        raise ValueError(f"num_ranks is {num_ranks}; it must be 1 or more")
    if alive is not None and len(alive) != num_ranks:
        raise ValueError(f"alive has {len(alive)} entries for {num_ranks} ranks")
    live = [rank for rank in range(num_ranks) if alive is None or alive[rank]]
    if not live:
        raise ValueError("alive has no live rank")
    return live


def _domains(failure_domains: Sequence[int], num_ranks: int, live: list[int]) -> list[int]:
    """Numbers from 0 without gaps, one per live rank."""
    if failure_domains and len(failure_domains) != num_ranks:
        raise ValueError(f"failure_domains has {len(failure_domains)} entries for {num_ranks} ranks")
    return numbered([failure_domains[rank] if failure_domains else rank for rank in live])


def _slots(
    slots_per_rank: int | Sequence[int], shape: tuple[int, ...], num_live: int, min_copies: int
) -> npt.NDArray[np.int64]:
    num_layers, num_experts = shape
    given = np.asarray(slots_per_rank, dtype=np.int64)
    if given.ndim > 1 or (given.ndim == 1 and len(given) != num_layers):
        raise ValueError(f"slots_per_rank has shape {list(given.shape)}; it must be one number or one per layer")
    slots_L = np.array(np.broadcast_to(given, (num_layers,)))
    if not 1 <= min_copies <= num_live:
        raise ValueError(
            f"min_copies is {min_copies}; with {num_live} live rank(s) it must be 1 to {num_live} (copies of an "
            "expert are on different ranks)"
        )
    needed = -(-num_experts * min_copies // num_live)
    if num_layers and slots_L.min() < needed:
        copies = f"{min_copies} copies of " if min_copies > 1 else ""
        raise ValueError(
            f"slots_per_rank is {int(slots_L.min())}; {copies}{num_experts} experts on {num_live} live rank(s) "
            f"need at least {needed} slots a rank"
        )
    return slots_L
