# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Experts with weights in FP8 in Triton: e4m3 with a scale for 128 x 128 weights, rows with a scale for 128 inputs
(DeepSeek-V3, arXiv:2412.19437, 3.3). moe_kernels.reference.experts_fp8 says what comes out.

The first product rounds silu(gate) * up to FP8 in its epilogue: its tile is as wide as a block with one scale.

Legend: R rows arrived, S slots, C rows per padded slot, D hidden size, F expert width, B = ceil(D / 128), N = ceil(F /
128).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.layout import ExpertBatch
from moe_kernels.quant import BLOCK, num_blocks
from moe_kernels.triton import tma_gemm as tma
from moe_kernels.triton.configs import GemmConfig
from moe_kernels.triton.quant import quantize_rows, to_fp8
from moe_kernels.triton.tiles import Tiles, load_step, locate, store_sums


@triton.jit(do_not_specialize=["capacity", "num_tiles"])
def _gate_up_fp8_kernel(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, out_ptr, out_scale_ptr, rows_ptr, num_slots, capacity, num_tiles,
    num_inputs, width, EVEN: tl.constexpr, PADDED: tl.constexpr, SLOTS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """(out [R, F], its scales [R, N]) = FP8 of silu(x gate^T) * (x up^T)."""
    busy, slot, _, row, here, n, column, wide = locate(
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
    busy, slot, _, row, here, n, column, wide = locate(
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
    store_sums(acc, row_weight_ptr, out_ptr, row, here, column, wide, num_outputs, WEIGHTED)


def multiply_gate_up_fp8(
    batch: ExpertBatch, gate_up_S2FD: Tensor, scale_S2NB: Tensor, config: GemmConfig | None = None
) -> ExpertBatch:
    """Rows in FP8 -> silu(x gate^T) * (x up^T) of each, in FP8 too."""
    num_slots, width2, hidden = gate_up_S2FD.shape
    width = width2 // 2
    assert gate_up_S2FD.is_contiguous() and scale_S2NB.is_contiguous() and batch.scale is not None
    assert scale_S2NB.shape == (num_slots, 2 * num_blocks(width), num_blocks(hidden))
    x, x_scale = batch.x.contiguous(), batch.scale.contiguous()
    tiles = Tiles(batch, 1, "gate_up_fp8", (hidden, width), config)
    assert tiles.config.block_n == tiles.config.block_k == BLOCK
    mid = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
    mid_scale = torch.empty(*x.shape[:-1], num_blocks(width), dtype=torch.float32, device=x.device)
    if tiles.num_rows and tma.can_run(tiles.config, x, gate_up_S2FD):
        tma.gate_up(tiles, x, x_scale, gate_up_S2FD, scale_S2NB, mid, mid_scale)
    elif tiles.num_rows:
        _gate_up_fp8_kernel[tiles.grid(width)](
            x, x_scale, gate_up_S2FD, scale_S2NB, mid, mid_scale, tiles.rows_S, num_slots, tiles.capacity,
            tiles.num_tiles, hidden, width, **tiles.options(hidden),
        )  # fmt: skip
    return ExpertBatch(batch.layout, mid, batch.rows_S, mid_scale)


def multiply_down_fp8(
    mid: ExpertBatch, down_SDF: Tensor, scale_SBN: Tensor, row_weight: Tensor | None = None,
    config: GemmConfig | None = None,
) -> Tensor:  # fmt: skip
    """x down^T of every row, times its weight: bfloat16."""
    num_slots, hidden, width = down_SDF.shape
    assert down_SDF.is_contiguous() and scale_SBN.is_contiguous()
    assert scale_SBN.shape == (num_slots, num_blocks(hidden), num_blocks(width))
    tiles = Tiles(mid, 1, "down_fp8", (width, hidden), config)
    assert tiles.config.block_n == tiles.config.block_k == BLOCK
    out = torch.empty(*mid.x.shape[:-1], hidden, dtype=torch.bfloat16, device=mid.x.device)
    if tiles.num_rows and tma.can_run(tiles.config, mid.x, down_SDF):
        tma.down(tiles, mid.x, mid.scale, down_SDF, scale_SBN, row_weight, out)
    elif tiles.num_rows:
        _down_fp8_kernel[tiles.grid(hidden)](
            mid.x, mid.scale, down_SDF, scale_SBN, row_weight, out, tiles.rows_S, num_slots, tiles.capacity,
            tiles.num_tiles, width, hidden, WEIGHTED=row_weight is not None, **tiles.options(width),
        )  # fmt: skip
    return out


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
    contiguous. row_weight and configs: as moe_kernels.triton.grouped_gemm.run_experts.
    """
    num_slots, width2, hidden = gate_up_S2FD.shape
    assert down_SDF.shape == (num_slots, hidden, width2 // 2)
    if batch.scale is None:
        x, scale = quantize_rows(batch.x.reshape(-1, hidden))
        scale = scale.view(*batch.x.shape[:-1], num_blocks(hidden))
        batch = ExpertBatch(batch.layout, x.view(batch.x.shape), batch.rows_S, scale)
    mid = multiply_gate_up_fp8(batch, gate_up_S2FD, gate_up_scale_S2NB, gate_up_config)
    return multiply_down_fp8(mid, down_SDF, down_scale_SBN, row_weight, down_config)
