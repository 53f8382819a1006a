"""Rows of the index cache in FP8: a key as e4m3 behind which its scale lies, a power of two (float32).

A row of I numbers has I + 4 bytes: 132 for the 128 of DeepSeek-V3.2, where bfloat16 has 256. As a scale is a power of
two, what comes back is exact in bfloat16.

Legend: T tokens, R rows of the cache, I width of a key, W = I + 4.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LARGEST = 448.0  # of float8_e4m3fn
_LEAST = 2.0**-100  # a key of zeros has some scale


def pack(key_TI: Tensor) -> Tensor:
    """uint8 [T, W] of keys in any float dtype. I is a multiple of 4, so that scales are aligned."""
    num_tokens, width = key_TI.shape
    row_TW = key_TI.new_empty(num_tokens, width + 4, dtype=torch.uint8)
    key_TI = key_TI.float()
    mantissa_T1, exponent_T1 = (key_TI.abs().amax(-1, keepdim=True) / _LARGEST).clamp_min(_LEAST).frexp()
    scale_T1 = torch.ldexp(torch.ones_like(mantissa_T1), exponent_T1 - (mantissa_T1 == 0.5).to(exponent_T1.dtype))
    row_TW[:, :width] = (key_TI / scale_T1).to(torch.float8_e4m3fn).view(torch.uint8)
    row_TW.view(torch.float32)[:, width // 4 :] = scale_T1
    return row_TW


def unpack(row_RW: Tensor) -> Tensor:
    """float32 [R, I]: what `pack` was given, rounded."""
    width = row_RW.shape[1] - 4
    return row_RW[:, :width].view(torch.float8_e4m3fn).float() * row_RW.view(torch.float32)[:, width // 4 :]
