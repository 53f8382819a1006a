"""Weights of 8 bits with scales.

Legend: O output features, I input features.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_kernels.quant import BLOCK


class WeightFormat(enum.Enum):
    """How an expert's weights are kept in memory."""

    PLAIN = "plain"  # in the dtype of the rows
    FP8 = "fp8"  # e4m3, a scale for 128 x 128 weights
    INT8 = "int8"  # a scale for 128 inputs of each output


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
