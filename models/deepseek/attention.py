"""The attention layer of DeepSeek: projections around multi-head latent attention.

Legend: T tokens, D hidden size, H heads, A rank of the queries, R rope planes; N, P, C, X, V widths (mla/protocol.py).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dbo.steps import Steps
from layers.linear import Linear, MergedLinear, parameter
from layers.mlp import sigmoid_gate
from layers.norm import RMSNorm
from mla import latent_kv
from mla.protocol import MlaShape
from mla.sparse import chooses
from models.decoder_layer import LayerContext
from models.deepseek.config import LATENT_NORM_EPS, DeepseekConfig
from models.deepseek.indexer import Indexer
from models.graph_breaks import EAGER


class Attention(nn.Module):
    """The first projections of queries (q_a_proj; q_proj if q_lora_rank is 0) and of the latent are one product.

    w_uk [H, N, C] and w_uv [H, V, C] are the two halves of kv_b_proj. Rotated dimensions are in half-split order,
    whatever the checkpoint's (models/deepseek/weights.py reorders rows): pairs that lie far apart rotate faster. topk:
    of sparse attention, 0 where it is dense; indexer: of the layers that choose. gate: of each head's output.
    """

    q_a_norm: RMSNorm | None
    q_b: Linear | None
    indexer: Indexer | None
    gate: Linear | None

    def __init__(self, config: DeepseekConfig, layer: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.topk, self.indexer = 0, None
        if config.index is not None:
            self.topk = config.index.topk
            if config.has_indexer(layer):
                self.indexer = Indexer(config.index, config.hidden_size, config.q_lora_rank, dtype, device)
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
        self.gate = Linear(config.hidden_size, shape.num_heads, False, dtype, device) if config.head_gates else None
        self.out = Linear(out_size, config.hidden_size, config.attention_bias, dtype, device)

    def steps(self, x_TD: Tensor, context: LayerContext, cache: tuple[Tensor, ...]) -> Steps[Tensor]:
        """[T, D] -> [T, D]. Writes the step's latents to the cache, then attends over it."""
        yield from ()  # nothing of it is ever in flight
        cache_RX = cache[0]
        shape, heads = self.shape, self.shape.num_heads
        down = self.down(x_TD)
        q, latent_TX = down[:, : self.first_size], down[:, self.first_size :]
        q_latent_TA = q
        if self.q_a_norm is not None and self.q_b is not None:
            q_latent_TA = self.q_a_norm(q)
            q = self.q_b(q_latent_TA)
        q_THK = q.view(-1, heads, shape.key_dim)
        q_pe_THP = latent_kv.place(q_THK, latent_TX, self.kv_a_norm, context.rope, cache_RX, context.step.slots_T)
        attend, q_nope_THN = context.operations[0], q_THK[..., : shape.qk_nope_head_dim]
        if self.topk:
            index_q_THI, weight_TH = self._index(q_latent_TA, x_TD, context, cache[1:])
            index_cache = cache[1] if self.indexer is not None else None
            operands = q_nope_THN, q_pe_THP, index_q_THI, weight_TH, cache_RX, index_cache
            attended_THV = attend(*operands, self.w_uk, self.w_uv)
        else:
            attended_THV = attend(q_nope_THN, q_pe_THP, cache_RX, self.w_uk, self.w_uv)
        if self.gate is not None:
            rows = attended_THV.reshape(-1, shape.v_head_dim)
            attended_THV = sigmoid_gate(rows, self.gate(x_TD).view(-1, 1))
        out_TD: Tensor = self.out(attended_THV.reshape(-1, heads * shape.v_head_dim))
        return out_TD

    def _index(
        self, q_latent_TA: Tensor, x_TD: Tensor, context: LayerContext, index_cache: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        """Writes the step's index keys; queries of the index and weights of its heads, of no heads where there is
        nothing to choose: there is no indexer, or every key is attended to."""
        if self.indexer is not None:
            wanted = context.breaks is not EAGER or chooses(context.step, self.topk, captured=False)
            found = self.indexer(x_TD, q_latent_TA if wanted else None, context, index_cache[0])
            if found is not None:
                return found  # type: ignore[no-any-return]
        return x_TD.new_empty(x_TD.shape[0], 0, 1), x_TD.new_empty(x_TD.shape[0], 0)
