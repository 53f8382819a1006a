"""Weights of 8 or 4 bits with scales in the native kernel (native/src/quantize.h): the bits of moe_kernels/matrix.py.

Legend: O output features, I input features.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from native.features import Isa, isa
from native.formats import HALF_GROUP, WeightFormat
from native.library import function

BLOCK = 128  # inputs that share a scale
_X_TYPES = {torch.float32: 0, torch.bfloat16: 1}
_FORMATS = {torch.float8_e4m3fn: 1, torch.int8: 2}
_SCALE_ROWS = {torch.float8_e4m3fn: BLOCK, torch.int8: 1}
MOST_ZERO = 60000.0  # float16 has few zero points beyond
_POINTER, _NUMBER, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_halves = function("weights_halves", _INT, _INT, _POINTER, _NUMBER, _NUMBER, _NUMBER, _POINTER, _POINTER, _INT)
_quantize = function("weights_quantize", _INT, _INT, _POINTER, _NUMBER, _NUMBER, _NUMBER, _POINTER, _POINTER, _INT)


def can_run(weight_OI: Tensor) -> bool:
    usable = weight_OI.device.type == "cpu" and weight_OI.dtype in _X_TYPES and isa() > Isa.NONE
    return usable and weight_OI.stride(1) == 1 and weight_OI.numel() > 0


def quantize(weight_OI: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """weight_OI: float32 or bfloat16. dtype: int8 (a scale for 128 inputs of each output) or float8_e4m3fn (for 128 x
    128). The numbers [O, I] in dtype, and the scales, float32."""
    num_outputs, num_inputs = weight_OI.shape
    number_OI = torch.empty(num_outputs, num_inputs, dtype=dtype)
    scale = torch.empty(-(-num_outputs // _SCALE_ROWS[dtype]), -(-num_inputs // BLOCK))
    _quantize(
        _X_TYPES[weight_OI.dtype],
        _FORMATS[dtype],
        weight_OI.data_ptr(),
        weight_OI.stride(0),
        num_outputs,
        num_inputs,
        number_OI.data_ptr(),
        scale.data_ptr(),
        torch.get_num_threads(),
    )
    return number_OI, scale


def quantize_halves(weight_OI: Tensor, form: WeightFormat) -> tuple[Tensor, Tensor]:
    """weight_OI: float32 or bfloat16. Codes of 4 bits, uint8 [O, ceil(I/32) * 16], and scales [O, ceil(I/32)], float16
    or of MXFP4 bfloat16."""
    num_outputs, num_inputs = weight_OI.shape
    num_groups = -(-num_inputs // HALF_GROUP)
    codes = torch.empty(num_outputs, num_groups * HALF_GROUP // 2, dtype=torch.uint8)
    mxfp4 = form is WeightFormat.MXFP4
    scale_OG = torch.empty(num_outputs, num_groups, dtype=torch.bfloat16 if mxfp4 else torch.float16)
    _halves(
        _X_TYPES[weight_OI.dtype], int(mxfp4), weight_OI.data_ptr(), weight_OI.stride(0), num_outputs, num_inputs,
        codes.data_ptr(), scale_OG.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return codes, scale_OG


def zero_points(scale_OG: Tensor, least_OG: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For codes from 0 to 15, each the number scale * code + least: (scale, zero point) float16, such that it is
    (code - 8 - zero) * scale; and where the least number is all that is left, as the scale is next to nothing beside
    it: codes are to be 0 there. float32 [O, G] each."""
    alone = least_OG.abs() > MOST_ZERO * scale_OG.abs()
    scale = torch.where(alone, least_OG, scale_OG).half()
    zero = torch.where(alone, -9.0, -least_OG / scale.float() - 8)
    return scale, zero.nan_to_num(0.0, 0.0, 0.0).half(), alone
