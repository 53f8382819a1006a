"""Weights as checkpoints have them: plain numbers, or fewer bits with scales.

Legend: O output features, I input features, G groups of inputs.
"""

from __future__ import annotations

import enum

import torch
from msgspec import Struct
from torch import Tensor

BLOCK = 128  # FP8 weights have one scale per BLOCK x BLOCK weights, or for each output, or one in all
MX_GROUP = 32  # inputs of an MXFP4 scale
ROWS_AT_ONCE = 8 * BLOCK  # of a weight that is dequantised: bounds the float32 scratch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = torch.tensor([*E2M1, *(-value for value in E2M1)])


class StoredForm(enum.Enum):
    """How a weight lies in a checkpoint."""

    PLAIN = "plain"
    FP8 = "fp8"  # e4m3 [O, I]; scale [ceil(O/128), ceil(I/128)], [O, 1] or [1, 1]
    INT8 = "int8"  # int8 [O, I]; scale [O, ceil(I/128)]
    INT4 = "int4"  # uint8 [O, I/2], two codes each, the first in the lower half, 8 more than meant; scale [O, G]
    INT4_ZERO = "int4_zero"  # the same, from which zero [O, G] is subtracted before they are scaled
    MXFP4 = (
        "mxfp4"  # uint8 [O, I/32, 16], two e2m1 each, the first in the lower half; scale uint8 [O, I/32], 2^(s - 127)
    )


class StoredWeight(Struct, frozen=True):
    """A weight as it lies in the checkpoint. shape: what it stands for. scale: of FP8, INT8 and INT4 float32, of MXFP4
    uint8. zero: of INT4_ZERO, float32."""

    weight: Tensor
    scale: Tensor | None
    form: StoredForm
    shape: tuple[int, ...]
    zero: Tensor | None = None

    @staticmethod
    def plain(weight: Tensor) -> StoredWeight:
        return StoredWeight(weight, None, StoredForm.PLAIN, tuple(weight.shape))

    def widened(self) -> Tensor:
        """The weights themselves: as stored, or float32 [O, I]."""
        if self.scale is None:
            return self.weight
        out_OI = torch.empty(self.shape)
        self.widen_into(out_OI)
        return out_OI

    def widen_into(self, out_OI: Tensor) -> None:
        """The same, in another tensor's dtype."""
        if self.scale is None:
            out_OI.copy_(self.weight)
            return
        for first in range(0, self.shape[0], ROWS_AT_ONCE):
            last = min(self.shape[0], first + ROWS_AT_ONCE)
            if self.form is StoredForm.FP8:
                dequantize_rows(self.weight, self.scale, first, last, out_OI)
            elif self.form is StoredForm.INT8:
                scale_OI = self.scale[first:last].repeat_interleave(BLOCK, 1)[:, : self.shape[1]]
                out_OI[first:last] = self.weight[first:last].float().mul_(scale_OI)
            elif self.form in (StoredForm.INT4, StoredForm.INT4_ZERO):
                zero = None if self.zero is None else self.zero[first:last]
                out_OI[first:last] = unpack_int4(self.weight[first:last], self.scale[first:last], self.shape[1], zero)
            else:
                out_OI[first:last] = unpack_mxfp4(self.weight[first:last], self.scale[first:last])


def dequantize_rows(weight_OI: Tensor, scale: Tensor, first: int, last: int, out_OI: Tensor) -> None:
    """Some rows of out = weight * scale, which is as StoredForm.FP8 has it; `first` is a multiple of BLOCK."""
    num_columns = weight_OI.shape[1]
    if scale.shape[1] == 1:
        scale_rows = scale.expand(-1, num_columns)
    else:
        scale_rows = scale.repeat_interleave(BLOCK, 1)[:, :num_columns]
    if is_by_rows(weight_OI, scale):
        scale_rows = scale_rows[first:last]
    elif scale.shape[0] > 1:
        scale_rows = scale_rows[first // BLOCK : -(-last // BLOCK)].repeat_interleave(BLOCK, 0)[: last - first]
    out_OI[first:last] = weight_OI[first:last].float().mul_(scale_rows)


def is_by_rows(weight_OI: Tensor, scale: Tensor) -> bool:
    """Whether FP8 weights have a scale for each output."""
    return scale.shape[0] == weight_OI.shape[0] and weight_OI.shape[0] > 1


def unpack_int4(codes: Tensor, scale_OG: Tensor, num_inputs: int, zero_OG: Tensor | None = None) -> Tensor:
    """float32 [O, I]."""
    size = -(-num_inputs // scale_OG.shape[1])
    number_OI = torch.stack((codes & 15, codes >> 4), -1).flatten(1)[:, :num_inputs].float().sub_(8)
    if zero_OG is not None:
        number_OI -= zero_OG.repeat_interleave(size, 1)[:, :num_inputs]
    return number_OI.mul_(scale_OG.repeat_interleave(size, 1)[:, :num_inputs])


def unpack_mxfp4(blocks: Tensor, scale_OG: Tensor) -> Tensor:
    """float32 [O, I]."""
    code = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    return torch.ldexp(_E2M1[code.int()], scale_OG.int()[..., None] - 127).flatten(1)
