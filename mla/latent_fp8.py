"""Rows of the latent cache in FP8: the latent as e4m3 with a scale for 128 numbers, the rotated key as it is.

A row is W bytes: C of the latent, 4 * ceil(C / 128) of its scales (float32), 2 * P of the rotated key (bfloat16). With
C = 512 and P = 64 these are the 656 bytes of FlashMLA's FP8 cache. Against bfloat16 a token costs 57 %.

Legend: T tokens, R rows of the cache, C width of the latent, P width of the rotated key, X = C + P, B blocks of 128.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128
_LARGEST = 448.0  # of float8_e4m3fn


def num_blocks(latent_dim: int) -> int:
    return -(-latent_dim // BLOCK)


def row_bytes(latent_dim: int, qk_rope_head_dim: int) -> int:
    """W. latent_dim must be a multiple of 4 and qk_rope_head_dim of 2, so that scales and keys are aligned."""
    if latent_dim % 4 or qk_rope_head_dim % 2:
        raise ValueError(
            f"latent width {latent_dim} and key width {qk_rope_head_dim}: multiples of 4 and 2 needed for FP8"
        )
    return latent_dim + 4 * num_blocks(latent_dim) + 2 * qk_rope_head_dim


def views(cache_RW: Tensor, latent_dim: int, qk_rope_head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """uint8 [R, W] -> (latent float8_e4m3fn [R, C], scale float32 [R, B], rotated key bfloat16 [R, P]): the same
    memory."""
    assert cache_RW.dtype == torch.uint8 and cache_RW.shape[1] == row_bytes(latent_dim, qk_rope_head_dim)
    key = latent_dim + 4 * num_blocks(latent_dim)
    latent_RC = cache_RW.view(torch.float8_e4m3fn)[:, :latent_dim]
    return (
        latent_RC,
        cache_RW.view(torch.float32)[:, latent_dim // 4 : key // 4],
        cache_RW.view(torch.bfloat16)[:, key // 2 :],
    )


def pack(entry_TX: Tensor, latent_dim: int) -> Tensor:
    """[latent | rotated key] in any float dtype -> uint8 [T, W], for `mla.latent_kv.write`."""
    num_tokens, width = entry_TX.shape
    blocks = num_blocks(latent_dim)
    row_TW = entry_TX.new_empty(num_tokens, row_bytes(latent_dim, width - latent_dim), dtype=torch.uint8)
    latent_TC, scale_TB, key_TP = views(row_TW, latent_dim, width - latent_dim)
    padded = F.pad(entry_TX[:, :latent_dim].float(), (0, blocks * BLOCK - latent_dim)).view(num_tokens, blocks, BLOCK)
    scale = padded.abs().amax(-1).div_(_LARGEST)
    scale_TB.copy_(scale.masked_fill_(scale == 0, 1.0))
    value = (padded / scale.unsqueeze(-1)).flatten(1)[:, :latent_dim].to(torch.float8_e4m3fn)
    latent_TC.view(torch.uint8).copy_(value.view(torch.uint8))
    key_TP.copy_(entry_TX[:, latent_dim:])
    return row_TW


def unpack(cache_RW: Tensor, latent_dim: int, qk_rope_head_dim: int) -> Tensor:
    """[R, X] in bfloat16: what `pack` was given, rounded."""
    latent_RC, scale_RB, key_RP = views(cache_RW, latent_dim, qk_rope_head_dim)
    scale_RC = scale_RB.repeat_interleave(BLOCK, 1)[:, :latent_dim]
    return torch.cat([(latent_RC.float() * scale_RC).to(torch.bfloat16), key_RP], 1)
