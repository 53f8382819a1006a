"""The native file of a placement: what `moesaic eplb plan` writes and the engine starts from.

One JSON object:
    {"format": "moesaic-placement", "version": 1, "model": "...", "epoch": 0, "layers": L, "layer_ids": [...],
     "experts": E, "ranks": G, "slots": [S of each layer], "slot_to_expert": [[[S ids] * G] * L],
     "share_u16": [[[S weights] * G] * L], "alive": [...], "failure_domains": [...], "checksum": "16 hex digits",
     "provenance": {...}}
An id of -1 is an unused slot. A weight is a part of 65535: those of an expert sum to 65535 over its slots in the layer.
Layers may differ in their number of slots; in memory (`Placement`) the shorter ones are filled up with unused slots.

Legend: L MoE layers, G ranks, S slots of a rank, E logical experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from eplb.offline.files import decode_json, read_bytes, write_bytes
from eplb.offline.trace import check_layer_ids
from eplb.placement import Placement

FORMAT, VERSION = "moesaic-placement", 1
WHOLE = 65535  # the weight of an expert's only slot


class PlacementFile(Struct, frozen=True):
    """A placement and what a file says about it. slots: the slots that a rank has in each layer (<=
    placement.slots_per_rank). provenance: facts about the trace and the plan, JSON values."""

    placement: Placement
    slots: tuple[int, ...]
    layer_ids: tuple[int, ...]
    model: str = ""
    provenance: Mapping[str, Any] = {}


class _Json(msgspec.Struct):
    format: str
    version: int
    layers: int
    experts: int
    ranks: int
    slots: list[int]
    slot_to_expert: list[list[list[int]]]
    share_u16: list[list[list[int]]]
    model: str = ""
    epoch: int = 0
    layer_ids: list[int] = []
    alive: list[bool] = []
    failure_domains: list[int] = []
    checksum: str = ""
    provenance: dict[str, Any] = {}


def describe(
    placement: Placement,
    model: str = "",
    layer_ids: Sequence[int] = (),
    slots: Sequence[int] = (),
    provenance: Mapping[str, Any] | None = None,
) -> PlacementFile:
    """A PlacementFile with the shares as the file will hold them; without `slots`, every layer has slots_per_rank.
    Slots that no layer has are left out.

    Raises ValueError when a number of slots is out of range, a slot beyond it is used, or a length does not fit.
    """
    slots = tuple(slots) or (placement.slots_per_rank,) * placement.num_layers
    layer_ids = tuple(layer_ids) or tuple(range(placement.num_layers))
    for name, values in (("slots", slots), ("layer_ids", layer_ids)):
        if len(values) != placement.num_layers:
            raise ValueError(f"{name} has {len(values)} entries for {placement.num_layers} layers")
    check_layer_ids(layer_ids)
    for layer, count in enumerate(slots):
        if not 1 <= count <= placement.slots_per_rank:
            raise ValueError(f"slots[{layer}] is {count}; it must be 1 to {placement.slots_per_rank}")
        if (placement.slot_to_expert[layer, :, count:] >= 0).any():
            raise ValueError(f"slots[{layer}] is {count}, but a slot beyond it holds an expert")
    weights = quantize(placement.slot_to_expert, placement.share, placement.num_experts)
    widest = max(slots)
    exact = _placement(placement, placement.slot_to_expert[:, :, :widest], weights[:, :, :widest])
    return PlacementFile(exact, slots, layer_ids, model, dict(provenance or {}))


def quantize(
    slot_to_expert: npt.NDArray[np.int32], share: npt.NDArray[np.float32], num_experts: int
) -> npt.NDArray[np.uint16]:
    """uint16 [L, G, S]: each share as a part of 65535, those of an expert in a layer summing to it; 0 on unused slots.

    What rounding leaves over goes to the slots that it wronged most, one part each, so that even shares stay even to
    one part and a second quantization changes nothing.
    """
    layers = len(slot_to_expert)
    ids_LP, share_LP = slot_to_expert.reshape(layers, -1), share.reshape(layers, -1).astype(np.float64)
    weights_LP = np.zeros(ids_LP.shape, dtype=np.int64)
    for ids_P, share_P, weights_P in zip(ids_LP, share_LP, weights_LP, strict=True):
        used = np.flatnonzero(ids_P >= 0)
        expert_N = ids_P[used]
        whole_E = np.bincount(expert_N, weights=share_P[used], minlength=num_experts)
        exact_N = share_P[used] / whole_E[expert_N] * WHOLE
        weight_N = np.rint(exact_N).astype(np.int64)
        rest_E = WHOLE - np.bincount(expert_N, weights=weight_N, minlength=num_experts).astype(np.int64)
        sign_N = np.sign(rest_E)[expert_N]
        # The slots of an expert side by side, the one that lost most (or, when too much was given, won most) first.
        order = np.lexsort(((weight_N - exact_N) * sign_N, expert_N))
        first_E = np.searchsorted(expert_N[order], np.arange(num_experts))
        place_N = np.arange(len(order)) - first_E[expert_N[order]]
        chosen = order[place_N < np.abs(rest_E)[expert_N[order]]]
        weight_N[chosen] += sign_N[chosen]
        weights_P[used] = weight_N
    return weights_LP.reshape(share.shape).astype(np.uint16)


def _placement(like: Placement, ids: npt.NDArray[np.int32], weights: npt.NDArray[np.uint16]) -> Placement:
    share = (weights / np.float64(WHOLE)).astype(np.float32)
    return replace(like, slot_to_expert=ids, share=share)


def encode_placement(file: PlacementFile) -> bytes:
    """The bytes of the file, one layer of ids and of weights per line."""
    placement = file.placement
    weights = quantize(placement.slot_to_expert, placement.share, placement.num_experts)
    values: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "model": file.model,
        "epoch": placement.epoch,
        "layers": placement.num_layers,
        "layer_ids": list(file.layer_ids),
        "experts": placement.num_experts,
        "ranks": placement.num_ranks,
        "slots": list(file.slots),
        "alive": list(placement.alive),
        "failure_domains": list(placement.failure_domains),
        "checksum": f"{placement.checksum():016x}",
        "provenance": dict(file.provenance),
    }
    lines = [f'"{name}": {msgspec.json.encode(value).decode()}' for name, value in values.items()]
    for name, array in (("slot_to_expert", placement.slot_to_expert), ("share_u16", weights)):
        rows = [layer[:, :count].tolist() for layer, count in zip(array, file.slots, strict=True)]
        text = ",\n".join(msgspec.json.encode(row).decode() for row in rows)
        lines.append(f'"{name}": [\n{text}\n]')
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def write_placement(path: str | Path, file: PlacementFile) -> None:
    """The file appears whole or not at all. ValueError when it cannot be written."""
    write_bytes(Path(path), encode_placement(file))


def read_placement(path: str | Path) -> PlacementFile:
    """Raises ValueError, one line that names the file and the field, when it is no valid placement or its checksum is
    not that of its contents."""
    return decode_placement(read_bytes(Path(path)), path)


def decode_placement(data: bytes, where: object = "placement") -> PlacementFile:
    """read_placement without a file. `where` begins the message of an error."""
    parsed: _Json = decode_json(data, _Json, where)
    try:
        return _checked(parsed)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _checked(parsed: _Json) -> PlacementFile:
    if parsed.format != FORMAT or parsed.version != VERSION:
        raise ValueError(
            f'format is "{parsed.format}" version {parsed.version}; this reads "{FORMAT}" version {VERSION}'
        )
    _check_lengths(parsed)
    widest = max(parsed.slots)
    ids = np.full((parsed.layers, parsed.ranks, widest), -1, dtype=np.int64)
    weights = np.zeros(ids.shape, dtype=np.int64)
    for array, rows in ((ids, parsed.slot_to_expert), (weights, parsed.share_u16)):
        for layer, count in enumerate(parsed.slots):
            array[layer, :, :count] = rows[layer]
    if weights.min() < 0 or weights.max() > WHOLE:
        raise ValueError(f"share_u16 holds {weights.min()} to {weights.max()}; a weight is 0 to {WHOLE}")
    placement = Placement(
        parsed.epoch,
        parsed.experts,
        ids.clip(-2, 1 << 30).astype(np.int32),
        (weights / WHOLE).astype(np.float32),
        tuple(parsed.alive) or (True,) * parsed.ranks,
        tuple(parsed.failure_domains),
    )
    found = f"{placement.checksum():016x}"
    if parsed.checksum and parsed.checksum != found:
        raise ValueError(f"checksum is {parsed.checksum}, but the contents have {found}; the file was changed")
    layer_ids = tuple(parsed.layer_ids) or tuple(range(parsed.layers))
    check_layer_ids(layer_ids)
    return PlacementFile(placement, tuple(parsed.slots), layer_ids, parsed.model, parsed.provenance)


def _check_lengths(parsed: _Json) -> None:
    if parsed.layers < 1 or parsed.ranks < 1:
        raise ValueError(f"layers is {parsed.layers} and ranks {parsed.ranks}; they must be 1 or more")
    if len(parsed.slots) != parsed.layers:
        raise ValueError(f"slots has {len(parsed.slots)} entries for {parsed.layers} layers")
    if parsed.layer_ids and len(parsed.layer_ids) != parsed.layers:
        raise ValueError(f"layer_ids has {len(parsed.layer_ids)} entries for {parsed.layers} layers")
    if min(parsed.slots) < 1:
        raise ValueError(f"slots holds {min(parsed.slots)}; a rank has 1 slot or more")
    for name, rows in (("slot_to_expert", parsed.slot_to_expert), ("share_u16", parsed.share_u16)):
        if len(rows) != parsed.layers:
            raise ValueError(f"{name} has {len(rows)} layers; layers says {parsed.layers}")
        for layer, ranks in enumerate(rows):
            if len(ranks) != parsed.ranks:
                raise ValueError(f"{name}[{layer}] has {len(ranks)} ranks; ranks says {parsed.ranks}")
            for rank, row in enumerate(ranks):
                if len(row) != parsed.slots[layer]:
                    raise ValueError(
                        f"{name}[{layer}][{rank}] has {len(row)} entries; slots[{layer}] is {parsed.slots[layer]}"
                    )
