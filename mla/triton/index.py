# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment,misc"
"""The choice of keys of sparse attention in Triton (mla/index.py): scores of index keys, the heads' together in
registers, and the largest of each query's by the bits of their threshold, in the order of positions.

Nothing waits for the device and no shape depends on lengths, so that both can be captured in a graph.

Legend: U queries that choose, H index heads, I their width, W bytes of a row in FP8, K most keys chosen, S keys, B
sequences, N blocks of a sequence, R rows of the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from layers.triton.attention import rows_of

SCORE_BYTES = 256 << 20  # kept at a time
_SCORES = {"BLOCK_S": 64, "num_warps": 4, "num_stages": 2}
_SELECT_BLOCK = 1024
_BINS = tl.constexpr(256)  # of a threshold's bits, eight at a time


@triton.jit(
    do_not_specialize=["table_stride", "out_stride", "first"],
    do_not_specialize_on_alignment=["table_ptr", "lens_ptr", "sequence_ptr"],
)
def _scores_kernel(
    q_ptr, weight_ptr, key_ptr, scale_ptr, table_ptr, lens_ptr, sequence_ptr, out_ptr, q_stride, key_stride,
    scale_stride, table_stride, out_stride, first, num_heads, block_size, DIM: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr, SCALED: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """One query over BLOCK_S keys. out [U, S]: what lies behind a query's keys is not written. MAPPED: sequence says
    whose keys a query sees."""
    here = tl.program_id(0).to(tl.int64)
    query, at = here + first, tl.program_id(1) * BLOCK_S
    length = tl.load(lens_ptr + query).to(tl.int32)
    if at < length:
        b = tl.load(sequence_ptr + query).to(tl.int64) if MAPPED else query
        position, column, line = at + tl.arange(0, BLOCK_S), tl.arange(0, COLUMNS), tl.arange(0, BLOCK_H)
        seen, inside = position < length, column < DIM
        row = rows_of(position, seen, table_ptr + b * table_stride, block_size)
        key = tl.load(
            key_ptr + row[:, None] * key_stride + column[None, :], mask=seen[:, None] & inside[None, :], other=0.0
        ).to(q_ptr.dtype.element_ty)
        total = tl.zeros((BLOCK_S,), tl.float32)
        for head in range(0, num_heads, BLOCK_H):
            real = head + line < num_heads
            q = tl.load(
                q_ptr + query * q_stride + (head + line)[:, None] * DIM + column[None, :],
                mask=real[:, None] & inside[None, :], other=0.0,
            )  # fmt: skip
            weight = tl.load(weight_ptr + query * num_heads + head + line, mask=real, other=0.0)
            # Keys are the rows of the product: there are always enough of them for the matrix unit.
            score = tl.maximum(tl.dot(key, tl.trans(q), input_precision="ieee"), 0.0)
            total += tl.sum(score * weight[None, :], 1)
        if SCALED:
            total *= tl.load(scale_ptr + row * scale_stride, mask=seen, other=0.0)
        tl.store(out_ptr + here * out_stride + position, total + 0.0, mask=seen)


@triton.jit
def _ordered(x):
    """Whole numbers in the order of the numbers, uint32; a zero has one sign."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit(
    do_not_specialize=["table_stride", "score_stride", "first"],
    do_not_specialize_on_alignment=["table_ptr", "lens_ptr", "sequence_ptr"],
)
def _select_kernel(
    score_ptr, table_ptr, lens_ptr, sequence_ptr, rows_ptr, counts_ptr, score_stride, table_stride, first, block_size,
    topk, BLOCK: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """One query. rows [U, K] are zeros before."""
    here = tl.program_id(0).to(tl.int64)
    query, line, bins = here + first, tl.arange(0, BLOCK), tl.arange(0, _BINS)
    length = tl.load(lens_ptr + query).to(tl.int32)
    count = tl.minimum(length, topk)
    tl.store(counts_ptr + query, count.to(tl.int64))
    b = tl.load(sequence_ptr + query).to(tl.int64) if MAPPED else query
    scores = score_ptr + here * score_stride
    found = tl.zeros((), tl.uint32)
    known = tl.zeros((), tl.uint32)
    left = count
    if length > topk:
        for step in tl.static_range(4):
            histogram = tl.zeros((_BINS,), tl.int32)
            for at in range(0, length, BLOCK):
                seen = at + line < length
                x = _ordered(tl.load(scores + at + line, mask=seen, other=0.0))
                alike = seen & ((x & known) == found)
                histogram += tl.histogram(((x >> (24 - 8 * step)) & 255).to(tl.int32), _BINS, mask=alike)
            from_here = tl.sum(histogram) - tl.cumsum(histogram) + histogram  # in this bin and those above
            last = tl.sum((from_here >= left).to(tl.int32)) - 1
            left -= tl.sum(tl.where(bins == last, from_here - histogram, 0))
            found = found | (last.to(tl.uint32) << (24 - 8 * step))
            known = known | (tl.full((), 255, tl.uint32) << (24 - 8 * step))
    chosen, alike_before = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    for at in range(0, length, BLOCK):
        position = at + line
        seen = position < length
        x = _ordered(tl.load(scores + position, mask=seen & (length > topk), other=0.0))
        alike = (seen & (x == found)).to(tl.int32)
        take = seen & ((x > found) | ((alike > 0) & (alike_before + tl.cumsum(alike) <= left)))
        take = (seen & (length <= topk)) | (take & (length > topk))
        place = chosen + tl.cumsum(take.to(tl.int32)) - 1
        row = rows_of(position, seen, table_ptr + b * table_stride, block_size)
        tl.store(rows_ptr + query * topk + place, row, mask=take)
        chosen += tl.sum(take.to(tl.int32))
        alike_before += tl.sum(alike)


def choose(
    q_UHI: Tensor, weight_UH: Tensor, cache: Tensor, lens_U: Tensor, sequence_U: Tensor | None, table_BN: Tensor,
    block_size: int, longest: int, topk: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(rows of the cache int64 [U, K], how many of them count int64 [U]), as mla.index.choose_keys. cache: [R, I] in
    q's dtype, or uint8 [R, W]. lens, sequence, table: int64; longest: the largest of lens or more."""
    num_queries, heads, dim = q_UHI.shape
    q_UHI, weight_UH = q_UHI.contiguous(), weight_UH.contiguous()
    assert table_BN.stride(1) == 1 and cache.stride(1) == 1 and weight_UH.dtype == torch.float32
    rows_UK = torch.zeros(num_queries, topk, dtype=torch.int64, device=q_UHI.device)
    counts_U = torch.empty(num_queries, dtype=torch.int64, device=q_UHI.device)
    if num_queries == 0:
        return rows_UK, counts_U
    keys, scale = cache, None
    if cache.dtype == torch.uint8:
        keys, scale = cache.view(torch.float8_e4m3fn), cache.view(torch.float32)[:, dim // 4 :]
    block_s = _SCORES["BLOCK_S"]
    width = max(block_s, -(-longest // block_s) * block_s)
    at_once = max(1, min(num_queries, SCORE_BYTES // (4 * width)))
    scores = torch.empty(at_once, width, dtype=torch.float32, device=q_UHI.device)
    for first in range(0, num_queries, at_once):
        num = min(at_once, num_queries - first)
        _scores_kernel[(num, width // block_s)](
            q_UHI, weight_UH, keys, scale, table_BN, lens_U, sequence_U, scores, q_UHI.stride(0), keys.stride(0),
            0 if scale is None else scale.stride(0), table_BN.stride(0), width, first, heads, block_size,
            DIM=dim, COLUMNS=max(16, triton.next_power_of_2(dim)),
            BLOCK_H=max(16, min(64, triton.next_power_of_2(heads))), SCALED=scale is not None,
            MAPPED=sequence_U is not None, **_SCORES,
        )  # fmt: skip
        _select_kernel[(num,)](
            scores, table_BN, lens_U, sequence_U, rows_UK, counts_U, width, table_BN.stride(0), first, block_size, topk,
            BLOCK=_SELECT_BLOCK, MAPPED=sequence_U is not None, num_warps=4,
        )  # fmt: skip
    return rows_UK, counts_U
