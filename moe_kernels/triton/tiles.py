# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""How rows of slots are cut into tiles: which programs there are, and what is each one's.

Legend: S slots, M rows and N outputs of a tile, K inputs of a step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from layers.triton.device import chip_of
from moe_kernels.layout import ExpertBatch, Layout
from moe_kernels.triton.configs import GemmConfig, choose


@triton.jit
def locate(
    rows_ptr, num_slots, capacity, num_tiles, num_outputs, SLOTS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BAND: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """This program's tile: (has it rows, slot int64, its first row int64, rows [M], which of them count, n tile,
    columns [N], which of them there are)."""
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
    return start < count, slot.to(tl.int64), first + start, first + m, m < count, n, column, column < num_outputs


@triton.jit
def load_step(ptrs, there, inside, EVEN: tl.constexpr):
    """[M, K] (there [M, 1], inside [1, K]) or [K, N]; EVEN: all inputs are inside."""
    return tl.load(ptrs, mask=there if EVEN else there & inside, other=0.0)


@triton.jit
def store_sums(acc, row_weight_ptr, out_ptr, row, here, column, wide, num_outputs, WEIGHTED: tl.constexpr):
    """A tile of results, times the weights of its rows."""
    if WEIGHTED:
        acc *= tl.load(row_weight_ptr + row, mask=here, other=0.0)[:, None]
    out_ptrs = out_ptr + row[:, None] * num_outputs + column[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=here[:, None] & wide[None, :])


class Tiles:
    """How many programs the tiles of a batch need at most, and the arguments that all kernels here share."""

    def __init__(
        self, batch: ExpertBatch, weight_bytes: int, kernel: str, sizes: tuple[int, int], config: GemmConfig | None
    ) -> None:
        """kernel: a name of moe_kernels/triton/configs.py; sizes: inputs and outputs of the matrix."""
        self.padded = batch.layout is Layout.PADDED
        self.num_slots = batch.rows_S.shape[0]
        self.rows_S = batch.rows_S
        self.num_rows = batch.x.shape[0] * (batch.x.shape[1] if self.padded else 1)
        self.capacity = batch.x.shape[1] if self.padded else 0
        per_slot = -(-self.num_rows // max(1, self.num_slots))
        if weight_bytes > 2:  # float32 has no matrix unit: small tiles, whatever the number of rows
            per_slot = 1
        self.config = config or choose(kernel, chip_of(batch.x.device), *sizes, per_slot)
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
