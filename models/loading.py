"""Reading a checkpoint's keys into the layers that every family is made of."""

from __future__ import annotations

from layers.linear import Linear, MergedLinear
from layers.mlp import GatedMLP
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
