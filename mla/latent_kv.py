"""Rows of the paged latent cache: how they are written and gathered. A cache of bytes has them in FP8
(mla/latent_fp8.py).

Legend: T tokens of the step, R rows of the cache (blocks of block_size rows), X width of a row, G blocks gathered, U
rows gathered.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from layers import choice
from layers.norm import RMSNorm
from layers.rope import apply_rope
from mla import latent_fp8
from native import rows


def write(cache_RX: Tensor, entry_TX: Tensor, slots_T: Tensor) -> None:
    """Store one row per token: the latent after its norm, then the rotated key. slots_T: int64 [T]."""
    cache_RX.index_copy_(0, slots_T, entry_TX)


def place(
    q_THK: Tensor,
    latent_TX: Tensor,
    norm: RMSNorm,
    rope: tuple[Tensor, Tensor],
    cache_RX: Tensor,
    slots_T: Tensor,
) -> Tensor:
    """Store the normed latents and the rotated keys; returns the queries' rotated part, [T, H, P]. q [T, H, N + P] may
    be overwritten; latent: [T, C + P] as projected."""
    latent_dim = norm.weight.shape[0]
    qk_rope_head_dim = latent_TX.shape[1] - latent_dim
    qk_nope_head_dim = q_THK.shape[2] - qk_rope_head_dim
    if choice.on_gpu(q_THK.device):
        write_entry: Callable[..., None] = choice.triton_implementation("mla.triton.cache", "write_entry")
        write_entry(latent_TX, norm.weight, norm.eps, *rope, slots_T, cache_RX)
        return apply_rope(q_THK[..., qk_nope_head_dim:], *rope)
    scaled = cache_RX.dtype == torch.uint8
    if rows.can_run(q_THK) and not scaled:
        rows.place_latent(q_THK, latent_TX, norm.weight, norm.eps, rope, cache_RX, slots_T)
        return q_THK[..., qk_nope_head_dim:]
    # The shared key rides along as one more head, so that one rotation serves both.
    pe = torch.cat([q_THK[..., qk_nope_head_dim:], latent_TX[:, None, latent_dim:]], dim=1)
    pe = apply_rope(pe, *rope)
    entry_TX = torch.cat([norm(latent_TX[:, :latent_dim]), pe[:, -1]], dim=-1)
    write(cache_RX, latent_fp8.pack(entry_TX, latent_dim) if scaled else entry_TX, slots_T)
    return pe[:, :-1]


def gather(cache_RX: Tensor, blocks_G: Tensor, block_size: int) -> Tensor:
    """The rows of the named blocks, [G * block_size, X]. Whole blocks at a time: long runs of memory, short indices."""
    num_rows, width = cache_RX.shape
    blocks = cache_RX.view(num_rows // block_size, block_size * width)
    return blocks.index_select(0, blocks_G).view(-1, width)


def widen(rows_UX: Tensor, latent_dim: int, qk_rope_head_dim: int, dtype: torch.dtype) -> Tensor:
    """Rows as they lie in the cache, [U, X] in dtype."""
    return (
        latent_fp8.unpack(rows_UX, latent_dim, qk_rope_head_dim).to(dtype) if rows_UX.dtype == torch.uint8 else rows_UX
    )
