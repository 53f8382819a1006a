"""Which key of a checkpoint goes where.

Legend: H heads, A input size of the query projection; N, P, C, V widths (mla/protocol.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ep.moe import MoE
from layers.norm import RMSNorm
from models.base import WeightSource
from models.deepseek.attention import Attention
from models.deepseek.config import DeepseekConfig
from models.deepseek.index_config import IndexConfig
from models.deepseek.indexer import Indexer
from models.loading import read_linear, read_merged, read_shared
from models.routers import read_router


def load_norms(source: WeightSource, prefix: str, input_norm: RMSNorm, post_norm: RMSNorm) -> None:
    source.read(f"{prefix}input_layernorm.weight", input_norm.weight)
    source.read(f"{prefix}post_attention_layernorm.weight", post_norm.weight)


def load_attention(source: WeightSource, prefix: str, attention: Attention, config: DeepseekConfig) -> None:
    """kv_b_proj is split into its two halves; rotated dimensions are brought into half-split order."""
    prefix = f"{prefix}self_attn."
    shape, down = attention.shape, attention.down
    if attention.q_b is not None and attention.q_a_norm is not None:
        read_merged(source, prefix, down)
        source.read(f"{prefix}q_a_layernorm.weight", attention.q_a_norm.weight)
        source.read(f"{prefix}q_b_proj.weight", attention.q_b.weight)
        q_rows: Tensor = attention.q_b.weight
    else:
        # q_proj has no bias even where attention_bias is set
        for part in down.parts:
            source.read(f"{prefix}{part}.weight", down.weight_of(part))
        if down.bias is not None:
            source.read(f"{prefix}kv_a_proj_with_mqa.bias", down.bias_of("kv_a_proj_with_mqa"))
            down.bias_of("q_proj").zero_()
        q_rows = down.weight_of("q_proj")
    source.read(f"{prefix}kv_a_layernorm.weight", attention.kv_a_norm.weight)
    read_linear(source, f"{prefix}o_proj", attention.out)
    if attention.gate is not None:
        read_linear(source, f"{prefix}g_proj", attention.gate)

    kv_b = torch.empty(
        (shape.num_heads * (shape.qk_nope_head_dim + shape.v_head_dim), shape.latent_dim),
        dtype=attention.w_uk.dtype,
        device=attention.w_uk.device,
    )
    source.read(f"{prefix}kv_b_proj.weight", kv_b)
    halves = kv_b.view(shape.num_heads, -1, shape.latent_dim)
    attention.w_uk.copy_(halves[:, : shape.qk_nope_head_dim])
    attention.w_uv.copy_(halves[:, shape.qk_nope_head_dim :])

    if config.rope_interleave:
        split_pairs(q_rows.view(shape.num_heads, shape.key_dim, -1)[:, shape.qk_nope_head_dim :])
        split_pairs(down.weight_of("kv_a_proj_with_mqa")[None, shape.latent_dim :])
        if down.bias is not None:
            split_pairs(down.bias_of("kv_a_proj_with_mqa")[None, shape.latent_dim :, None])
    if attention.indexer is not None and config.index is not None:
        load_indexer(source, f"{prefix}indexer.", attention.indexer, config.index, shape.qk_rope_head_dim)


def load_indexer(source: WeightSource, prefix: str, indexer: Indexer, config: IndexConfig, rotated: int) -> None:
    """The dot product is scaled by 1 / sqrt(width) and the weights of the heads by 1 / sqrt(heads): both go into what
    makes the weights, as relu lets a positive factor through."""
    heads, dim, _ = indexer.shape
    source.read(f"{prefix}wq_b.weight", indexer.wq_b.weight)
    source.read(f"{prefix}wk.weight", indexer.wk.weight)
    source.read(f"{prefix}k_norm.weight", indexer.k_norm)
    source.read(f"{prefix}k_norm.bias", indexer.k_norm_bias)
    source.read(f"{prefix}weights_proj.weight", indexer.weights_proj)
    indexer.weights_proj.mul_((heads * dim) ** -0.5)
    if config.interleave:
        split_pairs(indexer.wq_b.weight.view(heads, dim, -1)[:, :rotated])
        for key in (indexer.wk.weight, indexer.k_norm[:, None], indexer.k_norm_bias[:, None]):
            split_pairs(key[None, :rotated])


def split_pairs(rows_HPA: Tensor) -> None:
    """Reorder rows 0 1 2 3 4 5 (pairs side by side) to 0 2 4 1 3 5 (halves), in place.

    Queries and the shared key are reordered alike, so their products stay what they were.
    """
    num_rows = rows_HPA.shape[1]
    rows_HPA.copy_(torch.cat([rows_HPA[:, 0:num_rows:2], rows_HPA[:, 1:num_rows:2]], dim=1))


def load_moe(source: WeightSource, prefix: str, moe: MoE) -> None:
    """Its router and its shared expert."""
    prefix = f"{prefix}mlp."
    read_router(source, f"{prefix}gate.", moe.router)
    read_shared(source, prefix, moe.shared)
