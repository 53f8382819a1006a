"""The attention layer of DeepSeek: projections around multi-head latent attention.

Legend: T tokens, D hidden size, H heads, A rank of the queries, R rope planes; N, P, C, X, V widths (mla/protocol.py).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dbo.steps import Steps
from layers.linear import Linear, MergedLinear, parameter
from layers.norm import RMSNorm
from mla import latent_kv
from mla.protocol import MlaShape
from models.decoder import LayerContext
from models.deepseek.config import LATENT_NORM_EPS, DeepseekConfig


class Attention(nn.Module):
    """The first projections of queries (q_a_proj; q_proj if q_lora_rank is 0) and of the latent are one product.

    w_uk [H, N, C] and w_uv [H, V, C] are the two halves of kv_b_proj. Rotated dimensions are in half-split order,
    whatever the checkpoint's (models/deepseek/weights.py reorders rows): pairs that lie far apart rotate faster.
    """

    q_a_norm: RMSNorm | None
    q_b: Linear | None

    def __init__(self, config: DeepseekConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.shape = shape = MlaShape(*config.mla_dims)
        query_size = shape.num_heads * shape.key_dim
        if config.q_lora_rank:
            first, self.first_size = "q_a_proj", config.q_lora_rank
            self.q_a_norm = RMSNorm(config.q_lora_rank, LATENT_NORM_EPS, dtype, device)
            self.q_b = Linear(config.q_lora_rank, query_size, False, dtype, device)
        else:
            first, self.first_size = "q_proj", query_size
            self.q_a_norm = self.q_b = None
        parts = {first: self.first_size, "kv_a_proj_with_mqa": shape.cache_dim}
        self.down = MergedLinear(config.hidden_size, parts, config.attention_bias, dtype, device)
        self.kv_a_norm = RMSNorm(shape.latent_dim, LATENT_NORM_EPS, dtype, device)
        self.w_uk = parameter((shape.num_heads, shape.qk_nope_head_dim, shape.latent_dim), dtype, device)
        self.w_uv = parameter((shape.num_heads, shape.v_head_dim, shape.latent_dim), dtype, device)
        out_size = shape.num_heads * shape.v_head_dim
        self.out = Linear(out_size, config.hidden_size, config.attention_bias, dtype, device)

    def steps(self, x_TD: Tensor, context: LayerContext, cache: tuple[Tensor, ...]) -> Steps[Tensor]:
        """[T, D] -> [T, D]. Writes the step's latents to the cache, then attends over it."""
        yield from ()  # nothing of it is ever in flight
        (cache_RX,) = cache
        shape, heads = self.shape, self.shape.num_heads
        down = self.down(x_TD)
        q, latent_TX = down[:, : self.first_size], down[:, self.first_size :]
        if self.q_a_norm is not None and self.q_b is not None:
            q = self.q_b(self.q_a_norm(q))
        q_THK = q.view(-1, heads, shape.key_dim)
        q_pe_THP = latent_kv.place(q_THK, latent_TX, self.kv_a_norm, context.rope, cache_RX, context.step.slots_T)
        attend = context.operations[0]
        attended_THV = attend(q_THK[..., : shape.qk_nope_head_dim], q_pe_THP, cache_RX, self.w_uk, self.w_uv)
        out_TD: Tensor = self.out(attended_THV.reshape(-1, heads * shape.v_head_dim))
        return out_TD
