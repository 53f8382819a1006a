# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""The gate of a feed-forward layer in Triton, with the roundings of layers/mlp.py.

Legend: T tokens, F width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_NUMBERS = 1024  # of a program


@triton.jit(do_not_specialize=["total"])
def _gate_kernel(x_ptr, out_ptr, stride, width, total, NUMBERS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    there = place < total
    gate_ptrs = x_ptr + place // width * stride + place % width
    gate = tl.load(gate_ptrs, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + width, mask=there, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    tl.store(out_ptr + place, ((gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * up).to(dtype), mask=there)


def silu_mul(gate_up: Tensor) -> Tensor:
    """As layers.mlp.silu_mul and moe_kernels.silu_mul: [..., 2F] -> [..., F]. The rows of a matrix may be apart."""
    width = gate_up.shape[-1] // 2
    gate_up_T2F = gate_up if gate_up.dim() == 2 else gate_up.contiguous().view(-1, 2 * width)
    assert gate_up_T2F.stride(1) == 1
    out = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype, device=gate_up.device)
    total = out.numel()
    if total:
        grid = (triton.cdiv(total, _NUMBERS),)
        _gate_kernel[grid](gate_up_T2F, out, gate_up_T2F.stride(0), width, total, NUMBERS=_NUMBERS)
    return out
