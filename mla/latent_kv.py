"""Rows of the paged latent cache: how they are written and gathered.

Legend: T tokens of the step, R rows of the cache (blocks of block_size rows), X width of a row, G blocks gathered.
"""

from __future__ import annotations

import torch
from torch import Tensor

from layers.norm import RMSNorm
from layers.rope import apply_rope
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
    """Store the normed latents and the rotated keys; returns the queries' rotated part, [T, H, P]. q [T, H, N + P] may be
    overwritten; latent: [T, C + P] as projected."""
    latent_dim = norm.weight.shape[0]
    rope_dim = latent_TX.shape[1] - latent_dim
    nope_dim = q_THK.shape[2] - rope_dim
    if rows.can_run(q_THK):
        rows.place_latent(q_THK, latent_TX, norm.weight, norm.eps, rope, cache_RX, slots_T)
        return q_THK[..., nope_dim:]
    # The shared key rides along as one more head, so that one rotation serves both.
    pe = torch.cat([q_THK[..., nope_dim:], latent_TX[:, None, latent_dim:]], dim=1)
    pe = apply_rope(pe, *rope)
    write(cache_RX, torch.cat([norm(latent_TX[:, :latent_dim]), pe[:, -1]], dim=-1), slots_T)
    return pe[:, :-1]


def gather(cache_RX: Tensor, blocks_G: Tensor, block_size: int) -> Tensor:
    """The rows of the named blocks, [G * block_size, X]. Whole blocks at a time: long runs of memory, short indices."""
    num_rows, width = cache_RX.shape
    blocks = cache_RX.view(num_rows // block_size, block_size * width)
    return blocks.index_select(0, blocks_G).view(-1, width)
