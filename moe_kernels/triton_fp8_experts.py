# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Experts with weights in FP8 in Triton: e4m3 with a scale for 128 x 128 weights, rows with a scale for 128 inputs
(DeepSeek-V3, arXiv:2412.19437, 3.3). moe_kernels.reference.experts_fp8 says what comes out.

The first product rounds silu(gate) * up to FP8 in its epilogue: its tile is as wide as a block with one scale.

Legend: R rows arrived, S slots, C rows per padded slot, D hidden size, F expert width, B = ceil(D / 128), N = ceil(F / 128).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.layout import ExpertBatch
from moe_kernels.quant import BLOCK, num_blocks
from moe_kernels.triton_configs import DOWN_FP8, GATE_UP_FP8, GemmConfig
from moe_kernels.triton_grouped_gemm import Tiles, load_step, locate
from moe_kernels.triton_quant import quantize_rows, to_fp8


@triton.jit(do_not_specialize=["capacity", "num_tiles"])
def _gate_up_fp8_kernel(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, out_ptr, out_scale_ptr, rows_ptr, num_slots, capacity, num_tiles,
    num_inputs, width, EVEN: tl.constexpr, PADDED: tl.constexpr, SLOTS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """(out [R, F], its scales [R, N]) = FP8 of silu(x gate^T) * (x up^T)."""
    busy, slot, row, here, n, column, wide = locate(
        rows_ptr, num_slots, capacity, num_tiles, width, SLOTS, BLOCK_M, BLOCK_N, BAND, PADDED
    )
    if not busy:
        return
    num_n, num_k = tl.cdiv(width, BLOCK_N), tl.cdiv(num_inputs, BLOCK_K)
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + row[:, None] * num_inputs + k[None, :]
    gate_ptrs = weight_ptr + (slot * 2 * width + column)[None, :] * num_inputs + k[:, None]
    up_ptrs = gate_ptrs + width.to(tl.int64) * num_inputs
    gate_scale_ptr = scale_ptr + (slot * 2 * num_n + n) * num_k
    up_scale_ptr = gate_scale_ptr + num_n * num_k
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in range(num_k):
        inside = k < num_inputs - block * BLOCK_K
        x = load_step(x_ptrs, here[:, None], inside[None, :], EVEN)
        x_scale = tl.load(x_scale_ptr + row * num_k + block, mask=here, other=0.0)
        w = load_step(gate_ptrs, wide[None, :], inside[:, None], EVEN)
        gate += tl.dot(x, w) * (x_scale * tl.load(gate_scale_ptr + block))[:, None]
        w = load_step(up_ptrs, wide[None, :], inside[:, None], EVEN)
        up += tl.dot(x, w) * (x_scale * tl.load(up_scale_ptr + block))[:, None]
        x_ptrs += BLOCK_K
        gate_ptrs += BLOCK_K
        up_ptrs += BLOCK_K
    value, scale = to_fp8(gate * tl.sigmoid(gate) * up)
    tl.store(out_ptr + row[:, None] * width + column[None, :], value, mask=here[:, None] & wide[None, :])
    tl.store(out_scale_ptr + row * num_n + n, scale, mask=here)


@triton.jit(do_not_specialize=["capacity", "num_tiles"])
def _down_fp8_kernel(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, row_weight_ptr, out_ptr, rows_ptr, num_slots, capacity, num_tiles,
    num_inputs, num_outputs, WEIGHTED: tl.constexpr, EVEN: tl.constexpr, PADDED: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """out [R, D] = x down^T, times the row's weight."""
    busy, slot, row, here, n, column, wide = locate(
        rows_ptr, num_slots, capacity, num_tiles, num_outputs, SLOTS, BLOCK_M, BLOCK_N, BAND, PADDED
    )
    if not busy:
        return
    num_n, num_k = tl.cdiv(num_outputs, BLOCK_N), tl.cdiv(num_inputs, BLOCK_K)
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + row[:, None] * num_inputs + k[None, :]
    w_ptrs = weight_ptr + (slot * num_outputs + column)[None, :] * num_inputs + k[:, None]
    w_scale_ptr = scale_ptr + (slot * num_n + n) * num_k
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in range(num_k):
        inside = k < num_inputs - block * BLOCK_K
        x = load_step(x_ptrs, here[:, None], inside[None, :], EVEN)
        x_scale = tl.load(x_scale_ptr + row * num_k + block, mask=here, other=0.0)
        w = load_step(w_ptrs, wide[None, :], inside[:, None], EVEN)
        acc += tl.dot(x, w) * (x_scale * tl.load(w_scale_ptr + block))[:, None]
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K
    if WEIGHTED:
        acc *= tl.load(row_weight_ptr + row, mask=here, other=0.0)[:, None]
    out_ptrs = out_ptr + row[:, None] * num_outputs + column[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=here[:, None] & wide[None, :])


def run_experts_fp8(
    batch: ExpertBatch,
    gate_up_S2FD: Tensor,
    gate_up_scale_S2NB: Tensor,
    down_SDF: Tensor,
    down_scale_SBN: Tensor,
    row_weight: Tensor | None = None,
    gate_up_config: GemmConfig | None = None,
    down_config: GemmConfig | None = None,
) -> Tensor:
    """Every slot's expert on its rows: bfloat16, in the layout of batch.x; rows not in FP8 yet are rounded to it first.

    gate_up float8_e4m3fn [S, 2F, D] (gate rows first) and down [S, D, F], scales float32 (gate's blocks first); all
    contiguous. row_weight and configs: as moe_kernels.triton_grouped_gemm.run_experts.
    """
    num_slots, width2, hidden = gate_up_S2FD.shape
    width = width2 // 2
    assert gate_up_S2FD.is_contiguous() and down_SDF.is_contiguous() and down_SDF.shape == (num_slots, hidden, width)
    assert gate_up_scale_S2NB.is_contiguous() and down_scale_SBN.is_contiguous()
    assert gate_up_scale_S2NB.shape == (num_slots, 2 * num_blocks(width), num_blocks(hidden))
    assert down_scale_SBN.shape == (num_slots, num_blocks(hidden), num_blocks(width))
    up, down = Tiles(batch, 1, GATE_UP_FP8, gate_up_config), Tiles(batch, 1, DOWN_FP8, down_config)
    assert all(size == BLOCK for config in (up.config, down.config) for size in (config.block_n, config.block_k))
    out = torch.empty(batch.x.shape, dtype=torch.bfloat16, device=batch.x.device)
    if up.num_rows == 0:
        return out
    if batch.scale is None:
        x, scale = quantize_rows(batch.x.reshape(-1, hidden))
    else:
        x, scale = batch.x.contiguous(), batch.scale.contiguous()
    mid = torch.empty(up.num_rows, width, dtype=x.dtype, device=x.device)
    mid_scale = torch.empty(up.num_rows, num_blocks(width), dtype=torch.float32, device=x.device)
    _gate_up_fp8_kernel[up.grid(width)](
        x, scale, gate_up_S2FD, gate_up_scale_S2NB, mid, mid_scale, up.rows_S, num_slots, up.capacity, up.num_tiles,
        hidden, width, **up.options(hidden),
    )  # fmt: skip
    _down_fp8_kernel[down.grid(hidden)](
        mid, mid_scale, down_SDF, down_scale_SBN, row_weight, out, down.rows_S, num_slots, down.capacity,
        down.num_tiles, width, hidden, WEIGHTED=row_weight is not None, **down.options(width),
    )  # fmt: skip
    return out
