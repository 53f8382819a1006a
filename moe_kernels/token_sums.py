"""From tokens with their choice of slots to weighted sums, by whatever multiplies rows.

Legend: T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_kernels.choice import on_gpu, permute_some, sum_pairs, sum_rows, take_rows
from moe_kernels.layout import ExpertBatch, TokenBatch


def run_tokens(batch: TokenBatch, num_slots: int, run_rows: Callable[[ExpertBatch], Tensor]) -> Tensor:
    """[T, D] in batch.sum_dtype: the weighted sum of each token's experts that are here, summed in float32."""
    if on_gpu(batch.x_TD.device):  # nothing waits for the device
        rows, row_N = take_rows(batch.x_TD, batch.slot_TK, batch.first_slot, num_slots)
        out_TD = torch.empty(batch.x_TD.shape, dtype=batch.sum_dtype, device=batch.x_TD.device)
        return sum_pairs(run_rows(rows), row_N, batch.weight_TK, out_TD)
    rows, bags = permute_some(batch.x_TD, batch.slot_TK, batch.weight_TK, batch.first_slot, num_slots)
    return sum_rows(run_rows(rows), bags).to(batch.sum_dtype)
