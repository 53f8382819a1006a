"""Blocks of GGUF's kinds in the native kernel (native/src/gguf.cpp): what layers/gguf/blocks.py makes of them.

Legend: O output features, I input features, B bytes of a row.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from native.features import Isa, isa
from native.library import function
from native.quantize import BLOCK, MOST_ZERO

KINDS = {"Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14}
_HALVES = ("Q4_0", "Q4_1", "Q4_K")
_POINTER, _NUMBER, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_convert = function(
    "gguf_convert", _INT, _POINTER, _NUMBER, _NUMBER, ctypes.c_float, _POINTER, _POINTER, _POINTER, _INT
)


def can_run(rows_OB: Tensor) -> bool:
    """Whether the kernel takes such rows here."""
    return rows_OB.device.type == "cpu" and isa() > Isa.NONE and rows_OB.numel() > 0


def convert(kind: str, rows_OB: Tensor, num_inputs: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """rows_OB: uint8. Of 4 bits codes uint8 [O, I / 2], scales and (but for Q4_0) zero points [O, I / 32]; of
    others int8 [O, I] and scales [O, ceil(I / 128)]; scales and zero points are float32."""
    num_outputs, halves = rows_OB.shape[0], kind in _HALVES
    rows_OB = rows_OB.contiguous()
    groups = num_inputs // 32 if halves else -(-num_inputs // BLOCK)
    weight = torch.empty(num_outputs, num_inputs // 2 if halves else num_inputs, dtype=torch.uint8)
    scale_OG, zero_OG = torch.empty(num_outputs, groups), torch.empty(num_outputs, groups)
    _convert(
        KINDS[kind], rows_OB.data_ptr(), num_outputs, num_inputs, MOST_ZERO, weight.data_ptr(), scale_OG.data_ptr(),
        zero_OG.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    if not halves:
        return weight.view(torch.int8), scale_OG, None
    return weight, scale_OG, None if kind == "Q4_0" else zero_OG
