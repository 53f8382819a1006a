"""Weights of 8 bits with scales in the native kernel (native/src/quantize.h): the bits of moe_kernels/matrix.py.

Legend: O output features, I input features.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from native.features import Isa, isa
from native.library import function

BLOCK = 128  # inputs that share a scale
_X_TYPES = {torch.float32: 0, torch.bfloat16: 1}
_FORMATS = {torch.float8_e4m3fn: 1, torch.int8: 2}
_SCALE_ROWS = {torch.float8_e4m3fn: BLOCK, torch.int8: 1}
_POINTER, _NUMBER, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
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
