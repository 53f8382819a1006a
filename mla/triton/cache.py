# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""A token's row of the latent cache in one launch: the latent normalised, the shared key rotated, both written; in FP8
too.

Legend: T tokens, R rows of the cache; C, P, X widths (mla/protocol.py), W bytes of a row in FP8, B blocks
(mla/latent_fp8.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from layers.triton.norm import normalise
from layers.triton.rope import turn
from mla import latent_fp8

_LARGEST = tl.constexpr(448.0)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])  # as in layers/triton/attention.py
def _entry_kernel(
    entry_ptr, weight_ptr, cos_ptr, sin_ptr, slots_ptr, latent_ptr, scale_ptr, k_pe_ptr, entry_stride, latent_stride,
    scale_stride, k_pe_stride, eps, LATENT_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, SCALED: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """One token. BLOCKS * BLOCK numbers have room for a latent; SCALED: a block has one scale."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    dtype: tl.constexpr = entry_ptr.dtype.element_ty
    column, place = tl.arange(0, BLOCKS * BLOCK), tl.arange(0, ROPE)
    inside, there = column < LATENT_DIM, place < ROPE_DIM
    x = tl.load(entry_ptr + token * entry_stride + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    latent = normalise(x, weight, LATENT_DIM, eps, dtype)
    if SCALED:
        blocked = tl.reshape(latent.to(tl.float32), (BLOCKS, BLOCK))
        scale = tl.div_rn(tl.max(tl.abs(blocked), 1), _LARGEST)
        scale = tl.where(scale == 0.0, 1.0, scale)
        value = tl.reshape(tl.div_rn(blocked, scale[:, None]), (BLOCKS * BLOCK,)).to(tl.float8e4nv)
        tl.store(latent_ptr + slot * latent_stride + column, value, mask=inside)
        block = tl.arange(0, BLOCKS)
        tl.store(scale_ptr + slot * scale_stride + block, scale, mask=block * BLOCK < LATENT_DIM)
    else:
        tl.store(latent_ptr + slot * latent_stride + column, latent, mask=inside)
    key_ptr = entry_ptr + token * entry_stride + LATENT_DIM
    other = tl.where(place < ROPE_DIM // 2, place + ROPE_DIM // 2, place - ROPE_DIM // 2)
    key = tl.load(key_ptr + place, mask=there, other=0.0).to(tl.float32)
    partner = tl.load(key_ptr + other, mask=there, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + token * ROPE_DIM + place, mask=there, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * ROPE_DIM + place, mask=there, other=0.0).to(tl.float32)
    turned = turn(key, partner, cos, sin, dtype)
    tl.store(k_pe_ptr + slot * k_pe_stride + place, turned.to(k_pe_ptr.dtype.element_ty), mask=there)


def write_entry(
    entry_TX: Tensor, weight_C: Tensor, eps: float, cos_T1P: Tensor, sin_T1P: Tensor, slots_T: Tensor, cache: Tensor
) -> None:
    """Norm of the latent (layers.norm.rms_norm), rotation of the key (layers.rope.apply_rope), and the write to rows
    slots_T (int64, all different) of cache: [R, X] in entry's dtype, or uint8 [R, W] as mla.latent_fp8.pack makes them.

    entry_TX: [latent | key] as the projection gives them, rows of any stride.
    """
    num_tokens, width = entry_TX.shape
    latent_dim, qk_rope_head_dim = weight_C.shape[0], width - weight_C.shape[0]
    assert entry_TX.stride(1) == 1 and cache.is_contiguous() and cos_T1P.is_contiguous() and sin_T1P.is_contiguous()
    assert cos_T1P.shape == sin_T1P.shape == (num_tokens, 1, qk_rope_head_dim)
    scaled = cache.dtype == torch.uint8
    if scaled:
        latent, scale, k_pe = latent_fp8.views(cache, latent_dim, qk_rope_head_dim)
    else:
        latent, scale, k_pe = cache, None, cache[:, latent_dim:]
    blocks = triton.next_power_of_2(latent_fp8.num_blocks(latent_dim))
    if num_tokens:
        _entry_kernel[(num_tokens,)](
            entry_TX, weight_C, cos_T1P, sin_T1P, slots_T, latent, scale, k_pe, entry_TX.stride(0), latent.stride(0),
            0 if scale is None else scale.stride(0), k_pe.stride(0), eps,
            LATENT_DIM=latent_dim, ROPE_DIM=qk_rope_head_dim,
            SCALED=scaled, BLOCKS=blocks, BLOCK=latent_fp8.BLOCK, ROPE=triton.next_power_of_2(qk_rope_head_dim),
        )  # fmt: skip
