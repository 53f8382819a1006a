# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Rotary position embedding in Triton, with the roundings of layers/rope.py.

Legend: T tokens, H heads, D rotated dimensions of a head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def turn(x, partner, cos, sin, dtype: tl.constexpr):
    """x rotated, in dtype; all float32 of one shape, partner: the other dimension of each plane."""
    return ((partner * sin).to(dtype).to(tl.float32) + x * cos).to(dtype)


@triton.jit
def _rope_kernel(
    x_ptr, cos_ptr, sin_ptr, out_ptr, x_stride_t, x_stride_h, num_heads,
    SIZE: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One token: out [token, H, D] is x rotated."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, COLUMNS)
    inside = column < SIZE
    mask = (head < num_heads)[:, None] & inside[None, :]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    x_ptrs = x_ptr + token * x_stride_t + head[:, None] * x_stride_h
    x = tl.load(x_ptrs + column[None, :], mask=mask, other=0.0).to(tl.float32)
    other = tl.where(column < SIZE // 2, column + SIZE // 2, column - SIZE // 2)
    partner = tl.load(x_ptrs + other[None, :], mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + token * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    place = (token * num_heads + head)[:, None] * SIZE + column[None, :]
    tl.store(out_ptr + place, turn(x, partner, cos[None, :], sin[None, :], dtype), mask=mask)


def apply_rope(x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """As layers.rope.apply_rope."""
    out_THD = torch.empty(x_THD.shape, dtype=x_THD.dtype, device=x_THD.device)
    num_tokens, num_heads, size = x_THD.shape
    assert x_THD.stride(2) == 1
    assert cos_T1D.is_contiguous() and sin_T1D.is_contiguous() and cos_T1D.shape == (num_tokens, 1, size)
    columns = triton.next_power_of_2(size)
    heads = min(triton.next_power_of_2(num_heads), max(1, 2048 // columns))
    if num_tokens and num_heads:
        _rope_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
            x_THD, cos_T1D, sin_T1D, out_THD, x_THD.stride(0), x_THD.stride(1), num_heads,
            SIZE=size, HEADS=heads, COLUMNS=columns,
        )  # fmt: skip
    return out_THD
