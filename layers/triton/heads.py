# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""What lies between the projection and the attention in one launch: norm of each query and key head, rotation, and the
write to the cache; with the roundings of layers/norm.py and layers/rope.py.

Legend: T tokens, H query heads, Hkv key/value heads, D head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from layers.triton.rope import turn

_NUMBERS = 2048  # of a program, about


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])  # as in layers/triton/attention.py
def _heads_kernel(
    x_ptr, norm_ptr, cos_ptr, sin_ptr, slots_ptr, q_ptr, k_cache_ptr, v_cache_ptr, x_stride, num_heads, num_kv_heads,
    eps, NORMED: tl.constexpr, SIZE: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One token, HEADS of its H + 2 Hkv heads."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, COLUMNS)
    num_qk = num_heads + num_kv_heads
    inside = (column < SIZE)[None, :]
    mask = (head < num_qk + num_kv_heads)[:, None] & inside
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    other = tl.where(column < SIZE // 2, column + SIZE // 2, column - SIZE // 2)
    x_ptrs = x_ptr + token * x_stride + head[:, None] * SIZE
    raw = tl.load(x_ptrs + column[None, :], mask=mask, other=0.0)
    x = raw.to(tl.float32)
    partner = tl.load(x_ptrs + other[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORMED:
        factor = tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)[:, None]
        normed = (head < num_qk)[:, None] & inside
        weight_ptrs = norm_ptr + head[:, None] * SIZE
        weight = tl.load(weight_ptrs + column[None, :], mask=normed, other=0.0).to(tl.float32)
        partner_weight = tl.load(weight_ptrs + other[None, :], mask=normed, other=0.0).to(tl.float32)
        x = ((x * factor).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
        partner = ((partner * factor).to(dtype).to(tl.float32) * partner_weight).to(dtype).to(tl.float32)
    cos = tl.load(cos_ptr + token * SIZE + column, mask=column < SIZE, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * SIZE + column, mask=column < SIZE, other=0.0).to(tl.float32)
    turned = turn(x, partner, cos[None, :], sin[None, :], dtype)
    slot = tl.load(slots_ptr + token)
    q_ptrs = q_ptr + (token * num_heads + head)[:, None] * SIZE + column[None, :]
    tl.store(q_ptrs, turned, mask=(head < num_heads)[:, None] & inside)
    k_ptrs = k_cache_ptr + (slot * num_kv_heads + head - num_heads)[:, None] * SIZE + column[None, :]
    tl.store(k_ptrs, turned, mask=((head >= num_heads) & (head < num_qk))[:, None] & inside)
    v_ptrs = v_cache_ptr + (slot * num_kv_heads + head - num_qk)[:, None] * SIZE + column[None, :]
    tl.store(v_ptrs, raw, mask=(head >= num_qk)[:, None] & mask)


def qk_norm_rope_cache(
    qkv_THD: Tensor, num_heads: int, norm_HD: Tensor | None, eps: float, rope: tuple[Tensor, Tensor],
    cache: tuple[Tensor, ...], slots_T: Tensor,
) -> Tensor:  # fmt: skip
    """As layers.attention.qk_norm_rope_cache. Caches are contiguous; slots of different tokens differ."""
    k_cache, v_cache = cache
    num_tokens, num_all, size = qkv_THD.shape
    num_kv_heads = k_cache.shape[1]
    cos_T1D, sin_T1D = rope
    assert qkv_THD.stride(2) == 1 and qkv_THD.stride(1) == size and num_all == num_heads + 2 * num_kv_heads
    assert cos_T1D.is_contiguous() and sin_T1D.is_contiguous() and cos_T1D.shape == (num_tokens, 1, size)
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and k_cache.shape[1:] == v_cache.shape[1:]
    q_THD = torch.empty(num_tokens, num_heads, size, dtype=qkv_THD.dtype, device=qkv_THD.device)
    columns = triton.next_power_of_2(size)
    heads = min(triton.next_power_of_2(num_all), max(1, _NUMBERS // columns))
    if num_tokens:
        _heads_kernel[(num_tokens, triton.cdiv(num_all, heads))](
            qkv_THD, norm_HD, cos_T1D, sin_T1D, slots_T, q_THD, k_cache, v_cache, qkv_THD.stride(0), num_heads,
            num_kv_heads, eps, NORMED=norm_HD is not None, SIZE=size, HEADS=heads, COLUMNS=columns,
        )  # fmt: skip
    return q_THD
