# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""The two matrices of every expert of a rank in Triton. Same results as moe_kernels/reference.py within rounding.

The first product has silu(gate) * up in its epilogue, the second one a weight per row. Which rows belong to which slot is
worked out by each program from the counts, on the device: nothing waits for the host, so a step can be captured in a graph.

Legend: R rows arrived, S slots, C rows per padded slot, D hidden size, F expert width, I inputs and O outputs of a matrix,
B blocks of 128.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.layout import ExpertBatch, Layout
from moe_kernels.quant import num_blocks
from moe_kernels.triton_configs import DOWN, GATE_UP, GemmConfig, Table, choose
from moe_kernels.triton_device import chip_of


@triton.jit
def locate(
    rows_ptr, num_slots, capacity, num_tiles, num_outputs, SLOTS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BAND: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """This program's tile: (has it rows, slot int64, rows int64 [M], which of them count, n tile, columns [N], which of them
    there are)."""
    num_n = tl.cdiv(num_outputs, BLOCK_N)
    pid, per_band = tl.program_id(0), BAND * num_n
    first_m = pid // per_band * BAND
    height = tl.minimum(num_tiles - first_m, BAND)
    tile = first_m + pid % per_band % height
    n = pid % per_band // height
    if PADDED:
        tiles_per_slot = tl.cdiv(capacity, BLOCK_M)
        slot = tile // tiles_per_slot
        count = tl.load(rows_ptr + slot)
        first = slot.to(tl.int64) * capacity
        start = tile % tiles_per_slot * BLOCK_M
    else:
        index = tl.arange(0, SLOTS)
        rows = tl.load(rows_ptr + index, mask=index < num_slots, other=0)
        tiles = (rows + BLOCK_M - 1) // BLOCK_M
        slot = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
        before = index < slot
        first = tl.sum(tl.where(before, rows, 0), 0).to(tl.int64)
        count = tl.sum(tl.where(index == slot, rows, 0), 0)
        start = (tile - tl.sum(tl.where(before, tiles, 0), 0)) * BLOCK_M
    m = start + tl.arange(0, BLOCK_M)
    column = n * BLOCK_N + tl.arange(0, BLOCK_N)
    return start < count, slot.to(tl.int64), first + m, m < count, n, column, column < num_outputs


@triton.jit
def load_step(ptrs, there, inside, EVEN: tl.constexpr):
    """[M, K] (there [M, 1], inside [1, K]) or [K, N]; EVEN: all inputs are inside."""
    return tl.load(ptrs, mask=there if EVEN else there & inside, other=0.0)


@triton.jit(do_not_specialize=["capacity", "num_tiles"])
def _gate_up_kernel(
    x_ptr, x_scale_ptr, weight_ptr, out_ptr, rows_ptr, num_slots, capacity, num_tiles, num_inputs, width, num_blocks,
    SCALED: tl.constexpr, EVEN: tl.constexpr, PADDED: tl.constexpr, SLOTS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """out [R, F] = silu(x gate^T) * (x up^T)."""
    busy, slot, row, here, _, column, wide = locate(
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
    out = (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row[:, None] * width + column[None, :], out, mask=here[:, None] & wide[None, :])


@triton.jit(do_not_specialize=["capacity", "num_tiles"])
def _down_kernel(
    x_ptr, weight_ptr, row_weight_ptr, out_ptr, rows_ptr, num_slots, capacity, num_tiles, num_inputs, num_outputs,
    WEIGHTED: tl.constexpr, EVEN: tl.constexpr, PADDED: tl.constexpr, SLOTS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """out [R, D] = x down^T, times the row's weight."""
    busy, slot, row, here, _, column, wide = locate(
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
    if WEIGHTED:
        acc *= tl.load(row_weight_ptr + row, mask=here, other=0.0)[:, None]
    out_ptrs = out_ptr + row[:, None] * num_outputs + column[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=here[:, None] & wide[None, :])


class Tiles:
    """How many programs the tiles of a batch need at most, and the arguments that all kernels here share."""

    def __init__(self, batch: ExpertBatch, weight_bytes: int, table: Table, config: GemmConfig | None) -> None:
        self.padded = batch.layout is Layout.PADDED
        self.num_slots = batch.rows_S.shape[0]
        self.rows_S = batch.rows_S
        self.num_rows = batch.x.shape[0] * (batch.x.shape[1] if self.padded else 1)
        self.capacity = batch.x.shape[1] if self.padded else 0
        per_slot = -(-self.num_rows // max(1, self.num_slots))
        if weight_bytes > 2:  # float32 has no matrix unit: small tiles, whatever the number of rows
            per_slot = 1
        self.config = config or choose(table, chip_of(batch.x.device), per_slot)
        size = self.config.block_m
        # Ragged: a slot's last tile may be partly filled; how many there are is known on the device only.
        self.num_tiles = (
            self.num_slots * -(-self.capacity // size)
            if self.padded
            else self.num_rows // size + min(self.num_slots, self.num_rows)
        )

    def options(self, num_inputs: int) -> dict[str, int | bool]:
        config = self.config
        return {
            "EVEN": num_inputs % config.block_k == 0, "PADDED": self.padded,
            "SLOTS": triton.next_power_of_2(self.num_slots), "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k, "BAND": config.band, "num_warps": config.num_warps,
            "num_stages": config.num_stages,
        }  # fmt: skip

    def grid(self, num_outputs: int) -> tuple[int]:
        return (self.num_tiles * -(-num_outputs // self.config.block_n),)


def run_experts(
    batch: ExpertBatch,
    gate_up_S2FD: Tensor,
    down_SDF: Tensor,
    row_weight: Tensor | None = None,
    gate_up_config: GemmConfig | None = None,
    down_config: GemmConfig | None = None,
) -> Tensor:
    """As moe_kernels.grouped_gemm.run_experts. row_weight: float32 [R] or [S, C], what each row's result is multiplied by
    (for an exchange whose combine only sums). The configs replace what the table says."""
    num_slots, width2, hidden = gate_up_S2FD.shape
    width = width2 // 2
    assert gate_up_S2FD.is_contiguous() and down_SDF.is_contiguous() and down_SDF.shape == (num_slots, hidden, width)
    x, dtype = batch.x.contiguous(), gate_up_S2FD.dtype
    scale = None if batch.scale is None else batch.scale.contiguous()
    up, down = Tiles(batch, dtype.itemsize, GATE_UP, gate_up_config), Tiles(batch, dtype.itemsize, DOWN, down_config)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if up.num_rows == 0:
        return out
    mid = torch.empty(*x.shape[:-1], width, dtype=dtype, device=x.device)
    _gate_up_kernel[up.grid(width)](
        x, scale, gate_up_S2FD, mid, up.rows_S, num_slots, up.capacity, up.num_tiles, hidden, width, num_blocks(hidden),
        SCALED=scale is not None, **up.options(hidden),
    )  # fmt: skip
    _down_kernel[down.grid(hidden)](
        mid, down_SDF, row_weight, out, down.rows_S, num_slots, down.capacity, down.num_tiles, width, hidden,
        WEIGHTED=row_weight is not None, **down.options(width),
    )  # fmt: skip
    return out
