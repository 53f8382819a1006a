"""The indexer of DeepSeek-V3.2 and GLM-5 (mla/index.py says what it is for): its projections.

Legend: T tokens, D hidden size, A rank of the queries, H index heads, I their width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from layers.linear import Linear, parameter
from mla import index
from mla.index import IndexShape
from models.decoder_layer import LayerContext
from models.deepseek.index_config import IndexConfig


class Indexer(nn.Module):
    """wq_b: queries from the normed latent of attention's queries; wk: the key, behind which is a layer norm;
    weights_proj [H, D]: float32 whatever the model's dtype. Rotated dimensions, the first of I, are in half-split order
    whatever the checkpoint's."""

    def __init__(
        self, config: IndexConfig, hidden_size: int, q_lora_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.shape = IndexShape(*config.dims)
        heads, dim, _ = self.shape
        self.wq_b = Linear(q_lora_rank, heads * dim, False, dtype, device)
        self.wk = Linear(hidden_size, dim, False, dtype, device)
        self.k_norm = parameter((dim,), dtype, device)
        self.k_norm_bias = parameter((dim,), dtype, device)
        self.weights_proj = parameter((heads, hidden_size), torch.float32, device)

    def forward(
        self, x_TD: Tensor, q_latent_TA: Tensor | None, context: LayerContext, cache: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """The step's keys to the cache; returns (rotated queries [T, H, I], weights of the heads float32 [T, H]), or
        None without q_latent, the normed latent of the queries."""
        key_TI, q_THI = self.wk(x_TD), None
        if q_latent_TA is not None:
            q_THI = self.wq_b(q_latent_TA).view(-1, self.shape.num_heads, self.shape.head_dim)
        norm = self.k_norm, self.k_norm_bias
        index.place(key_TI, norm, context.rope, cache, context.step.slots_T, q_THI)
        return None if q_THI is None else (q_THI, index.head_weights(x_TD, self.weights_proj))
