"""Which key of a checkpoint goes where.

Legend: D hidden size, G value heads that share a key head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from layers.gated_delta import GatedDelta
from layers.linear import MergedLinear
from models.base import WeightSource
from models.qwen3_next.config import Qwen3NextConfig


def read_centred(source: WeightSource, name: str, out: Tensor) -> None:
    """A norm's weight, of which the checkpoint has the difference from one."""
    difference = torch.empty_like(out, dtype=torch.float32)
    source.read(name, difference)
    out.copy_(difference + 1)


def read_delta_net(
    source: WeightSource, prefix: str, config: Qwen3NextConfig, down: MergedLinear, delta: GatedDelta
) -> None:
    """All but the output projection."""
    if config.grouped_keys:
        _read_grouped(source, prefix, config, down)
    else:
        for part in down.parts:
            source.read(f"{prefix}in_proj_{part}.weight", down.weight_of(part))
    conv = torch.empty((delta.shape.channels, 1, delta.shape.taps), dtype=torch.float32, device=delta.conv.device)
    source.read(f"{prefix}conv1d.weight", conv)
    delta.conv.copy_(conv[:, 0].T)
    source.read(f"{prefix}A_log", delta.rate)
    delta.rate.exp_()
    source.read(f"{prefix}dt_bias", delta.dt_bias)
    source.read(f"{prefix}norm.weight", delta.norm)


def _read_grouped(source: WeightSource, prefix: str, config: Qwen3NextConfig, down: MergedLinear) -> None:
    """Qwen3-Next has the rows of each key head side by side: its query, its key, and the values and gates of its G
    value heads; and their betas and decays likewise."""
    key_heads, key_dim = config.linear_key_heads, config.linear_key_dim
    group = config.linear_value_heads // key_heads
    values = group * config.linear_value_dim
    for name, parts, sizes in (
        ("in_proj_qkvz", ("q", "k", "v", "z"), [key_dim, key_dim, values, values]),
        ("in_proj_ba", ("b", "a"), [group, group]),
    ):
        rows = down.weight.new_empty((key_heads * sum(sizes), down.weight.shape[1]))
        source.read(f"{prefix}{name}.weight", rows)
        found = dict(zip(parts, torch.split(rows.view(key_heads, sum(sizes), -1), sizes, dim=1), strict=True))
        if "q" in found:
            qkv = torch.cat([found.pop(part).flatten(0, 1) for part in ("q", "k", "v")])
            down.weight_of("qkv").copy_(qkv)
        for part, values_of in found.items():
            down.weight_of(part).copy_(values_of.flatten(0, 1))
