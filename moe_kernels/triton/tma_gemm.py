# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""The two matrices of every expert with tiles fetched by the bulk copy engine (TMA; Hopper and later): no addresses in
registers, no masks at the edges. As moe_kernels/triton/grouped_gemm.py and moe_kernels/triton/fp8_experts.py, in one
form for both; taken where a configuration says so.

A tile that reaches past its slot's rows fetches those of the next one (or zeros at the end); they are not stored.

Legend: R rows, S slots, C rows per padded slot, D hidden size, F expert width, B = ceil(D / 128), N = ceil(F / 128).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_kernels.triton.configs import GemmConfig
from moe_kernels.triton.quant import to_fp8
from moe_kernels.triton.tiles import Tiles, locate, store_sums

_ALIGNED = 16  # bytes, of the copy engine's rows


@triton.jit(do_not_specialize=["capacity", "num_tiles"])
def _gate_up_tma_kernel(
    x_tiles, w_tiles, x_scale_ptr, scale_ptr, out_ptr, out_scale_ptr, rows_ptr, num_slots, capacity, num_tiles,
    num_inputs, width, SCALED: tl.constexpr, PADDED: tl.constexpr, SLOTS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """out [R, F] = silu(x gate^T) * (x up^T); SCALED: everything in FP8 with scales, blocks of 128."""
    busy, slot, first, row, here, n, column, wide = locate(
        rows_ptr, num_slots, capacity, num_tiles, width, SLOTS, BLOCK_M, BLOCK_N, BAND, PADDED
    )
    if not busy:
        return
    num_n, num_k = tl.cdiv(width, BLOCK_N), tl.cdiv(num_inputs, BLOCK_K)
    first_row, gate_row = first.to(tl.int32), (slot * 2 * width + n * BLOCK_N).to(tl.int32)
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in range(num_k):
        x = x_tiles.load([first_row, block * BLOCK_K])
        gate_w = w_tiles.load([gate_row, block * BLOCK_K])
        up_w = w_tiles.load([gate_row + width, block * BLOCK_K])
        if SCALED:
            x_scale = tl.load(x_scale_ptr + row * num_k + block, mask=here, other=0.0)
            gate_scale_ptr = scale_ptr + (slot * 2 * num_n + n) * num_k + block
            gate += tl.dot(x, tl.trans(gate_w)) * (x_scale * tl.load(gate_scale_ptr))[:, None]
            up += tl.dot(x, tl.trans(up_w)) * (x_scale * tl.load(gate_scale_ptr + num_n * num_k))[:, None]
        else:
            gate = tl.dot(x, tl.trans(gate_w), gate)
            up = tl.dot(x, tl.trans(up_w), up)
    out = gate * tl.sigmoid(gate) * up
    out_ptrs, mask = out_ptr + row[:, None] * width + column[None, :], here[:, None] & wide[None, :]
    if SCALED:
        value, scale = to_fp8(tl.where(wide[None, :], out, 0.0))
        tl.store(out_ptrs, value, mask=mask)
        tl.store(out_scale_ptr + row * num_n + n, scale, mask=here)
    else:
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["capacity", "num_tiles"])
def _down_tma_kernel(
    x_tiles, w_tiles, x_scale_ptr, scale_ptr, row_weight_ptr, out_ptr, rows_ptr, num_slots, capacity, num_tiles,
    num_inputs, num_outputs, WEIGHTED: tl.constexpr, SCALED: tl.constexpr, PADDED: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """out [R, D] = x down^T, times the row's weight."""
    busy, slot, first, row, here, n, column, wide = locate(
        rows_ptr, num_slots, capacity, num_tiles, num_outputs, SLOTS, BLOCK_M, BLOCK_N, BAND, PADDED
    )
    if not busy:
        return
    num_n, num_k = tl.cdiv(num_outputs, BLOCK_N), tl.cdiv(num_inputs, BLOCK_K)
    first_row, first_output = first.to(tl.int32), (slot * num_outputs + n * BLOCK_N).to(tl.int32)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in range(num_k):
        x = x_tiles.load([first_row, block * BLOCK_K])
        w = w_tiles.load([first_output, block * BLOCK_K])
        if SCALED:
            x_scale = tl.load(x_scale_ptr + row * num_k + block, mask=here, other=0.0)
            scale = tl.load(scale_ptr + (slot * num_n + n) * num_k + block)
            acc += tl.dot(x, tl.trans(w)) * (x_scale * scale)[:, None]
        else:
            acc = tl.dot(x, tl.trans(w), acc)
    store_sums(acc, row_weight_ptr, out_ptr, row, here, column, wide, num_outputs, WEIGHTED)


def can_run(config: GemmConfig, x: Tensor, weight_SOI: Tensor) -> bool:
    """Whether this configuration asks for it, and the copy engine reads such rows: 8 or 16 bits, of whole 16 bytes."""
    size = x.element_size()
    aligned = x.shape[-1] * size % _ALIGNED == 0 and x.data_ptr() % _ALIGNED == 0 == weight_SOI.data_ptr() % _ALIGNED
    return bool(config.tma) and size <= 2 and x.dtype == weight_SOI.dtype and aligned and x.is_contiguous()


def gate_up(
    tiles: Tiles,
    x: Tensor,
    x_scale: Tensor | None,
    weight_S2FD: Tensor,
    scale: Tensor | None,
    out: Tensor,
    out_scale: Tensor | None,
) -> None:
    """Fills out [R, F] or [S, C, F], and out_scale if everything is in FP8."""
    num_slots, width2, hidden = weight_S2FD.shape
    _gate_up_tma_kernel[tiles.grid(width2 // 2)](
        *_descriptors(tiles.config, x, weight_S2FD), x_scale, scale, out, out_scale, tiles.rows_S, num_slots,
        tiles.capacity, tiles.num_tiles, hidden, width2 // 2, SCALED=scale is not None, **_options(tiles, hidden),
    )  # fmt: skip


def down(
    tiles: Tiles,
    x: Tensor,
    x_scale: Tensor | None,
    weight_SDF: Tensor,
    scale: Tensor | None,
    row_weight: Tensor | None,
    out: Tensor,
) -> None:
    """Fills out [R, D] or [S, C, D]."""
    num_slots, hidden, width = weight_SDF.shape
    _down_tma_kernel[tiles.grid(hidden)](
        *_descriptors(tiles.config, x, weight_SDF), x_scale, scale, row_weight, out, tiles.rows_S, num_slots,
        tiles.capacity, tiles.num_tiles, width, hidden, WEIGHTED=row_weight is not None, SCALED=scale is not None,
        **_options(tiles, width),
    )  # fmt: skip


def _descriptors(config: GemmConfig, x: Tensor, weight_SOI: Tensor) -> tuple[TensorDescriptor, TensorDescriptor]:
    size = x.shape[-1]
    return (
        TensorDescriptor.from_tensor(x.view(-1, size), [config.block_m, config.block_k]),
        TensorDescriptor.from_tensor(weight_SOI.view(-1, size), [config.block_n, config.block_k]),
    )


def _options(tiles: Tiles, num_inputs: int) -> dict[str, int | bool]:
    options = tiles.options(num_inputs)
    del options["EVEN"]  # the copy engine knows where rows end
    return options
