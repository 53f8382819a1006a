# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Rows as FP8 with one scale per block of 128, in Triton: the bits of moe_kernels/quant.py.

Legend: R rows, D hidden size, F expert width, B = ceil(D / 128) blocks of a row, S slots, C rows per padded slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.quant import BLOCK, num_blocks

_ROWS = 16  # of a program
_LARGEST = tl.constexpr(448.0)


@triton.jit
def to_fp8(x):
    """float32 [M, N] -> (float8_e4m3fn [M, N], scale float32 [M]): one scale per row."""
    # A NaN makes the scale infinite: the whole block is NaN when it is multiplied back.
    magnitude = tl.where(x == x, tl.abs(x), float("inf"))
    scale = tl.div_rn(tl.max(magnitude, 1), _LARGEST)
    scale = tl.where(scale == 0.0, 1.0, scale)
    return tl.div_rn(x, scale[:, None]).to(tl.float8e4nv), scale


@triton.jit(do_not_specialize=["num_rows"])
def _quantize_kernel(x_ptr, value_ptr, scale_ptr, num_rows, size, blocks, ROWS: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1)
    column = block * SIZE + tl.arange(0, SIZE)
    mask = (row < num_rows)[:, None] & (column < size)[None, :]
    place = row[:, None] * size + column[None, :]
    value, scale = to_fp8(tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32))
    tl.store(value_ptr + place, value, mask=mask)
    tl.store(scale_ptr + row * blocks + block, scale, mask=row < num_rows)


@triton.jit(do_not_specialize=["num_rows"])
def _dequantize_kernel(value_ptr, scale_ptr, x_ptr, num_rows, size, blocks, ROWS: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1)
    column = block * SIZE + tl.arange(0, SIZE)
    here = row < num_rows
    mask = here[:, None] & (column < size)[None, :]
    place = row[:, None] * size + column[None, :]
    value = tl.load(value_ptr + place, mask=mask, other=0.0).to(tl.float32)
    x = value * tl.load(scale_ptr + row * blocks + block, mask=here, other=0.0)[:, None]
    tl.store(x_ptr + place, x.to(x_ptr.dtype.element_ty), mask=mask)


def quantize_rows(x_RD: Tensor) -> tuple[Tensor, Tensor]:
    """As moe_kernels.quant.quantize_rows; a block with a NaN has an infinite scale."""
    x_RD = x_RD.contiguous()
    num_rows, size = x_RD.shape
    blocks = num_blocks(size)
    value_RD = torch.empty(x_RD.shape, dtype=torch.float8_e4m3fn, device=x_RD.device)
    scale_RB = torch.empty(num_rows, blocks, dtype=torch.float32, device=x_RD.device)
    if num_rows:
        _quantize_kernel[(triton.cdiv(num_rows, _ROWS), blocks)](
            x_RD, value_RD, scale_RB, num_rows, size, blocks, ROWS=_ROWS, SIZE=BLOCK
        )
    return value_RD, scale_RB


def dequantize_rows(value: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """As moe_kernels.quant.dequantize_rows."""
    value, scale = value.contiguous(), scale.contiguous()
    size, blocks = value.shape[-1], scale.shape[-1]
    x = torch.empty(value.shape, dtype=dtype, device=value.device)
    num_rows = value.numel() // size if size else 0
    if num_rows:
        _dequantize_kernel[(triton.cdiv(num_rows, _ROWS), blocks)](
            value, scale, x, num_rows, size, blocks, ROWS=_ROWS, SIZE=BLOCK
        )
    return x


@triton.jit(do_not_specialize=["num_rows", "capacity"])
def _silu_mul_quantize_kernel(
    x_ptr, value_ptr, scale_ptr, rows_ptr, num_rows, capacity, size, blocks, COUNTED: tl.constexpr, ROWS: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = row < num_rows
    if COUNTED:
        here &= row % capacity < tl.load(rows_ptr + row // capacity, mask=here, other=0)
        if tl.sum(here.to(tl.int32), 0) == 0:
            return
    block = tl.program_id(1)
    column = block * SIZE + tl.arange(0, SIZE)
    mask = here[:, None] & (column < size)[None, :]
    x_ptrs = x_ptr + row[:, None] * 2 * size + column[None, :]
    gate = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptrs + size, mask=mask, other=0.0).to(tl.float32)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    silu = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    value, scale = to_fp8((silu * up).to(dtype).to(tl.float32))
    tl.store(value_ptr + row[:, None] * size + column[None, :], value, mask=mask)
    tl.store(scale_ptr + row * blocks + block, scale, mask=here)


def silu_mul_quantize(gate_up: Tensor, rows_S: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As moe_kernels.quant.silu_mul_quantize."""
    gate_up = gate_up.contiguous()
    *shape, width2 = gate_up.shape
    size, blocks = width2 // 2, num_blocks(width2 // 2)
    value = torch.empty(*shape, size, dtype=torch.float8_e4m3fn, device=gate_up.device)
    scale = torch.empty(*shape, blocks, dtype=torch.float32, device=gate_up.device)
    num_rows = gate_up.numel() // max(1, width2)
    if num_rows:
        _silu_mul_quantize_kernel[(triton.cdiv(num_rows, _ROWS), blocks)](
            gate_up, value, scale, rows_S, num_rows, shape[-1], size, blocks, COUNTED=rows_S is not None, ROWS=_ROWS,
            SIZE=BLOCK,
        )  # fmt: skip
    return value, scale
