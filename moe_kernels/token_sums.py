"""From tokens with their choice of slots to weighted sums, by whatever multiplies rows.

Legend: T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_kernels.choice import on_gpu, permute_some, sum_pairs, sum_rows, take_rows
from moe_kernels.layout import ExpertBatch, TokenBatch
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
    """[T, D] in batch.sum_dtype: the weighted sum of each token's experts that are here, summed in float32."""
    if on_gpu(batch.x_TD.device):  # nothing waits for the device
        taken, row_N = take_rows(batch.x_TD, batch.slot_TK, batch.first_slot, num_slots)
        out_TD = torch.empty(batch.x_TD.shape, dtype=batch.sum_dtype, device=batch.x_TD.device)
        return sum_pairs(run_rows(taken), row_N, batch.weight_TK, out_TD)
    permuted, bags = permute_some(batch.x_TD, batch.slot_TK, batch.weight_TK, batch.first_slot, num_slots)
    return sum_rows(run_rows(permuted), bags).to(batch.sum_dtype)
