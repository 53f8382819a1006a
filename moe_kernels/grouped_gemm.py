"""The two matrices of every expert of a rank, on the rows that came for it.

Legend: R rows arrived, S slots, C rows per padded slot, D hidden size, F expert width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.layout import ExpertBatch, Layout
from moe_kernels.silu_mul import silu_mul

_STRIDE_BYTES = 16


def run_experts(batch: ExpertBatch, gate_up_S2FD: Tensor, down_SDF: Tensor) -> Tensor:
    """Every slot's expert on its rows; the result has the layout of batch.x.

    gate_up [S, 2F, D] (gate rows first), down [S, D, F], in batch.x's dtype, contiguous.
    PADDED: rows past a slot's count hold anything.
    """
    if batch.layout is Layout.PADDED:
        return torch.bmm(silu_mul(torch.bmm(batch.x, gate_up_S2FD.transpose(1, 2))), down_SDF.transpose(1, 2))
    if batch.x.shape[0] == 0:
        return torch.empty_like(batch.x)
    ends_S = batch.rows_S.cumsum(0, dtype=torch.int32)
    hidden_RF = silu_mul(_grouped_mm(batch.x, gate_up_S2FD, ends_S))
    return _grouped_mm(hidden_RF.contiguous(), down_SDF, ends_S)


def _grouped_mm(x_RI: Tensor, weight_SOI: Tensor, ends_S: Tensor) -> Tensor:
    """Rows up to ends_S[s] of x [R, I] by weight_SOI[s].T -> [R, O]."""
    if weight_SOI.shape[2] * weight_SOI.element_size() % _STRIDE_BYTES == 0:
        return F.grouped_mm(x_RI, weight_SOI.transpose(1, 2), offs=ends_S)
    y_RO = x_RI.new_empty(x_RI.shape[0], weight_SOI.shape[1])
    start = 0
    for slot, end in enumerate(ends_S.tolist()):
        if end > start:
            torch.mm(x_RI[start:end], weight_SOI[slot].T, out=y_RO[start:end])
        start = end
    return y_RO
