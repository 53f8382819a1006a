# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""The two matrices of every expert of a rank in Triton. Same results as moe_kernels/reference.py within rounding.

The first product has silu(gate) * up in its epilogue, the second one a weight per row. Which rows belong to which slot
is worked out by each program from the counts, on the device: nothing waits for the host, so a step can be captured in a
graph.

Legend: R rows arrived, S slots, C rows per padded slot, D hidden size, F expert width, I inputs and O outputs of a
matrix, B blocks of 128.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.activation import SILU, Activation
from moe_kernels.layout import ExpertBatch
from moe_kernels.quant import num_blocks
from moe_kernels.triton import tma_gemm as tma
from moe_kernels.triton.configs import GemmConfig
from moe_kernels.triton.tiles import Tiles, load_step, locate, store_sums


@triton.jit(do_not_specialize=["capacity", "num_tiles"])
def _gate_up_kernel(
    x_ptr, x_scale_ptr, weight_ptr, bias_ptr, out_ptr, rows_ptr, num_slots, capacity, num_tiles, num_inputs, width,
    num_blocks, SCALED: tl.constexpr, BIASED: tl.constexpr, SILU: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, OFFSET: tl.constexpr, EVEN: tl.constexpr, PADDED: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """out [R, F] = the activation (moe_kernels/activation.py) of x gate^T and x up^T, each with its bias."""
    busy, slot, _, row, here, _, column, wide = locate(
        rows_ptr, num_slots, capacity, num_tiles, width, SLOTS, BLOCK_M, BLOCK_N, BAND, PADDED
    )
    if not busy:
        return
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + row[:, None] * num_inputs + k[None, :]
    gate_ptrs = weight_ptr + (slot * 2 * width + column)[None, :] * num_inputs + k[:, None]
    up_ptrs = gate_ptrs + width.to(tl.int64) * num_inputs
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for at in range(0, num_inputs, BLOCK_K):
        inside = k < num_inputs - at
        x = load_step(x_ptrs, here[:, None], inside[None, :], EVEN)
        if SCALED:
            x_scale = tl.load(x_scale_ptr + row * num_blocks + at // 128, mask=here, other=0.0)
            x = (x.to(tl.float32) * x_scale[:, None]).to(weight_ptr.dtype.element_ty)
        w = load_step(gate_ptrs, wide[None, :], inside[:, None], EVEN)
        gate = tl.dot(x, w, gate, input_precision="ieee")
        w = load_step(up_ptrs, wide[None, :], inside[:, None], EVEN)
        up = tl.dot(x, w, up, input_precision="ieee")
        x_ptrs += BLOCK_K
        gate_ptrs += BLOCK_K
        up_ptrs += BLOCK_K
    if BIASED:
        own = bias_ptr + slot * 2 * width + column
        gate += tl.load(own, mask=wide, other=0.0)[None, :]
        up += tl.load(own + width, mask=wide, other=0.0)[None, :]
    if SILU:
        out = gate * tl.sigmoid(gate) * up
    else:
        gate, up = tl.minimum(gate, LIMIT), tl.maximum(tl.minimum(up, LIMIT), -LIMIT)
        out = gate * tl.sigmoid(ALPHA * gate) * (up + OFFSET)
    out = out.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row[:, None] * width + column[None, :], out, mask=here[:, None] & wide[None, :])


@triton.jit(do_not_specialize=["capacity", "num_tiles"])
def _down_kernel(
    x_ptr, weight_ptr, bias_ptr, row_weight_ptr, out_ptr, rows_ptr, num_slots, capacity, num_tiles, num_inputs,
    num_outputs, BIASED: tl.constexpr, WEIGHTED: tl.constexpr, EVEN: tl.constexpr, PADDED: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """out [R, D] = x down^T and the bias, times the row's weight."""
    busy, slot, _, row, here, _, column, wide = locate(
        rows_ptr, num_slots, capacity, num_tiles, num_outputs, SLOTS, BLOCK_M, BLOCK_N, BAND, PADDED
    )
    if not busy:
        return
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + row[:, None] * num_inputs + k[None, :]
    w_ptrs = weight_ptr + (slot * num_outputs + column)[None, :] * num_inputs + k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for at in range(0, num_inputs, BLOCK_K):
        inside = k < num_inputs - at
        x = load_step(x_ptrs, here[:, None], inside[None, :], EVEN)
        w = load_step(w_ptrs, wide[None, :], inside[:, None], EVEN)
        acc = tl.dot(x, w, acc, input_precision="ieee")
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K
    if BIASED:
        acc += tl.load(bias_ptr + slot * num_outputs + column, mask=wide, other=0.0)[None, :]
    store_sums(acc, row_weight_ptr, out_ptr, row, here, column, wide, num_outputs, WEIGHTED)


def multiply_gate_up(
    batch: ExpertBatch,
    gate_up_S2FD: Tensor,
    config: GemmConfig | None = None,
    bias_S2F: Tensor | None = None,
    activation: Activation = SILU,
) -> Tensor:
    """The activation of x gate^T and x up^T of every row: [R, F] or [S, C, F], in the weights' dtype."""
    num_slots, width2, hidden = gate_up_S2FD.shape
    width, x = width2 // 2, batch.x.contiguous()
    assert gate_up_S2FD.is_contiguous()
    scale = None if batch.scale is None else batch.scale.contiguous()
    tiles = Tiles(batch, gate_up_S2FD.dtype.itemsize, "gate_up", (hidden, width), config)
    mid = torch.empty(*x.shape[:-1], width, dtype=gate_up_S2FD.dtype, device=x.device)
    plain = scale is None and bias_S2F is None and activation == SILU
    if tiles.num_rows and plain and tma.can_run(tiles.config, x, gate_up_S2FD):
        tma.gate_up(tiles, x, None, gate_up_S2FD, None, mid, None)
    elif tiles.num_rows:
        _gate_up_kernel[tiles.grid(width)](
            x, scale, gate_up_S2FD, bias_S2F, mid, tiles.rows_S, num_slots, tiles.capacity, tiles.num_tiles, hidden,
            width, num_blocks(hidden), SCALED=scale is not None, BIASED=bias_S2F is not None,
            SILU=activation == SILU, ALPHA=activation.alpha, LIMIT=min(activation.limit, 1e38),
            OFFSET=activation.offset, **tiles.options(hidden),
        )  # fmt: skip
    return mid


def multiply_down(
    mid: ExpertBatch,
    down_SDF: Tensor,
    row_weight: Tensor | None = None,
    config: GemmConfig | None = None,
    bias_SD: Tensor | None = None,
) -> Tensor:
    """x down^T and the bias of every row, times its weight: [R, D] or [S, C, D]."""
    num_slots, hidden, width = down_SDF.shape
    assert down_SDF.is_contiguous()
    tiles = Tiles(mid, down_SDF.dtype.itemsize, "down", (width, hidden), config)
    out = torch.empty(*mid.x.shape[:-1], hidden, dtype=down_SDF.dtype, device=mid.x.device)
    if tiles.num_rows and bias_SD is None and tma.can_run(tiles.config, mid.x, down_SDF):
        tma.down(tiles, mid.x, None, down_SDF, None, row_weight, out)
    elif tiles.num_rows:
        _down_kernel[tiles.grid(hidden)](
            mid.x, down_SDF, bias_SD, row_weight, out, tiles.rows_S, num_slots, tiles.capacity, tiles.num_tiles, width,
            hidden, BIASED=bias_SD is not None, WEIGHTED=row_weight is not None, **tiles.options(width),
        )  # fmt: skip
    return out


def run_experts(
    batch: ExpertBatch,
    gate_up_S2FD: Tensor,
    down_SDF: Tensor,
    gate_up_bias_S2F: Tensor | None = None,
    down_bias_SD: Tensor | None = None,
    activation: Activation = SILU,
    row_weight: Tensor | None = None,
    gate_up_config: GemmConfig | None = None,
    down_config: GemmConfig | None = None,
) -> Tensor:
    """As moe_kernels.grouped_gemm.run_experts. row_weight: float32 [R] or [S, C], what each row's result is multiplied
    by (for an exchange whose combine only sums). The configs replace what the table says."""
    num_slots, width2, hidden = gate_up_S2FD.shape
    assert down_SDF.shape == (num_slots, hidden, width2 // 2)
    hidden_x = multiply_gate_up(batch, gate_up_S2FD, gate_up_config, gate_up_bias_S2F, activation)
    mid = ExpertBatch(batch.layout, hidden_x, batch.rows_S)
    return multiply_down(mid, down_SDF, row_weight, down_config, down_bias_SD)
