# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Absorbed MLA decode in Triton: every head of a sequence attends to the paged latents, which are keys and values at once.

Keys are cut into splits, so that few long sequences fill the chip too; layers/triton_merge.py joins them. Same results as
mla/reference.py within rounding.

Legend: B sequences with one query each, H heads, N, P, C, X, V widths (mla/protocol.py), R rows of the cache, G splits,
W bytes of a row in FP8 (mla/latent_fp8.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from layers.triton_device import chip_of
from layers.triton_merge import merge_splits
from layers.triton_softmax import LOG2_E, finish, fold
from mla import latent_fp8
from mla.triton_configs import DECODE, DECODE_F32, DECODE_FP8, DecodeConfig, choose


@triton.jit
def _read_latents(
    latent_ptr, scale_ptr, row, seen, column, stride, scale_stride, num_blocks, LATENT_DIM: tl.constexpr,
    SCALED: tl.constexpr, BLOCK_S: tl.constexpr, LATENT: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """[BLOCK_S, LATENT] in the dtype of the queries; 0 where nothing is."""
    mask = seen[:, None] & (column < LATENT_DIM)[None, :]
    latent = tl.load(latent_ptr + row[:, None] * stride + column[None, :], mask=mask, other=0.0)
    if SCALED:
        BLOCKS: tl.constexpr = (LATENT + 127) // 128
        block = tl.arange(0, BLOCKS)
        scale_mask = seen[:, None] & (block < num_blocks)[None, :]
        scale = tl.load(scale_ptr + row[:, None] * scale_stride + block[None, :], mask=scale_mask, other=0.0)
        blocked = tl.reshape(latent.to(tl.float32), (BLOCK_S, BLOCKS, LATENT // BLOCKS)) * scale[:, :, None]
        latent = tl.reshape(blocked, (BLOCK_S, LATENT)).to(dtype)
    return latent


@triton.jit(do_not_specialize=["table_stride", "num_splits"])
def _decode_kernel(
    q_ptr, q_pe_ptr, latent_ptr, scale_ptr, k_pe_ptr, table_ptr, lens_ptr, out_ptr, lse_ptr, q_stride_b, q_stride_h,
    q_pe_stride_b, q_pe_stride_h, latent_stride, scale_stride, k_pe_stride, table_stride, num_heads, num_splits,
    keys_per_split, block_size, num_blocks, scale, LATENT_DIM: tl.constexpr, ROPE_DIM: tl.constexpr,
    SCALED: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """out [B, G, H, C], lse [B, G, H] (natural logarithm)."""
    b, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    column, place, line = tl.arange(0, LATENT), tl.arange(0, ROPE), tl.arange(0, BLOCK_S)
    real_head = head < num_heads
    q_mask = real_head[:, None] & (column < LATENT_DIM)[None, :]
    q = tl.load(q_ptr + b * q_stride_b + head[:, None] * q_stride_h + column[None, :], mask=q_mask, other=0.0)
    pe_mask = real_head[:, None] & (place < ROPE_DIM)[None, :]
    q_pe = tl.load(
        q_pe_ptr + b * q_pe_stride_b + head[:, None] * q_pe_stride_h + place[None, :], mask=pe_mask, other=0.0
    )
    first = split * keys_per_split
    last = tl.minimum(first + keys_per_split, tl.load(lens_ptr + b).to(tl.int32))
    acc = tl.zeros((BLOCK_H, LATENT), tl.float32)
    highest = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    for at in range(first, last, BLOCK_S):
        position = at + line
        seen = position < last
        block = tl.load(table_ptr + b * table_stride + position // block_size, mask=seen, other=0).to(tl.int64)
        row = block * block_size + position % block_size
        latent = _read_latents(
            latent_ptr, scale_ptr, row, seen, column, latent_stride, scale_stride, num_blocks, LATENT_DIM, SCALED,
            BLOCK_S, LATENT, q.dtype,
        )  # fmt: skip
        k_pe_mask = seen[:, None] & (place < ROPE_DIM)[None, :]
        k_pe = tl.load(k_pe_ptr + row[:, None] * k_pe_stride + place[None, :], mask=k_pe_mask, other=0.0)
        score = tl.dot(q, tl.trans(latent), input_precision="ieee")
        score = tl.dot(q_pe, tl.trans(k_pe), score, input_precision="ieee") * (scale * LOG2_E)
        score = tl.where(seen[None, :], score, float("-inf"))
        acc, highest, total = fold(score, latent, acc, highest, total)
    out, lse = finish(acc, highest, total)
    here = (b * num_splits + split) * num_heads + head
    tl.store(out_ptr + here[:, None] * LATENT_DIM + column[None, :], out.to(out_ptr.dtype.element_ty), mask=q_mask)
    tl.store(lse_ptr + here, lse, mask=real_head)


def num_splits(config: DecodeConfig, num_sequences: int, num_heads: int, longest: int) -> int:
    """Into how many parts the keys of each sequence are cut."""
    programs = num_sequences * -(-num_heads // config.block_h)
    return max(1, min(config.programs // programs, -(-longest // config.keys)))


def decode(
    q_latent_BHC: Tensor, q_pe_BHP: Tensor, cache: Tensor, block_table_BN: Tensor, kv_lens_B: Tensor, block_size: int,
    longest: int, scale: float, config: DecodeConfig | None = None,
) -> Tensor:  # fmt: skip
    """What each head mixes of its sequence's latents: [B, H, C] in the dtype of the queries.

    q_latent (queries through W_UK) and q_pe: any strides but 1 for the last. cache: [R, X] in the dtype of the queries, or
    uint8 [R, W] in FP8. block_table and kv_lens: int64 or int32; longest: the largest of kv_lens or more.
    """
    num_sequences, heads, latent_dim = q_latent_BHC.shape
    rope_dim, device = q_pe_BHP.shape[2], q_latent_BHC.device
    assert q_latent_BHC.stride(2) == 1 and q_pe_BHP.stride(2) == 1 and block_table_BN.stride(1) == 1
    if num_sequences == 0:
        return torch.empty(q_latent_BHC.shape, dtype=q_latent_BHC.dtype, device=device)
    scaled = cache.dtype == torch.uint8
    if scaled:
        latent, row_scale, k_pe = latent_fp8.views(cache, latent_dim, rope_dim)
    else:
        latent, row_scale, k_pe = cache, None, cache[:, latent_dim:]
    table = DECODE_F32 if q_latent_BHC.dtype == torch.float32 else DECODE_FP8 if scaled else DECODE
    config = config or choose(table, chip_of(device), heads)
    splits = num_splits(config, num_sequences, heads, longest)
    per_split = -(-longest // (splits * config.block_s)) * config.block_s
    # One split needs no merging: its result is the result.
    dtype = torch.float32 if splits > 1 else q_latent_BHC.dtype
    part = torch.empty(num_sequences, splits, heads, latent_dim, dtype=dtype, device=device)
    lse = torch.empty(num_sequences, splits, heads, dtype=torch.float32, device=device)
    _decode_kernel[(num_sequences, triton.cdiv(heads, config.block_h), splits)](
        q_latent_BHC, q_pe_BHP, latent, row_scale, k_pe, block_table_BN, kv_lens_B, part, lse,
        q_latent_BHC.stride(0), q_latent_BHC.stride(1), q_pe_BHP.stride(0), q_pe_BHP.stride(1), latent.stride(0),
        0 if row_scale is None else row_scale.stride(0), k_pe.stride(0), block_table_BN.stride(0), heads, splits,
        per_split, block_size, latent_fp8.num_blocks(latent_dim), scale, LATENT_DIM=latent_dim, ROPE_DIM=rope_dim,
        SCALED=scaled, LATENT=max(16, triton.next_power_of_2(latent_dim)),
        ROPE=max(16, triton.next_power_of_2(rope_dim)),
        BLOCK_H=config.block_h, BLOCK_S=config.block_s, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return part[:, 0] if splits == 1 else merge_splits(part, lse, q_latent_BHC.dtype)
