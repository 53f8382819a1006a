"""Which key of a checkpoint goes where.

Legend: H query heads, Hkv key/value heads, Dh head size.
"""

from __future__ import annotations

from torch import Tensor

from layers.linear import Linear, MergedLinear
from models.base import WeightSource
from models.loading import read_linear, read_merged


def read_attention(
    source: WeightSource, prefix: str, qkv: MergedLinear, out: Linear, qk_norm: Tensor | None, num_heads: int
) -> None:
    """qk_norm [H + Hkv, Dh]: the checkpoint has one weight for all query heads and one for all key heads."""
    read_merged(source, prefix, qkv)
    read_linear(source, f"{prefix}o_proj", out)
    if qk_norm is not None:
        for name, rows in (("q_norm", qk_norm[:num_heads]), ("k_norm", qk_norm[num_heads:])):
            source.read(f"{prefix}{name}.weight", rows[0])
            rows[1:] = rows[0]
    # Checkpoints of old Llamas carry what follows from rope_theta.
    if source.has(f"{prefix}rotary_emb.inv_freq"):
        source.skip(f"{prefix}rotary_emb.inv_freq")
