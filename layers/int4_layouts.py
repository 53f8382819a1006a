"""Weights of 4 bits as AutoAWQ and GPTQ lay them out, as layers/stored.py has them.

Both have the inputs first, int32 with eight codes each, scales and zero points for groups of inputs, and no word about
which of the two they are: sizes tell.

Legend: O output features, I input features, G groups of inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SHIFTS = torch.arange(0, 32, 4, dtype=torch.int32)
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # of eight outputs that follow each other
CENTRE = 8  # a zero point that all have is none


def _unpacked(words: Tensor) -> Tensor:
    """uint8 [..., N] of int32 [..., N / 8], the first in the lowest bits."""
    return ((words[..., None] >> _SHIFTS) & 15).to(torch.uint8).flatten(-2)


def is_awq(qweight: Tensor, scales: Tensor) -> bool:
    """[I, O / 8]; GPTQ's is [I / 8, O]."""
    return qweight.shape[1] * 8 == scales.shape[1]


def zero_points(qzeros: Tensor, awq: bool) -> Tensor:
    """uint8 [G, O]. GPTQ's files have one less than is meant."""
    if awq:
        return _unpacked(qzeros).view(qzeros.shape[0], -1, 8)[..., _AWQ_PLACES].flatten(1)
    return (_unpacked(qzeros) + 1) & 15


def codes(qweight: Tensor, awq: bool) -> Tensor:
    """uint8 [O, I / 2], two codes each."""
    if awq:
        code_IO = _unpacked(qweight).view(qweight.shape[0], -1, 8)[..., _AWQ_PLACES].flatten(1)
    else:
        code_IO = _unpacked(qweight.T.contiguous()).T
    return (code_IO[::2] | code_IO[1::2] << 4).T.contiguous()


def in_order(g_idx: Tensor, num_groups: int) -> bool:
    """Whether inputs lie in their groups one after another: not by the size of what they met (act-order)."""
    size = -(-g_idx.shape[0] // num_groups)
    return torch.equal(g_idx.long(), torch.arange(g_idx.shape[0]) // size)
