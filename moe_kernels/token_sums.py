"""From tokens with their choice of slots to weighted sums, by whatever multiplies rows.

Legend: T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from layers.choice import on_gpu
from moe_kernels.choice import permute_some, sum_pairs, sum_rows, take_rows, unpermute
from moe_kernels.layout import ExpertBatch, TokenBatch
from moe_kernels.permute import Bags
from native import rows


def add_rows(y_TD: Tensor, x_TD: Tensor) -> Tensor:
    """y += x, in place; y."""
    if rows.can_run(y_TD) and y_TD.is_contiguous() and x_TD.is_contiguous():
        return rows.add(y_TD, x_TD)
    return y_TD.add_(x_TD)


def copy_rows(y_TD: Tensor, x_TD: Tensor) -> Tensor:
    """y = x, in place; y."""
    if rows.can_run(y_TD) and y_TD.is_contiguous() and x_TD.is_contiguous() and x_TD.dtype is y_TD.dtype:
        return rows.copy(y_TD, x_TD)
    return y_TD.copy_(x_TD)


def run_tokens(batch: TokenBatch, num_slots: int, run_rows: Callable[[ExpertBatch], Tensor]) -> Tensor:
    """[T, D] in batch.sum_dtype: the weighted sum of each token's experts that are here. Or their rows
    (batch.rows_PD)."""
    if on_gpu(batch.x_TD.device):  # nothing waits for the device
        taken, row_N = take_rows(batch.x_TD, batch.slot_TK, batch.first_slot, num_slots)
        if batch.rows_PD is not None:
            return run_rows(taken).index_select(0, row_N[row_N >= 0])
        out_TD = torch.empty(batch.x_TD.shape, dtype=batch.sum_dtype, device=batch.x_TD.device)
        return sum_pairs(run_rows(taken), row_N, batch.weight_TK, out_TD)
    permuted, bags = permute_some(batch.x_TD, batch.slot_TK, batch.weight_TK, batch.first_slot, num_slots)
    if batch.rows_PD is not None:
        return run_rows(permuted).index_select(0, bags.row_P)
    return sum_rows(run_rows(permuted), bags).to(batch.sum_dtype)


def sum_choices(
    parts: Sequence[Tensor], slot_TK: Tensor, weight_TK: Tensor, slots_per_part: int, out_TD: Tensor
) -> Tensor:
    """What becomes of the rows of all ranks: out = for each token the sum of weight * row over its choices, in their
    order and in float32, then rounded.

    parts: of each rank the rows of its slots, [P, D] in out's dtype, in the order of tokens and choices
    (TokenBatch.rows_PD); slot int64 [T, K], of all ranks; weight float32 [T, K]. Nothing in it depends on which rank
    has computed a row, so the bits do not either: `run_tokens` of one rank that has all experts gives the same.
    """
    num_tokens, top_k = slot_TK.shape
    slot_TK, weight_TK = slot_TK.contiguous(), weight_TK.contiguous()
    if rows.can_run(out_TD) and out_TD.is_contiguous():
        return rows.weigh(parts, slot_TK, weight_TK, slots_per_part, out_TD)
    pair_R = slot_TK.div(slots_per_part, rounding_mode="floor").flatten().argsort(stable=True)
    index_P = torch.arange(num_tokens * top_k, device=slot_TK.device)
    row_P = torch.empty_like(index_P).scatter_(0, pair_R, index_P)
    return unpermute(torch.cat(list(parts)), Bags(row_P, weight_TK.flatten(), index_P[::top_k]), out_TD)
