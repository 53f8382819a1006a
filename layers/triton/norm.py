# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Root-mean-square normalisation in Triton, with the roundings of layers/norm.py.

Legend: T tokens, D the normalised dimension.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def normalise(x, weight, size, eps, dtype: tl.constexpr):
    """x, weight float32 [D], of which the first `size` are there and the others 0; the quotient is rounded to dtype
    before the weight is applied. In dtype."""
    quotient = (x * tl.rsqrt(tl.sum(x * x, 0) / size + eps)).to(dtype).to(tl.float32)
    return (quotient * weight).to(dtype)


@triton.jit
def _norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, x_stride, residual_stride, size, weight_rows, eps, ADD: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    mask = column < size
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        # The sum is rounded as it goes to the residual stream, and normalised as it lies there.
        place = residual_ptr + row * residual_stride + column
        total = (tl.load(place, mask=mask, other=0.0).to(tl.float32) + x).to(dtype)
        tl.store(place, total, mask=mask)
        x = total.to(tl.float32)
    weight = tl.load(weight_ptr + row % weight_rows * size + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * size + column, normalise(x, weight, size, eps, dtype), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As layers.norm.rms_norm, for a weight in x's dtype whose shape is the end of x's: [D], [H, D]."""
    return _run(x, None, weight, eps)


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As layers.norm.RMSNorm.add: x is added to residual in place, and the norm of the sum returned."""
    assert residual_TD.dim() == 2 and residual_TD.stride(1) == 1 and residual_TD.dtype == x_TD.dtype
    return _run(x_TD, residual_TD, weight, eps)


def _run(x: Tensor, residual_TD: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    size = x.shape[-1]
    assert weight.shape == x.shape[x.dim() - weight.dim() :] and weight.dtype == x.dtype and weight.is_contiguous()
    rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, size).contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows.shape[0]:
        columns = triton.next_power_of_2(size)
        _norm_kernel[(rows.shape[0],)](
            rows, residual_TD, weight, out, rows.stride(0), 0 if residual_TD is None else residual_TD.stride(0), size,
            weight.numel() // size, eps, ADD=residual_TD is not None, COLUMNS=columns,
            num_warps=min(8, max(1, columns // 256)),
        )  # fmt: skip
    return out
