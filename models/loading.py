"""Reading a checkpoint's keys into the layers that every family is made of.

Legend: E logical experts, F expert width, D hidden size, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor, nn

from ep.experts import Experts, ScaledMatrix, WeightFormat
from layers.linear import Linear, MergedLinear
from layers.mlp import GatedMLP, WeightedMLP
from layers.weights import BLOCK, Key, StoredWeight
from models.base import ExpertSource, WeightSource

EXPERT_PARTS = ("gate_proj", "up_proj", "down_proj")


def read_linear(source: WeightSource, name: str, linear: Linear) -> None:
    """`name`.weight, and `name`.bias if the layer has one."""
    source.read(f"{name}.weight", linear.weight)
    if linear.bias is not None:
        source.read(f"{name}.bias", linear.bias)


def read_merged(source: WeightSource, prefix: str, linear: MergedLinear) -> None:
    """Each part from its own key, `prefix`part.weight (and .bias)."""
    for part in linear.parts:
        source.read(f"{prefix}{part}.weight", linear.weight_of(part))
        if linear.bias is not None:
            source.read(f"{prefix}{part}.bias", linear.bias_of(part))


def read_mlp(source: WeightSource, prefix: str, mlp: GatedMLP) -> None:
    """`prefix`{gate,up,down}_proj."""
    read_merged(source, prefix, mlp.gate_up)
    read_linear(source, f"{prefix}down_proj", mlp.down)


def read_shared(source: WeightSource, prefix: str, shared: nn.Module | None) -> None:
    """`prefix`shared_experts, and the gate of one that has a weight."""
    if shared is None:
        return
    assert isinstance(shared, GatedMLP)
    read_mlp(source, f"{prefix}shared_experts.", shared)
    if isinstance(shared, WeightedMLP):
        source.read(f"{prefix}shared_expert_gate.weight", shared.gate)


def skip_mtp(source: WeightSource, num_layers: int, num_mtp_layers: int, served: int = 0) -> None:
    """The layers that predict further tokens come after the last one, under names of their own. The first `served` are
    read."""
    extra = tuple(f"model.layers.{num_layers + i}." for i in range(served, num_mtp_layers))
    for name in [name for name in source.names() if name.startswith(extra)]:
        source.skip(name)


def read_head(source: WeightSource, head_VD: Tensor, tied: bool) -> None:
    """A tied head has no key of its own, or one that repeats the embedding."""
    if not tied:
        source.read("lm_head.weight", head_VD)
    elif source.has("lm_head.weight"):
        source.skip("lm_head.weight")


def expert_keys(source: ExpertSource, prefix: str, expert: int) -> list[Key]:
    """Where the checkpoint has one expert: in transformers' fused tensors, or in one for each projection."""
    if source.has(f"{prefix}gate_up_proj"):
        return [(f"{prefix}gate_up_proj", expert), (f"{prefix}down_proj", expert)]
    return [(f"{prefix}{expert}.{part}.weight", None) for part in EXPERT_PARTS]


def read_expert(source: ExpertSource, prefix: str, experts: Experts, slot: int, expert: int) -> None:
    """One expert into one slot, straight from where the checkpoint lies."""
    width, hidden = experts.width, experts.hidden_size
    keys = expert_keys(source, prefix, expert)
    fused = len(keys) == 2
    shapes = [(2 * width, hidden), (hidden, width)] if fused else [(width, hidden), (width, hidden), (hidden, width)]
    parts = [source.borrow(name, shape, index) for (name, index), shape in zip(keys, shapes, strict=True)]
    if fused:
        parts = [*_halves(parts[0]), parts[1]]
    gate, up, down = parts
    if gate.scale is not None and up.scale is not None and down.scale is not None:
        experts.fill_slot_scaled(
            slot,
            ScaledMatrix(gate.weight, gate.scale),
            ScaledMatrix(up.weight, up.scale),
            ScaledMatrix(down.weight, down.scale),
        )
    else:
        experts.fill_slot(slot, gate.widened(), up.widened(), down.widened())
    for name, _ in keys:
        source.give_back(name)


def _halves(gate_up: StoredWeight) -> tuple[StoredWeight, StoredWeight]:
    """Gate and up of the fused tensor. A block of scales may hold rows of both: then they are widened."""
    width = gate_up.weight.shape[0] // 2
    if gate_up.scale is None or width % BLOCK:
        gate, up = gate_up.widened().chunk(2)
        return StoredWeight(gate, None), StoredWeight(up, None)
    (gate, up), (gate_scale, up_scale) = gate_up.weight.chunk(2), gate_up.scale.chunk(2)
    return StoredWeight(gate, gate_scale), StoredWeight(up, up_scale)


def keep_scaled(source: WeightSource, prefix: str, experts: Experts) -> None:
    """Experts that the checkpoint has in FP8 stay in FP8, unless a format was chosen for them."""
    fused = source.has(f"{prefix}gate_up_proj")
    first = f"{prefix}gate_up_proj" if fused else f"{prefix}0.gate_proj.weight"
    if source.is_scaled(first) and experts.format is WeightFormat.PLAIN:
        experts.keep_as(WeightFormat.FP8)


def read_experts(
    source: WeightSource, prefix: str, experts: Experts, slot_to_expert: tuple[int, ...], num_experts: int
) -> None:
    """slot_to_expert: the expert in each slot of this rank, -1 unused (its weights become zero).

    Only hosted experts are read. Accepts one key per expert and projection, or transformers' fused tensors
    `gate_up_proj` [E, 2F, D] and `down_proj` [E, D, F]. Experts that the checkpoint has in FP8 stay in FP8.
    """
    keep_scaled(source, prefix, experts)
    for slot, expert in enumerate(slot_to_expert):
        if expert >= 0:
            read_expert(source, prefix, experts, slot, expert)
        else:
            experts.clear_slot(slot)
    if not source.has(f"{prefix}gate_up_proj"):
        hosted = set(slot_to_expert)
        for expert in range(num_experts):
            if expert not in hosted:
                for part in EXPERT_PARTS:
                    source.skip(f"{prefix}{expert}.{part}.weight")
