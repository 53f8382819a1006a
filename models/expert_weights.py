"""Reading routed experts: where a checkpoint has them, and in what form they go into slots.

Three forms: a key for each expert and projection; transformers' fused tensors `gate_up_proj` [E, 2F, D] and `down_proj`
[E, D, F]; and gpt-oss's, which has biases, whose gates and ups take turns, and whose plain tensors are transposed.

Legend: E logical experts, F expert width, D hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ep.experts import Experts, HalfMatrix, WeightFormat
from layers.stored import BLOCK, StoredForm, StoredWeight
from layers.weights import Key
from models.base import ExpertSource, WeightSource
from models.fewer_bits import as_format, expert_format, half_matrix, scaled_matrix

EXPERT_PARTS = ("gate_proj", "up_proj", "down_proj")
_FUSED = ("gate_up_proj", "down_proj")
_BIASED = (*_FUSED, "gate_up_proj_bias", "down_proj_bias")


def expert_keys(source: ExpertSource, prefix: str, expert: int) -> list[Key]:
    """Where the checkpoint has one expert."""
    if source.has(f"{prefix}gate_up_proj"):
        biased = source.has(f"{prefix}gate_up_proj_bias")
        return [(f"{prefix}{part}", expert) for part in (_BIASED if biased else _FUSED)]
    return [(f"{prefix}{expert}.{part}.weight", None) for part in EXPERT_PARTS]


def read_expert(source: ExpertSource, prefix: str, experts: Experts, slot: int, expert: int) -> None:
    """One expert into one slot, straight from where the checkpoint lies."""
    keys = expert_keys(source, prefix, expert)
    if experts.kind.biased:
        _read_biased(source, prefix, experts, slot, expert)
    else:
        _fill(experts, slot, *_borrow(source, keys, experts))
    for name, _ in keys:
        source.give_back(name)


def _fill(experts: Experts, slot: int, gate: StoredWeight, up: StoredWeight, down: StoredWeight) -> None:
    """As they are, where experts are kept so."""
    parts = (gate, up, down)
    scaled, halves = [scaled_matrix(part) for part in parts], [half_matrix(part) for part in parts]
    if scaled[0] is not None and scaled[1] is not None and scaled[2] is not None:
        experts.fill_slot_scaled(slot, scaled[0], scaled[1], scaled[2])
    elif halves[0] is not None and halves[1] is not None and (last := halves[2] or scaled[2]) is not None:
        form = experts.format
        last = as_format(last, form) if isinstance(last, HalfMatrix) else last
        experts.fill_slot_halves(slot, as_format(halves[0], form), as_format(halves[1], form), last)
    else:
        experts.fill_slot(slot, gate.widened(), up.widened(), down.widened())


def _borrow(source: ExpertSource, keys: list[Key], experts: Experts) -> list[StoredWeight]:
    """Gate, up and down."""
    width, hidden = experts.width, experts.hidden_size
    fused = len(keys) == 2
    shapes = [(2 * width, hidden), (hidden, width)] if fused else [(width, hidden), (width, hidden), (hidden, width)]
    parts = [source.borrow(name, shape, index) for (name, index), shape in zip(keys, shapes, strict=True)]
    return [*_halves(parts[0]), parts[1]] if fused else parts


def _read_biased(source: ExpertSource, prefix: str, experts: Experts, slot: int, expert: int) -> None:
    """gpt-oss: rows of gate and up take turns; the plain tensors are [E, D, 2F] and [E, F, D]."""
    width, hidden = experts.width, experts.hidden_size

    def matrix(name: str, *shape: int) -> StoredWeight:
        if source.form_of(f"{prefix}{name}") is StoredForm.PLAIN:
            return StoredWeight.plain(source.borrow(f"{prefix}{name}", shape[::-1], expert).widened().T)
        return source.borrow(f"{prefix}{name}", shape, expert)

    def bias(name: str, size: int) -> Tensor:
        return source.borrow(f"{prefix}{name}", (size,), expert).widened()

    gate_up = matrix("gate_up_proj", 2 * width, hidden)
    _fill(experts, slot, _every_other(gate_up, 0), _every_other(gate_up, 1), matrix("down_proj", hidden, width))
    gate_up_bias = bias("gate_up_proj_bias", 2 * width)
    experts.fill_biases(slot, gate_up_bias[::2], gate_up_bias[1::2], bias("down_proj_bias", hidden))


def _every_other(stored: StoredWeight, first: int) -> StoredWeight:
    """Rows `first`, `first` + 2 and so on, of plain or MXFP4 weights."""
    scale = None if stored.scale is None else stored.scale[first::2]
    return StoredWeight(stored.weight[first::2], scale, stored.form, (stored.shape[0] // 2, stored.shape[1]))


def _halves(gate_up: StoredWeight) -> tuple[StoredWeight, StoredWeight]:
    """Gate and up of the fused tensor. A block of scales may hold rows of both: then they are widened."""
    width, hidden = gate_up.shape[0] // 2, gate_up.shape[1]
    if gate_up.scale is None or gate_up.form is not StoredForm.FP8 or width % BLOCK:
        gate, up = gate_up.widened().chunk(2)
        return StoredWeight.plain(gate), StoredWeight.plain(up)
    scales = gate_up.scale.chunk(2) if gate_up.scale.shape[0] > 1 else (gate_up.scale, gate_up.scale)
    weights = zip(gate_up.weight.chunk(2), scales, strict=True)
    gate_half, up_half = (StoredWeight(weight, scale, gate_up.form, (width, hidden)) for weight, scale in weights)
    return gate_half, up_half


def keep_scaled(source: WeightSource, prefix: str, experts: Experts, num_experts: int) -> None:
    """Experts that the checkpoint has in fewer bits stay so, unless a format was chosen for them; INT4 with zero points
    is INT4 too, and BF16 is PLAIN if not all of them are in bfloat16."""
    if experts.format not in (WeightFormat.PLAIN, WeightFormat.INT4, WeightFormat.BF16):
        return
    fused = source.has(f"{prefix}gate_up_proj")
    names = [f"{prefix}{part}" for part in _FUSED] if fused else [f"{prefix}0.{part}.weight" for part in EXPERT_PARTS]
    forms = [source.form_of(name) for name in names if source.has(name)]
    kept = WeightFormat.FP8 if forms[:1] == [StoredForm.FP8] else expert_format(forms or [StoredForm.PLAIN])
    if experts.format is WeightFormat.INT4 and kept is not WeightFormat.INT4_ZERO:
        return
    if kept is not WeightFormat.PLAIN:
        experts.keep_as(kept)
    elif experts.format is WeightFormat.BF16:
        keys = {key for expert in range(num_experts) for key, _ in expert_keys(source, prefix, expert)}
        matrices = [key for key in keys if not key.endswith("_bias") and source.has(key)]
        if any(source.dtype_of(key) is not torch.bfloat16 for key in matrices):
            experts.keep_as(WeightFormat.PLAIN)


def read_experts(
    source: WeightSource, prefix: str, experts: Experts, slot_to_expert: tuple[int, ...], num_experts: int
) -> None:
    """slot_to_expert: the expert in each slot of this rank, -1 unused (its weights become zero). Only hosted experts
    are read."""
    keep_scaled(source, prefix, experts, num_experts)
    for slot, expert in enumerate(slot_to_expert):
        if expert >= 0:
            read_expert(source, prefix, experts, slot, expert)
        else:
            experts.clear_slot(slot)
    hosted = set(slot_to_expert)
    for expert in range(num_experts):
        if expert not in hosted:
            for name, _ in expert_keys(source, prefix, expert):
                source.skip(name)
