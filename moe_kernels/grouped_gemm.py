"""The two matrices of every expert of a rank, on the rows that came for it.

Legend: R rows arrived, S slots, C rows per padded slot, D hidden size, F expert width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.layout import ExpertBatch, Layout
from moe_kernels.quant import dequantize_rows
from moe_kernels.silu_mul import silu_mul

# F.grouped_mm refuses other strides.
_STRIDE_BYTES = 16


def run_experts(batch: ExpertBatch, gate_up_S2FD: Tensor, down_SDF: Tensor) -> Tensor:
    """Every slot's expert on its rows; the result has the layout of batch.x.

    gate_up [S, 2F, D] (gate rows first), down [S, D, F], contiguous, in batch.x's dtype; of rows in FP8 the result has
    the weights' dtype. PADDED: rows past a slot's count hold anything.
    """
    if batch.scale is not None:
        x = dequantize_rows(batch.x, batch.scale, gate_up_S2FD.dtype)
        return run_experts(ExpertBatch(batch.layout, x, batch.rows_S), gate_up_S2FD, down_SDF)
    if batch.layout is Layout.PADDED:
        return torch.bmm(silu_mul(torch.bmm(batch.x, gate_up_S2FD.transpose(1, 2))), down_SDF.transpose(1, 2))
    num_rows, num_slots = batch.x.shape[0], gate_up_S2FD.shape[0]
    fits = (batch.x.shape[1] | down_SDF.shape[2]) * down_SDF.element_size() % _STRIDE_BYTES == 0
    # grouped_mm spends more on slots without rows than a loop over the others spends on Python, up to about this many.
    if num_rows == 0 or 2 * num_rows <= num_slots or not fits:
        counts: list[int] = batch.rows_S.tolist()
        return _loop_mm(silu_mul(_loop_mm(batch.x, gate_up_S2FD, counts)), down_SDF, counts)
    ends_S = batch.rows_S.cumsum(0, dtype=torch.int32)
    hidden_RF = silu_mul(F.grouped_mm(batch.x, gate_up_S2FD.transpose(1, 2), offs=ends_S))
    return F.grouped_mm(hidden_RF, down_SDF.transpose(1, 2), offs=ends_S)


def _loop_mm(x_RI: Tensor, weight_SOI: Tensor, counts: list[int]) -> Tensor:
    """counts[0] rows of x [R, I] by weight_SOI[0].T, the next counts[1] by weight_SOI[1].T, and so on: [R, O]."""
    y_RO = x_RI.new_empty(x_RI.shape[0], weight_SOI.shape[1])
    start = 0
    for slot, count in enumerate(counts):
        if count:
            torch.mm(x_RI[start : start + count], weight_SOI[slot].T, out=y_RO[start : start + count])
            start += count
    return y_RO
