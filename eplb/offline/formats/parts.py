"""What the readers and writers of peers' files share.

Legend: T records, L layers, G ranks, S slots of a rank, P slots of a layer on all ranks together, E logical experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import structs

from eplb.offline.formats.source import Hints
from eplb.offline.placement_file import PlacementFile, describe
from eplb.offline.trace import Trace, TraceMeta, make_trace
from eplb.placement import Placement
from eplb.repair import even_shares

_EVEN = 1e-3  # shares that differ by no more than this part of an expert's tokens count as even


def numbers(value: Any, what: str, where: Path) -> npt.NDArray[Any]:
    """Nested lists or an array as an array of numbers. ValueError when rows differ in length or something is no
    number."""
    try:
        array = np.asarray(value)
    except ValueError:
        raise ValueError(f"{where}: the rows of {what} differ in length") from None
    if array.dtype.kind not in "iufb":
        raise ValueError(f"{where}: {what} holds something that is no number")
    return array


def trace_from(
    load: npt.NDArray[Any],
    where: Path,
    hints: Hints,
    source: str,
    layer_ids: Sequence[int] = (),
    drop_idle_layers: bool = False,
) -> Trace:
    """A Trace of load [T, L, E] or [L, E].

    layer_ids: the model's layer of each row; without it, the row. drop_idle_layers: leave out rows without any token,
    which is how some peers count dense layers. tokens is worked out where top_k is known.
    """
    if load.ndim == 2:
        load = load[None]
    if load.ndim != 3 or 0 in load.shape:
        raise ValueError(f"{where}: the loads have shape {list(load.shape)}; they must be [records, layers, experts]")
    ids = np.array(layer_ids or range(load.shape[1]))
    if len(ids) != load.shape[1]:
        raise ValueError(f"{where}: {len(ids)} layer numbers for {load.shape[1]} rows")
    keep = _kept(ids, hints, where)
    if drop_idle_layers and not hints.layers:
        keep &= (load != 0).any(axis=(0, 2))
    if not keep.any():
        raise ValueError(f"{where}: no layer received any token")
    if not keep.all():
        load, ids = load[:, keep], ids[keep]
    meta = TraceMeta(hints.model, hints.ranks, hints.top_k, f"{source} {where.name}", tuple(int(i) for i in ids))
    trace = make_trace(load, meta, steps=[hints.steps or 1] * len(load), where=str(where))
    if not hints.top_k:
        return trace
    # Every layer routes every token: the fullest layer has lost none.
    tokens = np.rint(trace.load.sum(axis=2, dtype=np.float64).max(axis=1) / hints.top_k).astype(np.int64)
    return Trace(trace.load, trace.step, trace.steps, tokens, meta)


def select_layers(trace: Trace, hints: Hints, where: Path) -> Trace:
    """The trace with what the hints say in place of what it says itself."""
    keep = _kept(np.array(trace.layer_ids), hints, where)
    meta = structs.replace(
        trace.meta,
        model=hints.model or trace.meta.model,
        ranks=hints.ranks or trace.meta.ranks,
        top_k=hints.top_k or trace.meta.top_k,
        layer_ids=tuple(np.array(trace.layer_ids)[keep].tolist()),
    )
    load = trace.load if keep.all() else trace.load[:, keep]
    return Trace(load, trace.step, trace.steps, trace.tokens, meta)


def placement_from(
    ids: npt.NDArray[Any], where: Path, hints: Hints, source: str, layer_ids: Sequence[int] = ()
) -> PlacementFile:
    """A placement with even shares of slot_to_expert [L, G, S] or [L, P] (-1: unused), every slot of the file kept."""
    if ids.dtype.kind not in "iu" and not np.array_equal(ids, np.rint(ids)):
        raise ValueError(f"{where}: a map of slots holds whole numbers")
    if ids.ndim == 2:
        ranks = hints.need_ranks(ids.shape[1], where)
        ids = ids.reshape(len(ids), ranks, -1)
    if ids.ndim != 3 or 0 in ids.shape:
        raise ValueError(f"{where}: the map has shape {list(ids.shape)}; it must be [layers, slots]")
    if hints.ranks and ids.shape[1] != hints.ranks:
        raise ValueError(f"{where} is made for {ids.shape[1]} ranks, not {hints.ranks}")
    numbers_L = np.array(layer_ids or range(len(ids)))
    keep = _kept(numbers_L, hints, where)
    ids, numbers_L = ids[keep], numbers_L[keep]
    if ids.min() < -1 or ids.max() < 0 or ids.max() > 1 << 16:
        raise ValueError(f"{where}: the map holds ids from {ids.min()} to {ids.max()}; they must be -1 or more")
    num_experts = int(ids.max()) + 1
    ids = ids.astype(np.int32)
    try:
        placement = Placement(0, num_experts, ids, even_shares(ids, num_experts), (True,) * ids.shape[1])
        layers = tuple(int(i) for i in numbers_L)
        return describe(placement, hints.model, layers, provenance={"source": f"{source} {where.name}"})
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _kept(ids: npt.NDArray[Any], hints: Hints, where: Path) -> npt.NDArray[np.bool_]:
    missing = sorted(set(hints.layers) - {int(i) for i in ids})
    if missing:
        raise ValueError(f"{where} has no layer {missing[0]}; its layers are {ids.min()} to {ids.max()}")
    return np.isin(ids, hints.layers) if hints.layers else np.ones(len(ids), dtype=bool)


def flat_map(file: PlacementFile, peer: str, unused_ok: bool = False) -> npt.NDArray[np.int32]:
    """slot_to_expert [L, G, S], for a peer that splits tokens evenly.

    Raises ValueError saying what the peer's format cannot carry: shares that are not even, and (unless unused_ok)
    unused slots, layers with different numbers of slots, and dead ranks.
    """
    placement = file.placement
    even = even_shares(np.array(placement.slot_to_expert), placement.num_experts)
    uneven = np.abs(placement.share - even) > _EVEN
    if all(placement.alive) and uneven.any():
        layer, rank, slot = (int(i) for i in np.argwhere(uneven)[0])
        raise ValueError(
            f"{peer} splits an expert's tokens evenly over its copies, and this placement does not: in layer "
            f"{file.layer_ids[layer]} rank {rank} takes {placement.share[layer, rank, slot]:.3f} of expert "
            f"{placement.slot_to_expert[layer, rank, slot]}; make a plan for even shares (`moesaic eplb plan --flat`)"
        )
    if unused_ok:
        return placement.slot_to_expert
    if not all(placement.alive):
        raise ValueError(f"{peer} has no way to say that rank {placement.alive.index(False)} is not alive")
    if len(set(file.slots)) > 1:
        raise ValueError(
            f"{peer} gives every layer the same number of slots; here layers have {min(file.slots)} to "
            f"{max(file.slots)} per rank"
        )
    ids = placement.slot_to_expert[:, :, : file.slots[0]]
    if (ids < 0).any():
        layer, rank, slot = (int(i) for i in np.argwhere(ids < 0)[0])
        raise ValueError(
            f"{peer} has no unused slots; slot {slot} of rank {rank} in layer {file.layer_ids[layer]} holds no expert"
        )
    return ids


def all_layers(rows: npt.NDArray[Any], layer_ids: Sequence[int], idle_row: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """rows [..., L, X] spread over layers 0 to max(layer_ids), `idle_row` [X] where the model's layer has no
    experts."""
    spread = np.empty((*rows.shape[:-2], max(layer_ids) + 1, rows.shape[-1]), dtype=rows.dtype)
    spread[:] = idle_row
    spread[..., list(layer_ids), :] = rows
    return spread
