"""The two matrices of every expert of a rank, on the rows that came for it.

Legend: R rows arrived, S slots, C rows per padded slot, D hidden size, F expert width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.activation import SILU, Activation
from moe_kernels.layout import ExpertBatch, Layout
from moe_kernels.quant import dequantize_rows

# F.grouped_mm refuses other strides.
_STRIDE_BYTES = 16


def run_experts(
    batch: ExpertBatch,
    gate_up_S2FD: Tensor,
    down_SDF: Tensor,
    gate_up_bias_S2F: Tensor | None = None,
    down_bias_SD: Tensor | None = None,
    activation: Activation = SILU,
) -> Tensor:
    """Every slot's expert on its rows; the result has the layout of batch.x.

    gate_up [S, 2F, D] (gate rows first), down [S, D, F], contiguous, in batch.x's dtype; of rows in FP8 the result has
    the weights' dtype. The biases, if there are, are float32. PADDED: rows past a slot's count hold anything.
    """
    if batch.scale is not None:
        x = dequantize_rows(batch.x, batch.scale, gate_up_S2FD.dtype)
        batch = ExpertBatch(batch.layout, x, batch.rows_S)
    hidden = activation(_with_bias(_products(batch, gate_up_S2FD), gate_up_bias_S2F, batch))
    after = ExpertBatch(batch.layout, hidden, batch.rows_S)
    return _with_bias(_products(after, down_SDF), down_bias_SD, batch)


def _with_bias(y: Tensor, bias_SO: Tensor | None, batch: ExpertBatch) -> Tensor:
    if bias_SO is None:
        return y
    if batch.layout is Layout.PADDED:
        return (y + bias_SO[:, None]).to(y.dtype)
    return (y + bias_SO.repeat_interleave(batch.rows_S, 0, output_size=y.shape[0])).to(y.dtype)


def _products(batch: ExpertBatch, weight_SOI: Tensor) -> Tensor:
    """Each row by the transposed matrix of its slot."""
    if batch.layout is Layout.PADDED:
        return torch.bmm(batch.x, weight_SOI.transpose(1, 2))
    num_rows, num_slots = batch.x.shape[0], weight_SOI.shape[0]
    fits = (weight_SOI.shape[1] | weight_SOI.shape[2]) * weight_SOI.element_size() % _STRIDE_BYTES == 0
    # grouped_mm spends more on slots without rows than a loop over the others spends on Python, up to about this many.
    if num_rows == 0 or 2 * num_rows <= num_slots or not fits:
        counts: list[int] = batch.rows_S.tolist()
        return _loop_mm(batch.x, weight_SOI, counts)
    return F.grouped_mm(batch.x, weight_SOI.transpose(1, 2), offs=batch.rows_S.cumsum(0, dtype=torch.int32))


def _loop_mm(x_RI: Tensor, weight_SOI: Tensor, counts: list[int]) -> Tensor:
    """counts[0] rows of x [R, I] by weight_SOI[0].T, the next counts[1] by weight_SOI[1].T, and so on: [R, O]."""
    y_RO = x_RI.new_empty(x_RI.shape[0], weight_SOI.shape[1])
    start = 0
    for slot, count in enumerate(counts):
        if count:
            torch.mm(x_RI[start : start + count], weight_SOI[slot].T, out=y_RO[start : start + count])
            start += count
    return y_RO
