# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""The activation between an expert's two matrices, in Triton.

Legend: R rows, F expert width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 1024  # of a program


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, width, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < width
    gate = tl.load(gate_up_ptr + row * 2 * width + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * width + width + column, mask=mask, other=0.0).to(tl.float32)
    # Rounded after the activation, as the reference does.
    silu = (gate * tl.sigmoid(gate)).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * width + column, (silu * up).to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul(gate_up: Tensor) -> Tensor:
    """As moe_kernels.silu_mul.silu_mul; gate_up stays as it is."""
    gate_up = gate_up.contiguous()
    width = gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        _silu_mul_kernel[(out.numel() // width, triton.cdiv(width, _COLUMNS))](gate_up, out, width, COLUMNS=_COLUMNS)
    return out
