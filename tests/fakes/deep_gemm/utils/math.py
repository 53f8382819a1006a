"""A fake of deep_gemm.utils.math."""

from __future__ import annotations

import torch
from torch import Tensor


def ceil_div(x: int, y: int) -> int:
    return -(-x // y)


def per_token_cast_to_fp8(x: Tensor, use_ue8m0: bool, gran_k: int = 128) -> tuple[Tensor, Tensor]:
    """(e4m3 [M, K], float32 [M, ceil(K / gran_k)]); use_ue8m0: scales are powers of two."""
    assert x.dim() == 2
    rows, size = x.shape
    blocks = ceil_div(size, gran_k)
    padded = torch.nn.functional.pad(x.float(), (0, blocks * gran_k - size)).view(rows, blocks, gran_k)
    scale = padded.abs().amax(-1).clamp_min(1e-4) / 448
    if use_ue8m0:
        scale = torch.exp2(scale.log2().ceil())
    value = (padded / scale[..., None]).flatten(1)[:, :size].to(torch.float8_e4m3fn)
    return value.contiguous(), scale
