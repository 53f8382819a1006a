"""Weights of 8 or 4 bits with scales.

Legend: O output features, I input features, G groups of 32 inputs.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from msgspec import Struct
from torch import Tensor

from moe_kernels.quant import BLOCK
from native import quantize as quantize_native
from native.formats import HALF_GROUP, HALVES, WeightFormat

__all__ = [
    "DTYPES",
    "E2M1",
    "HALVES",
    "LARGEST",
    "SCALE_ROWS",
    "HalfMatrix",
    "ScaledMatrix",
    "WeightFormat",
    "dequantize",
    "dequantize_halves",
    "levels",
    "pair_codes",
    "quantize",
    "quantize_halves",
]


GROUP = HALF_GROUP
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


DTYPES = {WeightFormat.FP8: torch.float8_e4m3fn, WeightFormat.INT8: torch.int8}
LARGEST = {WeightFormat.FP8: 448.0, WeightFormat.INT8: 127.0}
SCALE_ROWS = {WeightFormat.FP8: BLOCK, WeightFormat.INT8: 1}
HALF_MOST = torch.finfo(torch.float16).max


class ScaledMatrix(Struct, frozen=True):
    """weight [O, I] float8_e4m3fn or int8; scale float32 [ceil(O / scale_rows), ceil(I / 128)]: a weight is its number
    times the scale of its block."""

    weight_OI: Tensor
    scale: Tensor

    @property
    def format(self) -> WeightFormat:
        return WeightFormat.INT8 if self.weight_OI.dtype is torch.int8 else WeightFormat.FP8

    @property
    def scale_rows(self) -> int:
        """Outputs that have a scale in common: those of the format, or 1."""
        by_rows = self.scale.shape[0] == self.weight_OI.shape[0] > 1
        return 1 if by_rows else SCALE_ROWS[self.format]


def quantize(weight_OI: Tensor, form: WeightFormat) -> ScaledMatrix:
    """The nearest numbers of 8 bits: the largest of a block is the largest that the format has."""
    if quantize_native.can_run(weight_OI):
        return ScaledMatrix(*quantize_native.quantize(weight_OI, DTYPES[form]))
    rows, largest = SCALE_ROWS[form], LARGEST[form]
    num_rows, num_columns = weight_OI.shape
    num_row_blocks, num_blocks = -(-num_rows // rows), -(-num_columns // BLOCK)
    if (num_rows, num_columns) == (num_row_blocks * rows, num_blocks * BLOCK):
        room = weight_OI.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    else:
        room = torch.zeros(num_row_blocks * rows, num_blocks * BLOCK, device=weight_OI.device)
        room[:num_rows, :num_columns] = weight_OI
    blocks = room.view(num_row_blocks, rows, num_blocks, BLOCK)
    scale = blocks.abs().amax((1, 3)).div_(largest).clamp_(min=1e-30)
    blocks.mul_(scale.reciprocal()[:, None, :, None])
    if form is WeightFormat.INT8:
        blocks.round_()
    return ScaledMatrix(room[:num_rows, :num_columns].to(DTYPES[form]).contiguous(), scale)


def dequantize(matrix: ScaledMatrix, dtype: torch.dtype) -> Tensor:
    """[O, I] in dtype."""
    rows = matrix.scale_rows
    num_rows, num_columns = matrix.weight_OI.shape
    scale = matrix.scale.repeat_interleave(BLOCK, 1)[:, :num_columns].repeat_interleave(rows, 0)[:num_rows]
    return scale.mul_(matrix.weight_OI.float()).to(dtype)


class HalfMatrix(Struct, frozen=True):
    """Weights of 4 bits: codes uint8 [O, 16 G], two each, the first in the lower half; scale_OG float16, of MXFP4
    bfloat16; zero_OG float16, of INT4_ZERO only. shape: (O, I)."""

    codes: Tensor
    scale_OG: Tensor
    format: WeightFormat
    shape: tuple[int, int]
    zero_OG: Tensor | None = None

    @property
    def words(self) -> Tensor:
        """The scales, and behind them the zero points, as the kernels take them."""
        parts = (self.scale_OG,) if self.zero_OG is None else (self.scale_OG, self.zero_OG)
        return torch.stack(parts)


def levels(form: WeightFormat) -> Tensor:
    """float32 [16]: what each code stands for."""
    if form is WeightFormat.MXFP4:
        return torch.tensor([*E2M1, *(-value for value in E2M1)])
    return torch.arange(-8, 8, dtype=torch.float32)


def quantize_halves(weight_OI: Tensor, form: WeightFormat) -> HalfMatrix:
    """The nearest codes with the scale, among a few, whose squared error is least."""
    shape = (weight_OI.shape[0], weight_OI.shape[1])
    if form is WeightFormat.INT4_ZERO:
        return _quantize_zero(_groups(weight_OI), shape)
    if quantize_native.can_run(weight_OI):
        return HalfMatrix(*quantize_native.quantize_halves(weight_OI, form), form, shape)
    blocks = _groups(weight_OI)
    error = scale = code = torch.empty(0)
    for tried in _scales(blocks, form):
        inverse = torch.where(tried == 0, 0.0, tried.reciprocal())
        found = _nearest(blocks * inverse[..., None], form)
        lost = (levels(form)[found] * tried[..., None] - blocks).square().sum(-1)
        better = lost < error if error.numel() else torch.ones_like(lost, dtype=torch.bool)
        error, scale = (torch.where(better, new, old) if old.numel() else new
                        for new, old in ((lost, error), (tried, scale)))  # fmt: skip
        code = torch.where(better[..., None], found, code) if code.numel() else found
    dtype = torch.bfloat16 if form is WeightFormat.MXFP4 else torch.float16
    return HalfMatrix(pair_codes(code.flatten(1)), scale.to(dtype), form, shape)


def pair_codes(code_OI: Tensor) -> Tensor:
    """uint8: two codes of 4 bits in each, the first in the lower half."""
    code_OI = code_OI.to(torch.uint8)
    return code_OI[:, ::2] | code_OI[:, 1::2] << 4


def _quantize_zero(blocks: Tensor, shape: tuple[int, int]) -> HalfMatrix:
    """The least number of a group has the code 0, the largest 15."""
    least, most = blocks.amin(-1), blocks.amax(-1)
    scale = (most - least) / 15
    exact = torch.where(scale[..., None] > 0, (blocks - least[..., None]) / scale[..., None], 0.0)
    scale_OG, zero_OG, alone_OG = quantize_native.zero_points(scale, least)
    code_OI = torch.where(alone_OG[..., None], 0.0, exact.round().clamp(0, 15)).flatten(1)
    return HalfMatrix(pair_codes(code_OI), scale_OG, WeightFormat.INT4_ZERO, shape, zero_OG)


def _groups(weight_OI: Tensor) -> Tensor:
    """float32 [O, G, 32], with zeros at the end."""
    num_rows, num_columns = weight_OI.shape
    groups = -(-num_columns // GROUP)
    room = torch.zeros(num_rows, groups * GROUP)
    room[:, :num_columns] = weight_OI
    return room.view(num_rows, groups, GROUP)


def _scales(blocks: Tensor, form: WeightFormat) -> list[Tensor]:
    """float32 [O, G] each. The number of largest size is the outermost code of its sign, or a little beyond it, unless
    the scale would be beyond float16. MXFP4: the least power of two with which nothing is beyond 6, and half of it."""
    largest = blocks.abs().amax(-1)
    if form is WeightFormat.MXFP4:
        least = (largest / 6).clamp_(min=2.0**-126).log2().ceil().exp2()
        return [least, least / 2]
    signed = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)).squeeze(-1)
    exact = (base * part for base in (signed / -8, largest / 7) for part in (1.0, 0.93, 0.86))
    return [scale.clamp(-HALF_MOST, HALF_MOST).half().float() for scale in exact]


def _nearest(exact: Tensor, form: WeightFormat) -> Tensor:
    """The codes, int64; halfway MXFP4 takes the smaller number."""
    if form is not WeightFormat.MXFP4:
        return exact.round().clamp(-8, 7).long() + 8
    between = torch.tensor([(low + high) / 2 for low, high in pairwise(E2M1)])
    return torch.bucketize(exact.abs(), between) + 8 * (exact < 0).long()


def dequantize_halves(matrix: HalfMatrix, dtype: torch.dtype) -> Tensor:
    """[O, I] in dtype."""
    code = torch.stack((matrix.codes & 15, matrix.codes >> 4), -1).flatten(1)
    number = levels(matrix.format)[code.int()]
    if matrix.zero_OG is not None:
        number -= matrix.zero_OG.float().repeat_interleave(GROUP, 1)
    scale = matrix.scale_OG.float().repeat_interleave(GROUP, 1)
    return number.mul_(scale)[:, : matrix.shape[1]].to(dtype)
