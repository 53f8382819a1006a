"""Which key of a checkpoint goes where.

Legend: E logical experts, F expert width, D hidden size, V vocabulary, H query heads, Hkv key/value heads, Dh head size.
"""

from __future__ import annotations

from torch import Tensor

from ep.experts import Experts
from layers.linear import Linear, MergedLinear
from layers.norm import RMSNorm
from models.base import WeightSource
from models.loading import read_linear, read_merged


def read_ends(source: WeightSource, embedding_VD: Tensor, norm: RMSNorm, head_VD: Tensor, tied: bool) -> None:
    """Embedding, last norm and head. A tied head has no key of its own, or one that repeats the embedding."""
    source.read("model.embed_tokens.weight", embedding_VD)
    source.read("model.norm.weight", norm.weight)
    if not tied:
        source.read("lm_head.weight", head_VD)
    elif source.has("lm_head.weight"):
        source.skip("lm_head.weight")


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


def read_experts(
    source: WeightSource, prefix: str, experts: Experts, slot_to_expert: tuple[int, ...], num_experts: int
) -> None:
    """slot_to_expert: the expert in each slot of this rank, -1 unused (its weights become zero).

    Only hosted experts are read. Accepts one key per expert and projection, or transformers' fused tensors
    `gate_up_proj` [E, 2F, D] and `down_proj` [E, D, F].
    """
    fused = source.has(f"{prefix}gate_up_proj")
    for slot, expert in enumerate(slot_to_expert):
        gate, up, down = experts.slot_views(slot)
        if expert < 0:
            for unused in (gate, up, down):
                unused.zero_()
        elif fused:
            source.read(f"{prefix}gate_up_proj", experts.gate_up_S2FD[slot], expert)
            source.read(f"{prefix}down_proj", down, expert)
        else:
            source.read(f"{prefix}{expert}.gate_proj.weight", gate)
            source.read(f"{prefix}{expert}.up_proj.weight", up)
            source.read(f"{prefix}{expert}.down_proj.weight", down)
    if not fused:
        hosted = set(slot_to_expert)
        for expert in range(num_experts):
            if expert not in hosted:
                for part in ("gate_proj", "up_proj", "down_proj"):
                    source.skip(f"{prefix}{expert}.{part}.weight")
