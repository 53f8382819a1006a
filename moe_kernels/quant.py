"""Rows of hidden states as FP8 with one scale per block, as DeepSeek-V3 sends them to experts (arXiv:2412.19437, 3.3).

Legend: R rows, D hidden size, B = ceil(D / 128) blocks of a row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128
_LARGEST = 448.0  # of float8_e4m3fn


def num_blocks(hidden_size: int) -> int:
    return -(-hidden_size // BLOCK)


def quantize_rows(x_RD: Tensor) -> tuple[Tensor, Tensor]:
    """(float8_e4m3fn [R, D], scale float32 [R, B]): x is about value * scale of its block. The last block may be
    shorter.

    A scale is the block's largest magnitude / 448, or 1 where all are zero. NaN and infinity come out as NaN.
    """
    hidden_size = x_RD.shape[1]
    blocks = num_blocks(hidden_size)
    x_RBI = F.pad(x_RD.float(), (0, blocks * BLOCK - hidden_size)).view(x_RD.shape[0], blocks, BLOCK)
    scale_RB = x_RBI.abs().amax(-1).div_(_LARGEST)
    scale_RB.masked_fill_(scale_RB == 0, 1.0)
    value_RD = (x_RBI / scale_RB.unsqueeze(-1)).flatten(1)[:, :hidden_size]
    return value_RD.to(torch.float8_e4m3fn), scale_RB


def dequantize_rows(value: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """value float8_e4m3fn [..., D], scale float32 [..., B] -> value * scale, in `dtype`."""
    scale_D = scale.repeat_interleave(BLOCK, -1)[..., : value.shape[-1]]
    return value.float().mul_(scale_D).to(dtype)


def silu_mul_quantize(gate_up: Tensor, rows_S: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """[..., 2F] -> (float8_e4m3fn [..., F], scale float32 [..., B]): `quantize_rows` of silu(first half) * second half,
    rounded in between to gate_up's dtype. rows_S: of [S, C, 2F], how many rows of each slot count; the others may hold
    anything."""
    width = gate_up.shape[-1] // 2
    hidden = F.silu(gate_up[..., :width]) * gate_up[..., width:]
    value, scale = quantize_rows(hidden.flatten(0, -2))
    return value.view(hidden.shape), scale.view(*hidden.shape[:-1], scale.shape[-1])
