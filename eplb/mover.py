"""A few moves that help most: the incremental way to a better placement.

Legend: L MoE layers, G ranks, S slots of a rank, E logical experts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from eplb.balance import Floats, Ids, checked_load
from eplb.coverage import domains_of, numbered
from eplb.kernels import LayerMoves, native_improve
from eplb.placement import Placement
from eplb.shares import reweight
from eplb.simple import improve_layer


def improve(
    placement: Placement,
    load_LE: npt.ArrayLike,
    *,
    max_moves: int,
    max_moves_per_layer: int = 4,
    min_gain: float = 0.003,
    bytes_per_expert: int = 1,
    budget_bytes: int | None = None,
    min_copies: int = 1,
    keep_coverage: bool = True,
    share_load_LE: npt.ArrayLike | None = None,
) -> Placement | None:
    """The placement after at most `max_moves` experts were brought to a slot, with new shares; None when nothing pays.

    Layers whose moves gain most balancedness per byte come first; a layer is left alone when what it would gain is less
    than min_gain per expert brought. budget_bytes: what any one rank may receive, None for no limit. min_copies,
    keep_coverage: no expert loses a copy that it must have, and no rank and no failure domain comes to hold alone more
    experts of a layer than the worst one did (or than one per rank above the least possible, for heavy experts may need
    a third copy). share_load_LE: loads for the new shares, where they differ from those to move for. Raises ValueError
    when a load is negative or not finite, or its shape does not fit.
    """
    load = checked_load(load_LE, placement.num_experts)
    if len(load) != placement.num_layers:
        raise ValueError(f"load has {len(load)} layers; the placement has {placement.num_layers}")
    most = min(max_moves_per_layer, max_moves)
    if most < 1:
        return None
    ids = placement.slot_to_expert.copy()
    found = _moves(ids, load, placement, most, min_gain, min_copies, keep_coverage)
    order = sorted(
        (layer for layer, m in enumerate(found) if m.loads), key=lambda at: -found[at].gain / len(found[at].loads)
    )
    left, received_G, moved = max_moves, np.zeros(placement.num_ranks, dtype=np.int64), False
    for layer in order:
        loads = found[layer].loads
        after_G = (
            received_G + np.bincount([rank for rank, _, _ in loads], minlength=placement.num_ranks) * bytes_per_expert
        )
        if len(loads) > left or (budget_bytes is not None and after_G.max() > budget_bytes):
            continue
        left, received_G, moved = left - len(loads), after_G, True
        for rank, slot, expert in loads:
            ids[layer, rank, slot] = expert
    if not moved:
        return None
    share = reweight(ids, load if share_load_LE is None else share_load_LE, placement.alive)
    return replace(placement, slot_to_expert=ids, share=share)


def _moves(
    ids: Ids, load: Floats, placement: Placement, most: int, min_gain: float, min_copies: int, keep_coverage: bool
) -> list[LayerMoves]:
    alive = np.array(placement.alive, dtype=bool)
    domains = numbered(domains_of(placement))
    settings = alive, domains, min_copies, most, min_gain, keep_coverage
    native = native_improve(ids, load, *settings)
    if native is not None:
        return native
    return [LayerMoves(*improve_layer(ids_GS, load_E, *settings)) for ids_GS, load_E in zip(ids, load, strict=True)]
