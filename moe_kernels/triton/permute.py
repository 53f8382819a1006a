# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Rows of tokens into the order of expert slots and back, in Triton: a counting sort that keeps the order of tokens.

Blocks of pairs count their slots; one program turns counts into first rows; blocks place their pairs; rows are copied.
Nothing waits for the host except where the number of rows is the shape of the result (`permute_some`).

Legend: T tokens, D hidden size, K experts per token, S slots, R rows, N = T * K (token, k) pairs, P of them with a row
here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.layout import ExpertBatch, Layout
from moe_kernels.permute import Bags

_PAIRS = 128  # of a block
_BLOCKS = 16  # whose counts are read at a time
_COLUMNS = 1024  # of a row, of a program


@triton.jit
def _read_keys(slot_ptr, stride_t, stride_k, top_k, num_pairs, first_slot, num_slots, PAIRS: tl.constexpr):
    """(pair, its slot counted from first_slot or -1 if that is not here)."""
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    there = pair < num_pairs
    slot = tl.load(slot_ptr + (pair // top_k) * stride_t + (pair % top_k) * stride_k, mask=there, other=-1)
    key = slot.to(tl.int32) - first_slot
    return pair, tl.where(there & (key >= 0) & (key < num_slots), key, -1)


@triton.jit(do_not_specialize=["num_pairs", "first_slot"])
def _count_kernel(
    slot_ptr, counts_ptr, stride_t, stride_k, top_k, num_pairs, first_slot, num_slots, PAIRS: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    _, key = _read_keys(slot_ptr, stride_t, stride_k, top_k, num_pairs, first_slot, num_slots, PAIRS)
    index = tl.arange(0, SLOTS)
    counts = tl.sum((key[:, None] == index[None, :]).to(tl.int32), 0)
    tl.store(counts_ptr + tl.program_id(0) * SLOTS + index, counts)


@triton.jit(do_not_specialize=["num_blocks"])
def _start_kernel(
    counts_ptr, starts_ptr, own_ptr, rows_ptr, num_blocks, num_slots, BLOCKS: tl.constexpr, SLOTS: tl.constexpr
):  # fmt: skip
    """counts [blocks, SLOTS] -> starts: the first row of each block's pairs of each slot; own [blocks]: pairs before
    the block that have a row; rows [S]."""
    # starts is other memory than counts: where a tile has fewer numbers than the program has threads, several of them
    # read each number, and a fast one would overwrite what a slow one has not read yet.
    index, line = tl.arange(0, SLOTS), tl.arange(0, BLOCKS)
    total = tl.zeros((SLOTS,), tl.int32)
    for at in range(0, num_blocks, BLOCKS):
        mask = (at + line < num_blocks)[:, None] & (index >= 0)[None, :]
        place = (at + line)[:, None] * SLOTS + index[None, :]
        total += tl.sum(tl.load(counts_ptr + place, mask=mask, other=0), 0)
    tl.store(rows_ptr + index, total, mask=index < num_slots)
    start = tl.cumsum(total, 0) - total
    own_before = 0
    for at in range(0, num_blocks, BLOCKS):
        here = at + line < num_blocks
        mask = here[:, None] & (index >= 0)[None, :]
        place = (at + line)[:, None] * SLOTS + index[None, :]
        counts = tl.load(counts_ptr + place, mask=mask, other=0)
        tl.store(starts_ptr + place, start[None, :] + tl.cumsum(counts, 0) - counts, mask=mask)
        own = tl.sum(counts, 1)
        tl.store(own_ptr + at + line, own_before + tl.cumsum(own, 0) - own, mask=here)
        start += tl.sum(counts, 0)
        own_before += tl.sum(own, 0)


@triton.jit(do_not_specialize=["num_pairs", "first_slot"])
def _place_kernel(
    slot_ptr, weight_ptr, starts_ptr, own_ptr, row_n_ptr, row_p_ptr, weight_p_ptr, starts_t_ptr, stride_t, stride_k,
    weight_stride_t, weight_stride_k, top_k, num_pairs, first_slot, num_slots, PAIRS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """row_n [N]: the row of each pair or -1; row_p, weight_p [P]: of those with a row; starts_t [T]: the first of each
    token among these."""
    pair, key = _read_keys(slot_ptr, stride_t, stride_k, top_k, num_pairs, first_slot, num_slots, PAIRS)
    there, own = pair < num_pairs, key >= 0
    index = tl.arange(0, PAIRS)
    before = (key[:, None] == key[None, :]) & (index[None, :] < index[:, None])
    rank = tl.sum(before.to(tl.int32), 1)
    row = tl.load(starts_ptr + tl.program_id(0) * SLOTS + key, mask=own, other=0) + rank
    tl.store(row_n_ptr + pair, tl.where(own, row, -1), mask=there)
    one = own.to(tl.int32)
    place = tl.load(own_ptr + tl.program_id(0)) + tl.cumsum(one, 0) - one
    tl.store(row_p_ptr + place, row.to(tl.int64), mask=own)
    k = pair % top_k
    weight = tl.load(weight_ptr + pair // top_k * weight_stride_t + k * weight_stride_k, mask=own, other=0.0)
    tl.store(weight_p_ptr + place, weight, mask=own)
    tl.store(starts_t_ptr + pair // top_k, place.to(tl.int64), mask=there & (k == 0))


@triton.jit
def _copy_kernel(x_ptr, row_n_ptr, out_ptr, stride_t, size, top_k, COLUMNS: tl.constexpr):
    """A token's row is read once and written to each of its places."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < size
    x = tl.load(x_ptr + token * stride_t + column, mask=mask, other=0.0)
    for k in range(top_k):
        row = tl.load(row_n_ptr + token * top_k + k).to(tl.int64)
        tl.store(out_ptr + row * size + column, x, mask=mask & (row >= 0))


@triton.jit(do_not_specialize=["num_tokens", "num_pairs"])
def _sum_kernel(
    y_ptr, row_ptr, weight_ptr, starts_ptr, out_ptr, starts_stride, out_stride, num_tokens, num_pairs, size,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < size
    start = tl.load(starts_ptr + token * starts_stride).to(tl.int32)
    end = tl.load(starts_ptr + (token + 1) * starts_stride, mask=token + 1 < num_tokens, other=num_pairs).to(tl.int32)
    acc = tl.zeros((COLUMNS,), tl.float32)
    for pair in range(start, end):
        y = tl.load(y_ptr + tl.load(row_ptr + pair) * size + column, mask=mask, other=0.0).to(tl.float32)
        acc += tl.load(weight_ptr + pair) * y
    tl.store(out_ptr + token * out_stride + column, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _sum_pairs_kernel(
    y_ptr, row_n_ptr, weight_ptr, out_ptr, weight_stride_t, weight_stride_k, out_stride, size, top_k,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < size
    acc = tl.zeros((COLUMNS,), tl.float32)
    for k in range(top_k):
        row = tl.load(row_n_ptr + token * top_k + k).to(tl.int64)
        weight = tl.load(weight_ptr + token * weight_stride_t + k * weight_stride_k)
        y = tl.load(y_ptr + row * size + column, mask=mask & (row >= 0), other=0.0).to(tl.float32)
        acc += tl.where(row >= 0, weight, 0.0) * y
    tl.store(out_ptr + token * out_stride + column, acc.to(out_ptr.dtype.element_ty), mask=mask)


class _Places:
    """Where the pairs of a step go; the number of rows is known on the device only."""

    def __init__(self, slot_TK: Tensor, weight_TK: Tensor, first_slot: int, num_slots: int) -> None:
        num_tokens, top_k = slot_TK.shape
        num_pairs, device = num_tokens * top_k, slot_TK.device
        blocks = -(-num_pairs // _PAIRS)
        slots = triton.next_power_of_2(num_slots)
        counts, starts = (torch.empty(blocks, slots, dtype=torch.int32, device=device) for _ in range(2))
        own = torch.empty(blocks, dtype=torch.int32, device=device)
        self.rows_S = torch.empty(num_slots, dtype=torch.int32, device=device)
        self.row_N = torch.empty(num_pairs, dtype=torch.int32, device=device)
        self.row_P = torch.empty(num_pairs, dtype=torch.int64, device=device)
        self.weight_P = torch.empty(num_pairs, dtype=torch.float32, device=device)
        self.starts_T = torch.empty(num_tokens, dtype=torch.int64, device=device)
        shape = (top_k, num_pairs, first_slot, num_slots)
        if blocks:
            _count_kernel[(blocks,)](slot_TK, counts, *slot_TK.stride(), *shape, PAIRS=_PAIRS, SLOTS=slots)
        _start_kernel[(1,)](counts, starts, own, self.rows_S, blocks, num_slots, BLOCKS=_BLOCKS, SLOTS=slots)
        if blocks:
            _place_kernel[(blocks,)](
                slot_TK, weight_TK, starts, own, self.row_N, self.row_P, self.weight_P, self.starts_T,
                *slot_TK.stride(), *weight_TK.stride(), *shape, PAIRS=_PAIRS, SLOTS=slots,
            )  # fmt: skip

    def rows(self, x_TD: Tensor, num_rows: int) -> Tensor:
        """x [T, D] of any dtype -> [R, D]."""
        num_tokens, size = x_TD.shape
        x_RD = torch.empty(num_rows, size, dtype=x_TD.dtype, device=x_TD.device)
        if x_RD.numel():
            x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
            top_k = self.row_N.shape[0] // num_tokens
            _copy_kernel[(num_tokens, triton.cdiv(size, _COLUMNS))](
                x_TD, self.row_N, x_RD, x_TD.stride(0), size, top_k, COLUMNS=_COLUMNS
            )
        return x_RD


def permute(x_TD: Tensor, slot_TK: Tensor, weight_TK: Tensor, num_slots: int) -> tuple[ExpertBatch, Bags]:
    """As moe_kernels.permute.permute."""
    places = _Places(slot_TK, weight_TK, 0, num_slots)
    batch = ExpertBatch(Layout.RAGGED, places.rows(x_TD, slot_TK.numel()), places.rows_S)
    return batch, Bags(places.row_P, places.weight_P, places.starts_T)


def permute_some(
    x_TD: Tensor, slot_TK: Tensor, weight_TK: Tensor, first_slot: int, num_slots: int
) -> tuple[ExpertBatch, Bags]:
    """As moe_kernels.permute.permute_some. Waits once for the device: how many rows there are is a shape."""
    places = _Places(slot_TK, weight_TK, first_slot, num_slots)
    num_rows = int(places.rows_S.sum().item())
    batch = ExpertBatch(Layout.RAGGED, places.rows(x_TD, num_rows), places.rows_S)
    return batch, Bags(places.row_P[:num_rows], places.weight_P[:num_rows], places.starts_T)


def sum_rows(y_RD: Tensor, bags: Bags) -> Tensor:
    """As moe_kernels.permute.sum_rows."""
    out_TD = torch.empty(bags.starts_T.shape[0], y_RD.shape[1], dtype=torch.float32, device=y_RD.device)
    return unpermute(y_RD, bags, out_TD)


def unpermute(y_RD: Tensor, bags: Bags, out_TD: Tensor) -> Tensor:
    """As moe_kernels.permute.unpermute. out [T, D]: rows of any stride."""
    num_tokens, size = out_TD.shape
    assert out_TD.stride(1) == 1 and y_RD.shape[1] == size
    if out_TD.numel():
        _sum_kernel[(num_tokens, triton.cdiv(size, _COLUMNS))](
            y_RD.contiguous(), bags.row_P, bags.weight_P, bags.starts_T, out_TD, bags.starts_T.stride(0),
            out_TD.stride(0), num_tokens, bags.row_P.shape[0], size, COLUMNS=_COLUMNS,
        )  # fmt: skip
    return out_TD


def take_rows(x_TD: Tensor, slot_TK: Tensor, first_slot: int, num_slots: int) -> tuple[ExpertBatch, Tensor]:
    """As moe_kernels.tokens.take_rows."""
    weight_TK = torch.empty(slot_TK.shape, dtype=torch.float32, device=slot_TK.device)  # not looked at again
    places = _Places(slot_TK, weight_TK, first_slot, num_slots)
    batch = ExpertBatch(Layout.RAGGED, places.rows(x_TD, slot_TK.numel()), places.rows_S)
    return batch, places.row_N


def sum_pairs(y_ND: Tensor, row_N: Tensor, weight_TK: Tensor, out_TD: Tensor) -> Tensor:
    """As moe_kernels.tokens.sum_pairs. out [T, D]: rows of any stride."""
    (num_tokens, size), top_k = out_TD.shape, weight_TK.shape[1]
    assert out_TD.stride(1) == 1 and y_ND.shape[1] == size and y_ND.is_contiguous()
    if out_TD.numel():
        _sum_pairs_kernel[(num_tokens, triton.cdiv(size, _COLUMNS))](
            y_ND, row_N, weight_TK, out_TD, *weight_TK.stride(), out_TD.stride(0), size, top_k, COLUMNS=_COLUMNS
        )
    return out_TD
