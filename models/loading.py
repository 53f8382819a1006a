"""Reading a checkpoint's keys into the layers that every family is made of.

Legend: E logical experts, F expert width, D hidden size, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from ep.experts import Experts
from layers.linear import Linear, MergedLinear
from layers.mlp import GatedMLP
from layers.norm import RMSNorm
from models.base import WeightSource


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


def read_ends(source: WeightSource, embedding_VD: Tensor, norm: RMSNorm, head_VD: Tensor, tied: bool) -> None:
    """Embedding, last norm and head. A tied head has no key of its own, or one that repeats the embedding."""
    source.read("model.embed_tokens.weight", embedding_VD)
    source.read("model.norm.weight", norm.weight)
    if not tied:
        source.read("lm_head.weight", head_VD)
    elif source.has("lm_head.weight"):
        source.skip("lm_head.weight")


def read_expert(source: WeightSource, prefix: str, experts: Experts, slot: int, expert: int) -> None:
    """One expert into one slot."""
    gate, up, down = experts.slot_views(slot)
    if source.has(f"{prefix}gate_up_proj"):
        source.read(f"{prefix}gate_up_proj", experts.gate_up_S2FD[slot], expert)
        source.read(f"{prefix}down_proj", down, expert)
    else:
        source.read(f"{prefix}{expert}.gate_proj.weight", gate)
        source.read(f"{prefix}{expert}.up_proj.weight", up)
        source.read(f"{prefix}{expert}.down_proj.weight", down)


def read_experts(
    source: WeightSource, prefix: str, experts: Experts, slot_to_expert: tuple[int, ...], num_experts: int
) -> None:
    """slot_to_expert: the expert in each slot of this rank, -1 unused (its weights become zero).

    Only hosted experts are read. Accepts one key per expert and projection, or transformers' fused tensors
    `gate_up_proj` [E, 2F, D] and `down_proj` [E, D, F].
    """
    for slot, expert in enumerate(slot_to_expert):
        if expert >= 0:
            read_expert(source, prefix, experts, slot, expert)
        else:
            for unused in experts.slot_views(slot):
                unused.zero_()
    if not source.has(f"{prefix}gate_up_proj"):
        hosted = set(slot_to_expert)
        for expert in range(num_experts):
            if expert not in hosted:
                for part in ("gate_proj", "up_proj", "down_proj"):
                    source.skip(f"{prefix}{expert}.{part}.weight")
