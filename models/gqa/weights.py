"""Which key of a checkpoint goes where.

Legend: H query heads, Hkv key/value heads, Dh head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from layers.linear import Linear, MergedLinear
from models.base import WeightSource
from models.gqa.config import GqaConfig
from models.loading import read_linear, read_merged


def read_attention(
    source: WeightSource,
    prefix: str,
    config: GqaConfig,
    qkv: MergedLinear,
    out: Linear,
    qk_norm: Tensor | None,
    gate: Linear | None = None,
) -> None:
    """qk_norm [H + Hkv, Dh]: the checkpoint has one weight for all query heads and one for all key heads, or one for
    every number of either. Dimensions of queries and keys are brought into the order of layers.rope.apply_rope."""
    if gate is None:
        read_merged(source, prefix, qkv)
    else:
        _read_gated(source, prefix, config, qkv, gate)
    read_linear(source, f"{prefix}o_proj", out)
    num_heads, order = config.num_heads, head_order(config)
    if qk_norm is not None:
        for name, rows in (("q_norm", qk_norm[:num_heads]), ("k_norm", qk_norm[num_heads:])):
            if config.qk_norm == "vector":
                source.read(f"{prefix}{name}.weight", rows.view(-1))
            else:
                source.read(f"{prefix}{name}.weight", rows[0])
                rows[1:] = rows[0]
        if order is not None:
            qk_norm.copy_(qk_norm[:, order])
    if order is not None:
        for part in ("q_proj", "k_proj"):
            values = [qkv.weight_of(part)] if qkv.bias is None else [qkv.weight_of(part), qkv.bias_of(part)[:, None]]
            for value in values:
                heads = value.view(-1, config.head_dim, value.shape[1])
                heads.copy_(heads[:, order])
    # Checkpoints of old Llamas carry what follows from rope_theta.
    if source.has(f"{prefix}rotary_emb.inv_freq"):
        source.skip(f"{prefix}rotary_emb.inv_freq")


def _read_gated(source: WeightSource, prefix: str, config: GqaConfig, qkv: MergedLinear, gate: Linear) -> None:
    kinds = [("weight", qkv.weight_of, gate.weight)]
    if qkv.bias is not None and gate.bias is not None:
        kinds.append(("bias", qkv.bias_of, gate.bias))
    for kind, part_of, of_gate in kinds:
        both = of_gate.new_empty((2 * of_gate.shape[0], *of_gate.shape[1:]))
        source.read(f"{prefix}q_proj.{kind}", both)
        heads = both.view(config.num_heads, 2, config.head_dim, -1)
        part_of("q_proj").copy_(heads[:, 0].reshape(of_gate.shape))
        of_gate.copy_(heads[:, 1].reshape(of_gate.shape))
        for part in ("k_proj", "v_proj"):
            source.read(f"{prefix}{part}.{kind}", part_of(part))


def head_order(config: GqaConfig) -> Tensor | None:
    """int64 [Dh]: which of the checkpoint's dimensions of a query or key comes at each place; None: as they are.

    The planes of apply_rope are pairs (r, r + Dh / 2). Those that turn come first, whether the checkpoint has the two
    dimensions of a plane side by side or half of the rotated part apart; those that stand still fill the rest. Queries
    and keys are reordered alike, so their products stay what they were.
    """
    rotated, half = config.rope.dim, config.head_dim // 2
    if rotated == config.head_dim and not config.rope_interleave:
        return None
    turning = torch.arange(rotated).view(-1, 2).T if config.rope_interleave else torch.arange(rotated).view(2, -1)
    still = torch.arange(rotated, config.head_dim).view(2, -1)
    order = torch.cat([turning, still], dim=1).flatten()
    assert order.shape[0] == 2 * half
    return order
