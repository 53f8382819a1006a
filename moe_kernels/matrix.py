"""Weights of 8 or 4 bits with scales.

Legend: O output features, I input features, G groups of 32 inputs.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_kernels.quant import BLOCK
from native import quantize as quantize_native


class WeightFormat(enum.Enum):
    """How an expert's weights are kept in memory."""

    PLAIN = "plain"  # in the dtype of the rows
    FP8 = "fp8"  # e4m3, a scale for 128 x 128 weights
    INT8 = "int8"  # a scale for 128 inputs of each output
    MXFP4 = "mxfp4"  # e2m1, a scale for 32 inputs of each output
    INT4 = "int4"  # the same of numbers from -8 to 7


HALVES = (WeightFormat.MXFP4, WeightFormat.INT4)  # kept by the native kernels only
GROUP = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


DTYPES = {WeightFormat.FP8: torch.float8_e4m3fn, WeightFormat.INT8: torch.int8}
LARGEST = {WeightFormat.FP8: 448.0, WeightFormat.INT8: 127.0}
SCALE_ROWS = {WeightFormat.FP8: BLOCK, WeightFormat.INT8: 1}


@dataclass(frozen=True, slots=True)
class ScaledMatrix:
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
    blocks.div_(scale[:, None, :, None])
    if form is WeightFormat.INT8:
        blocks.round_()
    return ScaledMatrix(room[:num_rows, :num_columns].to(DTYPES[form]).contiguous(), scale)


def dequantize(matrix: ScaledMatrix, dtype: torch.dtype) -> Tensor:
    """[O, I] in dtype."""
    rows = matrix.scale_rows
    num_rows, num_columns = matrix.weight_OI.shape
    scale = matrix.scale.repeat_interleave(BLOCK, 1)[:, :num_columns].repeat_interleave(rows, 0)[:num_rows]
    return scale.mul_(matrix.weight_OI.float()).to(dtype)


@dataclass(frozen=True, slots=True)
class HalfMatrix:
    """Weights of 4 bits: codes uint8 [O, 16 G], two each, the first in the lower half; scale float32 [O, G], each exact
    in bfloat16. shape: (O, I)."""

    codes: Tensor
    scale_OG: Tensor
    format: WeightFormat
    shape: tuple[int, int]


def levels(form: WeightFormat) -> Tensor:
    """float32 [16]: what each code stands for."""
    if form is WeightFormat.INT4:
        return torch.arange(-8, 8, dtype=torch.float32)
    return torch.tensor([*E2M1, *(-value for value in E2M1)])


def quantize_halves(weight_OI: Tensor, form: WeightFormat) -> HalfMatrix:
    """The nearest codes; the largest of a group is the largest of the format, or less: MXFP4's scales are powers of
    two."""
    num_rows, num_columns = weight_OI.shape
    groups = -(-num_columns // GROUP)
    room = torch.zeros(num_rows, groups * GROUP)
    room[:, :num_columns] = weight_OI
    blocks = room.view(num_rows, groups, GROUP)
    largest = 7.0 if form is WeightFormat.INT4 else 6.0
    scale = blocks.abs().amax(-1).div_(largest).clamp_(min=1e-30)
    scale = scale.bfloat16().float() if form is WeightFormat.INT4 else scale.log2().ceil().exp2()
    exact = (blocks / scale[..., None])[..., None]
    code = (exact - levels(form)).abs().argmin(-1).flatten(1).to(torch.uint8)
    return HalfMatrix(code[:, ::2] | code[:, 1::2] << 4, scale, form, (num_rows, num_columns))


def dequantize_halves(matrix: HalfMatrix, dtype: torch.dtype) -> Tensor:
    """[O, I] in dtype."""
    code = torch.stack((matrix.codes & 15, matrix.codes >> 4), -1).flatten(1)
    scale = matrix.scale_OG.repeat_interleave(GROUP, 1)
    return levels(matrix.format)[code.int()].mul_(scale)[:, : matrix.shape[1]].to(dtype)
