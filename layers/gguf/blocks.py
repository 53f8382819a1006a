"""Blocks of GGUF's kinds, as the forms that weights are kept in here (layers/stored.py).

Q4_0 stays what it is. Q4_1 and Q4_K become numbers of 4 bits with a scale and a zero point for 32: rounded are only
those two, to float16. Q5 and Q6 kinds and Q8_0 become int8 with a scale for 128: rounded to the nearest of 255 steps.
Where the bits of a block lie: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.

Legend: O output features, I input features, N blocks, G groups of 32 inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from layers.gguf.header import KINDS
from layers.stored import BLOCK, StoredForm
from native import gguf as native
from native.quantize import zero_points

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
FORMS = {
    **dict.fromkeys(_PLAIN, StoredForm.PLAIN),
    "Q4_0": StoredForm.INT4,
    **dict.fromkeys(("Q4_1", "Q4_K"), StoredForm.INT4_ZERO),
    **dict.fromkeys(("Q5_0", "Q5_1", "Q8_0", "Q5_K", "Q6_K"), StoredForm.INT8),
}
DTYPES = {StoredForm.INT4: torch.uint8, StoredForm.INT4_ZERO: torch.uint8, StoredForm.INT8: torch.int8}


class Converted(NamedTuple):
    """As StoredWeight has them."""

    weight: Tensor
    scale: Tensor | None = None
    zero: Tensor | None = None


def convert(kind: str, rows_OB: Tensor) -> Converted:
    """rows_OB: uint8, the blocks of each output."""
    if kind in _PLAIN:
        return Converted(rows_OB.contiguous().view(_PLAIN[kind]))
    form = FORMS[kind]
    if native.can_run(rows_OB):
        numbers, num_bytes = KINDS[kind]
        return Converted(*native.convert(kind, rows_OB, rows_OB.shape[1] // num_bytes * numbers))
    if form is StoredForm.INT8:
        return Converted(*_int8(widen(kind, rows_OB)))
    blocks, scale_OG, least_OG = _HALVES[kind](rows_OB)
    codes = _pairs(blocks)
    if form is StoredForm.INT4:
        return Converted(codes, scale_OG)
    scale, zero, alone_OG = zero_points(scale_OG, least_OG)
    if alone_OG.any():
        codes = codes.masked_fill(alone_OG.repeat_interleave(16, 1), 0)
    return Converted(codes, scale.float(), zero.float())


def widen(kind: str, rows_OB: Tensor) -> Tensor:
    """float32 [O, I]: what the blocks stand for."""
    if kind in _PLAIN:
        return rows_OB.contiguous().view(_PLAIN[kind]).float()
    if kind in _HALVES:
        bytes_, scale, least = _HALVES[kind](rows_OB)
        code = _low_and_high(bytes_)
    else:
        code, scale, least = _WIDER[kind](rows_OB)
    grouped = code.view(*scale.shape, -1).float()
    return grouped.mul_(scale[..., None]).add_(least[..., None]).flatten(1)


def _pairs(bytes_: Tensor) -> Tensor:
    """Of a byte's two codes the second comes after all first ones of a run, [..., N]: two that follow each other into
    one byte, [O, I/2]."""
    even, odd = bytes_[..., ::2], bytes_[..., 1::2]
    return torch.cat(((even & 15) | (odd << 4), (even >> 4) | (odd & 0xF0)), -1).flatten(1)


def _int8(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    blocks = torch.zeros(weight_OI.shape[0], -(-weight_OI.shape[1] // BLOCK) * BLOCK)
    blocks[:, : weight_OI.shape[1]] = weight_OI
    blocks = blocks.view(blocks.shape[0], -1, BLOCK)
    scale = blocks.abs().amax(-1).div_(127).clamp_(min=1e-30)
    return (blocks * scale.reciprocal()[..., None]).round_().flatten(1)[:, : weight_OI.shape[1]].to(torch.int8), scale


# ---- (codes, scales [O, groups], least numbers): a number is scale * code + least. Of 4 bits: bytes [O, ..., N] whose
# lower halves are N codes and whose higher ones the next N ----

Codes = tuple[Tensor, Tensor, Tensor]


def _halves(blocks: Tensor) -> Tensor:
    """float16 at the first two of some bytes, [..., 1]."""
    return blocks[..., :2].contiguous().view(torch.float16).float()


def _low_and_high(bytes_: Tensor, dim: int = -1) -> Tensor:
    """The lower halves of some bytes, and then the higher ones."""
    return torch.cat((bytes_ & 15, bytes_ >> 4), dim)


def _q4_0(rows_OB: Tensor) -> Codes:
    blocks = rows_OB.reshape(rows_OB.shape[0], -1, 18)
    scale = _halves(blocks).squeeze(-1)
    return blocks[..., 2:], scale, -8 * scale


def _q4_1(rows_OB: Tensor) -> Codes:
    blocks = rows_OB.reshape(rows_OB.shape[0], -1, 20)
    return blocks[..., 4:], _halves(blocks).squeeze(-1), _halves(blocks[..., 2:]).squeeze(-1)


def _fifth(blocks: Tensor, at: int) -> Tensor:
    """Codes of 5 bits: the fifth ones are a number of 32 bits, the others behind it."""
    bits = torch.arange(32, dtype=torch.int32)
    high = blocks[..., at : at + 4].contiguous().view(torch.int32) >> bits & 1
    return (_low_and_high(blocks[..., at + 4 :]) | (high << 4).to(torch.uint8)).flatten(1)


def _q5_0(rows_OB: Tensor) -> Codes:
    blocks = rows_OB.reshape(rows_OB.shape[0], -1, 22)
    scale = _halves(blocks).squeeze(-1)
    return _fifth(blocks, 2), scale, -16 * scale


def _q5_1(rows_OB: Tensor) -> Codes:
    blocks = rows_OB.reshape(rows_OB.shape[0], -1, 24)
    return _fifth(blocks, 4), _halves(blocks).squeeze(-1), _halves(blocks[..., 2:]).squeeze(-1)


def _q8_0(rows_OB: Tensor) -> Codes:
    blocks = rows_OB.reshape(rows_OB.shape[0], -1, 34)
    scale = _halves(blocks).squeeze(-1)
    return blocks[..., 2:].contiguous().view(torch.int8).flatten(1), scale, torch.zeros_like(scale)


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of Q4_K and Q5_K: of 8 groups of 32, each a scale and a least number of 6 bits in 12 bytes, [O, G]."""
    packed = blocks[..., 4:16]
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scale = torch.cat((first & 63, (third & 15) | (first >> 6) << 4), -1).float() * _halves(blocks)
    least = torch.cat((second & 63, (third >> 4) | (second >> 6) << 4), -1).float() * -_halves(blocks[..., 2:])
    return scale.flatten(1), least.flatten(1)


def _q4_k(rows_OB: Tensor) -> Codes:
    blocks = rows_OB.reshape(rows_OB.shape[0], -1, 144)
    return blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32), *_k_scales(blocks)


def _q5_k(rows_OB: Tensor) -> Codes:
    blocks = rows_OB.reshape(rows_OB.shape[0], -1, 176)
    bits = torch.arange(8, dtype=torch.uint8)[:, None]
    high = (blocks[..., None, 16:48] >> bits & 1) << 4
    low = _low_and_high(blocks[..., 48:].reshape(*blocks.shape[:2], 4, 32)).view(*blocks.shape[:2], 8, 32)
    return (low | high).flatten(1), *_k_scales(blocks)


def _q6_k(rows_OB: Tensor) -> Codes:
    blocks = rows_OB.reshape(rows_OB.shape[0], -1, 210)
    halves = (*blocks.shape[:2], 2)  # of 128 numbers: 64 bytes of lower bits, 32 of higher ones
    low = _low_and_high(blocks[..., :128].reshape(*halves, 64)).view(*halves, 4, 32)
    high = blocks[..., 128:192].reshape(*halves, 1, 32)
    shift = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    code = low | (high >> shift & 3) << 4
    scale = blocks[..., 192:208].contiguous().view(torch.int8).float() * _halves(blocks[..., 208:])
    return code.flatten(1), scale.flatten(1), -32 * scale.flatten(1)


_HALVES = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k}
_WIDER = {"Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q5_K": _q5_k, "Q6_K": _q6_k}
