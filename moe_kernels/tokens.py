"""Tokens to the rows of a rank's experts and their weighted sums back, without asking the device how many rows there
are: there is room for every pair, and what the counts do not name holds anything. So a step can be captured in a graph.

Legend: T tokens, D hidden size, K experts per token, S slots, N = T * K pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels.layout import ExpertBatch, Layout


def take_rows(x_TD: Tensor, slot_TK: Tensor, first_slot: int, num_slots: int) -> tuple[ExpertBatch, Tensor]:
    """(RAGGED rows [N, D] of which the counts say how many there are, row of each pair int32 [N] or -1): as
    moe_kernels.permute.permute_some, for slots first_slot to first_slot + num_slots - 1."""
    num_pairs, top_k = slot_TK.numel(), slot_TK.shape[1]
    key_N = (slot_TK - first_slot).flatten()
    here_N = (key_N >= 0) & (key_N < num_slots)
    key_N = torch.where(here_N, key_N, num_slots)
    pair_N = key_N.argsort(stable=True)
    row_N = torch.empty_like(pair_N).scatter_(0, pair_N, torch.arange(num_pairs, device=pair_N.device))
    rows_S = torch.bincount(key_N, minlength=num_slots + 1)[:num_slots].to(torch.int32)
    x_ND = x_TD.index_select(0, pair_N.div(top_k, rounding_mode="floor"))
    return ExpertBatch(Layout.RAGGED, x_ND, rows_S), torch.where(here_N, row_N, -1).to(torch.int32)


def sum_pairs(y_ND: Tensor, row_N: Tensor, weight_TK: Tensor, out_TD: Tensor) -> Tensor:
    """out = for each token the sum over its pairs with a row of weight * y[row], in float32, then in out's dtype."""
    num_tokens, top_k = weight_TK.shape
    y_TKD = y_ND.index_select(0, row_N.clamp_min(0)).view(num_tokens, top_k, y_ND.shape[1]).float()
    here_TK1 = (row_N >= 0).view(num_tokens, top_k, 1)
    return out_TD.copy_(torch.where(here_TK1, y_TKD * weight_TK[..., None], 0.0).sum(1))
