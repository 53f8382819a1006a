"""Reading a checkpoint's keys into the layers that every family is made of."""

from __future__ import annotations

from torch import nn

from layers.head import LMHead
from layers.linear import Linear, MergedLinear
from layers.mlp import GatedMLP, WeightedMLP
from models.base import WeightSource
from models.fewer_bits import KEPT, read_weight

_EMBEDDING = "model.embed_tokens.weight"


def read_linear(source: WeightSource, name: str, linear: Linear) -> None:
    """`name`.weight, and `name`.bias if the layer has one."""
    read_weight(source, f"{name}.weight", linear)
    if linear.bias is not None:
        source.read(f"{name}.bias", linear.bias)


def read_merged(source: WeightSource, prefix: str, linear: MergedLinear) -> None:
    """Each part from its own key, `prefix`part.weight (and .bias)."""
    for part in linear.parts:
        read_weight(source, f"{prefix}{part}.weight", linear, part)
        if linear.bias is not None:
            source.read(f"{prefix}{part}.bias", linear.bias_of(part))


def read_mlp(source: WeightSource, prefix: str, mlp: GatedMLP) -> None:
    """`prefix`{gate,up,down}_proj."""
    read_merged(source, prefix, mlp.gate_up)
    read_linear(source, f"{prefix}down_proj", mlp.down)


def read_shared(source: WeightSource, prefix: str, shared: nn.Module | None) -> None:
    """`prefix`shared_experts, and the gate of one that has a weight."""
    gate = f"{prefix}shared_expert_gate.weight"
    if shared is None:
        if source.has(gate):  # of an expert that is nothing wide
            source.skip(gate)
        return
    assert isinstance(shared, GatedMLP)
    read_mlp(source, f"{prefix}shared_experts.", shared)
    if isinstance(shared, WeightedMLP):
        source.read(gate, shared.gate)


def skip_mtp(source: WeightSource, num_layers: int, num_mtp_layers: int, served: int = 0) -> None:
    """The layers that predict further tokens come after the last one, under names of their own. The first `served` are
    read."""
    extra = tuple(f"model.layers.{num_layers + i}." for i in range(served, num_mtp_layers))
    for name in [name for name in source.names() if name.startswith(extra)]:
        source.skip(name)


def read_head(source: WeightSource, head: LMHead) -> None:
    """A tied head has no key of its own, or one that repeats the embedding."""
    if head.bias is not None:
        source.read("lm_head.bias", head.bias)
    if head.tied is None:
        read_weight(source, "lm_head.weight", head)
        return
    if source.has("lm_head.weight"):
        source.skip("lm_head.weight")
    if head.keeps_stored and head.can_pack and source.form_of(_EMBEDDING) in KEPT:
        read_weight(source, _EMBEDDING, head)
