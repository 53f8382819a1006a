"""Linear layers whose weights stay in 8 bits (native/src/linear_packed.cpp).

Legend: T tokens, I input features, O output features.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from native.features import Isa, isa
from native.library import function

PANEL, BLOCK = 64, 128  # outputs of a panel; inputs that share a scale
X_TYPES = {torch.float32: 0, torch.bfloat16: 1}
FORMATS = {torch.float8_e4m3fn: 1, torch.int8: 2}

_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64
_fill = function("linear_packed_fill", _NUMBER, _POINTER, _POINTER, _POINTER, *[_NUMBER] * 3, ctypes.c_int)
_multiply = function(
    "linear_packed", _NUMBER, _NUMBER, _POINTER, _POINTER, _NUMBER, _POINTER, _POINTER, *[_NUMBER] * 4, ctypes.c_int
)


def can_pack(weight_OI: Tensor) -> bool:
    """Whether a layer of such weights can be kept in 8 bits here; the kernels read inputs in pairs."""
    usable = weight_OI.device.type == "cpu" and weight_OI.dtype in X_TYPES and isa() > Isa.NONE
    return usable and weight_OI.shape[1] % 2 == 0


class PackedLinear:
    """y = x W^T + b.

    weight_OI: float8_e4m3fn or int8 [O, I]. scale: float32 [ceil(O / scale_rows), ceil(I / 128)]; a weight is its number times
    the scale of its block. The weights are copied.
    """

    def __init__(self, weight_OI: Tensor, scale: Tensor, scale_rows: int) -> None:
        self._outputs, self._inputs = weight_OI.shape
        self._format = FORMATS[weight_OI.dtype]
        assert weight_OI.is_contiguous() and scale.is_contiguous() and scale.dtype is torch.float32
        num_blocks = -(-self._inputs // BLOCK)
        assert scale.shape == (-(-self._outputs // scale_rows), num_blocks) and self._inputs % 2 == 0
        panel_bytes = num_blocks * PANEL * 4 + self._inputs * PANEL
        self.packed_B = torch.empty(-(-self._outputs // PANEL) * panel_bytes, dtype=torch.uint8)
        _fill(
            self._format, self.packed_B.data_ptr(), weight_OI.data_ptr(), scale.data_ptr(), scale_rows, self._inputs,
            self._outputs, torch.get_num_threads(),
        )  # fmt: skip

    def __call__(self, x_TI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """[T, I] float32 or bfloat16 -> [T, O] in the same; bias_O in the same."""
        if x_TI.stride(1) != 1:
            x_TI = x_TI.contiguous()
        num_rows = x_TI.shape[0]
        assert x_TI.shape[1] == self._inputs and (bias_O is None or bias_O.dtype is x_TI.dtype)
        y_TO = x_TI.new_empty(num_rows, self._outputs)
        _multiply(
            X_TYPES[x_TI.dtype], self._format, self.packed_B.data_ptr(), x_TI.data_ptr(), x_TI.stride(0),
            None if bias_O is None else bias_O.data_ptr(), y_TO.data_ptr(), self._outputs, num_rows, self._inputs,
            self._outputs, torch.get_num_threads(),
        )  # fmt: skip
        return y_TO
