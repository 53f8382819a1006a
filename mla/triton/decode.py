# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment,misc"
"""Absorbed MLA decode in Triton: every head of a sequence attends to the paged latents, which are keys and values at
once.

Keys are cut into splits, so that few long sequences fill the chip too; layers/triton/merge.py joins them. Same results
as mla/reference.py within rounding.

Legend: B sequences with one query each, H heads, N, P, C, X, V widths (mla/protocol.py), R rows of the cache, G splits,
W bytes of a row in FP8 (mla/latent_fp8.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from layers.triton.attention import rows_of, split_of
from layers.triton.device import chip_of
from layers.triton.merge import merge_splits
from layers.triton.softmax import LOG2_E, finish, fold
from mla import latent_fp8
from mla.triton.configs import DecodeConfig, choose


@triton.jit(do_not_specialize=["table_stride", "num_splits"], do_not_specialize_on_alignment=["table_ptr", "lens_ptr"])
def _decode_kernel(
    q_ptr, q_pe_ptr, latent_ptr, k_pe_ptr, table_ptr, lens_ptr, out_ptr, lse_ptr, q_stride_b, q_stride_h,
    q_pe_stride_b, q_pe_stride_h, latent_stride, k_pe_stride, table_stride, num_heads, num_splits, block_size, scale,
    LATENT_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """out [B, G, H, C], lse [B, G, H] (natural logarithm)."""
    b, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    first, last = split_of(tl.load(lens_ptr + b).to(tl.int32), split, num_splits, BLOCK_S)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    column, place, line = tl.arange(0, LATENT), tl.arange(0, ROPE), tl.arange(0, BLOCK_S)
    real_head = head < num_heads
    q_mask = real_head[:, None] & (column < LATENT_DIM)[None, :]
    q = tl.load(q_ptr + b * q_stride_b + head[:, None] * q_stride_h + column[None, :], mask=q_mask, other=0.0)
    pe_mask = real_head[:, None] & (place < ROPE_DIM)[None, :]
    q_pe = tl.load(
        q_pe_ptr + b * q_pe_stride_b + head[:, None] * q_pe_stride_h + place[None, :], mask=pe_mask, other=0.0
    )
    acc = tl.zeros((BLOCK_H, LATENT), tl.float32)
    highest = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    for at in range(first, last, BLOCK_S):
        position = at + line
        seen = position < last
        row = rows_of(position, seen, table_ptr + b * table_stride, block_size)
        latent_mask = seen[:, None] & (column < LATENT_DIM)[None, :]
        latent = tl.load(latent_ptr + row[:, None] * latent_stride + column[None, :], mask=latent_mask, other=0.0)
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


@triton.jit(do_not_specialize=["table_stride", "num_splits"], do_not_specialize_on_alignment=["table_ptr", "lens_ptr"])
def _decode_fp8_kernel(
    q_ptr, q_pe_ptr, latent_ptr, scale_ptr, k_pe_ptr, table_ptr, lens_ptr, out_ptr, lse_ptr, q_stride_b, q_stride_h,
    q_pe_stride_b, q_pe_stride_h, latent_stride, scale_stride, k_pe_stride, table_stride, num_heads, num_splits,
    block_size, scale, LATENT_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, ROPE: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As `_decode_kernel`, latents in FP8 in BLOCKS blocks. A block's scales, one per key, are applied to its part of
    the scores and to the weights, not to the latents: 8 bits become 16 exactly, and no latent in 32 bits takes room."""
    b, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    first, last = split_of(tl.load(lens_ptr + b).to(tl.int32), split, num_splits, BLOCK_S)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    column, place, line = tl.arange(0, BLOCK), tl.arange(0, ROPE), tl.arange(0, BLOCK_S)
    real_head = head < num_heads
    pe_mask = real_head[:, None] & (place < ROPE_DIM)[None, :]
    q_pe = tl.load(
        q_pe_ptr + b * q_pe_stride_b + head[:, None] * q_pe_stride_h + place[None, :], mask=pe_mask, other=0.0
    )
    q_ptrs = q_ptr + b * q_stride_b + head[:, None] * q_stride_h + column[None, :]
    qs, accs = (), ()
    for i in tl.static_range(BLOCKS):
        q_mask = real_head[:, None] & (i * BLOCK + column < LATENT_DIM)[None, :]
        qs = qs + (tl.load(q_ptrs + i * BLOCK, mask=q_mask, other=0.0),)  # noqa: RUF005 (Triton has no unpacking)
        accs = accs + (tl.zeros((BLOCK_H, BLOCK), tl.float32),)  # noqa: RUF005
    highest = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    for at in range(first, last, BLOCK_S):
        position = at + line
        seen = position < last
        row = rows_of(position, seen, table_ptr + b * table_stride, block_size)
        k_pe_mask = seen[:, None] & (place < ROPE_DIM)[None, :]
        k_pe = tl.load(k_pe_ptr + row[:, None] * k_pe_stride + place[None, :], mask=k_pe_mask, other=0.0)
        score = tl.dot(q_pe, tl.trans(k_pe.to(q_pe.dtype)), input_precision="ieee")
        latents, scales = (), ()
        for i in tl.static_range(BLOCKS):
            mask = seen[:, None] & (i * BLOCK + column < LATENT_DIM)[None, :]
            latent_ptrs = latent_ptr + row[:, None] * latent_stride + i * BLOCK + column[None, :]
            latents = latents + (tl.load(latent_ptrs, mask=mask, other=0.0).to(q_pe.dtype),)  # noqa: RUF005
            scales = scales + (tl.load(scale_ptr + row * scale_stride + i, mask=seen, other=0.0),)  # noqa: RUF005
            score += tl.dot(qs[i], tl.trans(latents[i]), input_precision="ieee") * scales[i][None, :]
        score = tl.where(seen[None, :], score * (scale * LOG2_E), float("-inf"))
        higher = tl.maximum(highest, tl.max(score, 1))
        weight, shrink = tl.exp2(score - higher[:, None]), tl.exp2(highest - higher)
        highest, total = higher, total * shrink + tl.sum(weight, 1)
        sums = ()
        for i in tl.static_range(BLOCKS):
            scaled = (weight * scales[i][None, :]).to(q_pe.dtype)
            part = tl.dot(scaled, latents[i], accs[i] * shrink[:, None], input_precision="ieee")
            sums = sums + (part,)  # noqa: RUF005
        accs = sums
    here = (b * num_splits + split) * num_heads + head
    out_ptrs = out_ptr + here[:, None] * LATENT_DIM + column[None, :]
    for i in tl.static_range(BLOCKS):
        out, _ = finish(accs[i], highest, total)
        out_mask = real_head[:, None] & (i * BLOCK + column < LATENT_DIM)[None, :]
        tl.store(out_ptrs + i * BLOCK, out.to(out_ptr.dtype.element_ty), mask=out_mask)
    _, lse = finish(accs[0], highest, total)
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

    q_latent (queries through W_UK) and q_pe: any strides but 1 for the last. cache: [R, X] in the dtype of the queries,
    or uint8 [R, W] in FP8. block_table and kv_lens: int64 or int32; longest: the largest of kv_lens or more.
    """
    num_sequences, heads, latent_dim = q_latent_BHC.shape
    qk_rope_head_dim, device = q_pe_BHP.shape[2], q_latent_BHC.device
    assert q_latent_BHC.stride(2) == 1 and q_pe_BHP.stride(2) == 1 and block_table_BN.stride(1) == 1
    if num_sequences == 0:
        return torch.empty(q_latent_BHC.shape, dtype=q_latent_BHC.dtype, device=device)
    scaled = cache.dtype == torch.uint8
    if config is None:
        kernel = "mla_decode_fp8" if scaled else "mla_decode"
        config = choose("mla_decode_f32" if q_pe_BHP.dtype == torch.float32 else kernel, chip_of(device), heads)
    splits = num_splits(config, num_sequences, heads, longest)
    # One split needs no merging: its result is the result.
    dtype = torch.float32 if splits > 1 else q_latent_BHC.dtype
    part = torch.empty(num_sequences, splits, heads, latent_dim, dtype=dtype, device=device)
    lse = torch.empty(num_sequences, splits, heads, dtype=torch.float32, device=device)
    grid = (num_sequences, triton.cdiv(heads, config.block_h), splits)
    queries = q_latent_BHC, q_pe_BHP
    q_strides = *q_latent_BHC.stride()[:2], *q_pe_BHP.stride()[:2]
    results = block_table_BN, kv_lens_B, part, lse
    sizes = block_table_BN.stride(0), heads, splits, block_size, scale
    options = {
        "LATENT_DIM": latent_dim, "ROPE_DIM": qk_rope_head_dim,
        "ROPE": max(16, triton.next_power_of_2(qk_rope_head_dim)),
        "BLOCK_H": config.block_h, "BLOCK_S": config.block_s, "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }  # fmt: skip
    if scaled:
        latent, row_scale, k_pe = latent_fp8.views(cache, latent_dim, qk_rope_head_dim)
        strides = latent.stride(0), row_scale.stride(0), k_pe.stride(0)
        _decode_fp8_kernel[grid](
            *queries, latent, row_scale, k_pe, *results, *q_strides, *strides, *sizes,
            BLOCKS=latent_fp8.num_blocks(latent_dim), BLOCK=latent_fp8.BLOCK, **options,
        )  # fmt: skip
    else:
        _decode_kernel[grid](
            *queries, cache, cache[:, latent_dim:], *results, *q_strides, cache.stride(0), cache.stride(0), *sizes,
            LATENT=max(16, triton.next_power_of_2(latent_dim)), **options,
        )  # fmt: skip
    return part[:, 0] if splits == 1 else merge_splits(part, lse, q_latent_BHC.dtype)
