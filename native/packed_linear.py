"""Linear layers whose weights are packed, of 8 or 4 bits or as they are (native/src/linear_packed.cpp).

Legend: T tokens, I input features, O output features.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from native.choice import fixed_order
from native.features import Isa, isa
from native.formats import HALF_GROUP, HALVES, WeightFormat
from native.library import function
from native.linear import use_large_pages

PANEL, BLOCK = 64, 128  # outputs of a panel; inputs that share a scale
X_TYPES = {torch.float32: 0, torch.bfloat16: 1}
_WHOLE = (WeightFormat.PLAIN, WeightFormat.BF16)  # have no scales
FORMATS = {torch.float8_e4m3fn: WeightFormat.FP8, torch.int8: WeightFormat.INT8}

_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64
_fill = function("linear_packed_fill", _NUMBER, _NUMBER, _POINTER, _POINTER, _POINTER, *[_NUMBER] * 3, ctypes.c_int)
_multiply = function(
    "linear_packed", _NUMBER, _NUMBER, _POINTER, _POINTER, _NUMBER, _POINTER, _POINTER, *[_NUMBER] * 4, ctypes.c_int
)


def can_pack(weight_OI: Tensor) -> bool:
    """Whether a layer of such weights can be packed here; the kernels read inputs in pairs."""
    usable = weight_OI.device.type == "cpu" and weight_OI.dtype in X_TYPES and isa() > Isa.NONE
    return usable and weight_OI.shape[1] % 2 == 0


def is_bfloat16(weight_OI: Tensor) -> bool:
    """Whether a layer of such weights, float32, can be packed in half the bytes (BF16) without losing anything: no
    number has more bits than bfloat16."""
    fits = weight_OI.dtype is torch.float32 and can_pack(weight_OI)
    return fits and not bool((weight_OI.view(torch.int32) & 0xFFFF).any())


def is_faster_packed(weight_OI: Tensor) -> bool:
    """Whether a layer of such weights, kept as they are, is better packed: more than a few rows take less time, one
    no more; and packed weights are multiplied in one order, whatever the number of rows. Of bfloat16 with AVX512 alone
    `linear` is taken (not measured there); of float32 with AVX2 one row and many take longer packed."""
    if weight_OI.dtype is torch.bfloat16:
        faster = isa() is Isa.AVX2 or isa() >= Isa.AVX512_BF16
    else:
        faster = isa() >= Isa.AVX512
    return can_pack(weight_OI) and (faster or fixed_order())


class PackedLinear:
    """y = x W^T + b.

    weight_OI: float8_e4m3fn or int8 [O, I], with scale: float32 [ceil(O / scale_rows), ceil(I / 128)]; a weight is its
    number times the scale of its block. Or bfloat16 or float32 without scale, for rows of the same; with the form BF16
    it is bfloat16, for rows of float32, and the products and sums are those of the same weights in float32. Or codes of
    4 bits, of `form`: uint8 [O, 16 * ceil(I / 32)] of num_inputs I, with scale: 16 bits [1, O, ceil(I / 32)], or [2,
    ...] with zero points. The weights are copied; in_place: those without scale are rearranged where they lie, if they
    fill whole panels, and the caller uses them no more.
    """

    def __init__(
        self,
        weight_OI: Tensor,
        scale: Tensor | None = None,
        scale_rows: int = 1,
        in_place: bool = False,
        form: WeightFormat | None = None,
        num_inputs: int | None = None,
    ) -> None:
        self.num_outputs, self._inputs = weight_OI.shape[0], num_inputs or weight_OI.shape[1]
        self.form = form or FORMATS.get(weight_OI.dtype, WeightFormat.PLAIN)
        assert weight_OI.is_contiguous() and self._inputs % 2 == 0
        assert (scale is None) == (self.form in _WHOLE) and (scale is None or scale.is_contiguous())
        if scale is not None:
            self._check(scale, scale_rows)
        if in_place and scale is None and self.num_outputs % PANEL == 0:
            self.packed_B = weight_OI.detach().view(torch.uint8).flatten()
        else:
            panel_bytes = _panel_bytes(self.form, self._inputs, weight_OI.itemsize)
            self.packed_B = torch.empty(-(-self.num_outputs // PANEL) * panel_bytes, dtype=torch.uint8)
            use_large_pages(self.packed_B)
        _fill(
            X_TYPES.get(weight_OI.dtype, X_TYPES[torch.bfloat16]), self.form.number, self.packed_B.data_ptr(),
            weight_OI.data_ptr(), None if scale is None else scale.data_ptr(), scale_rows, self._inputs,
            self.num_outputs, torch.get_num_threads(),
        )  # fmt: skip

    def _check(self, scale: Tensor, scale_rows: int) -> None:
        if self.form in HALVES:
            halves = 2 if self.form is WeightFormat.INT4_ZERO else 1
            assert scale.shape == (halves, self.num_outputs, -(-self._inputs // HALF_GROUP)) and scale.itemsize == 2
        else:
            assert scale.dtype is torch.float32
            assert scale.shape == (-(-self.num_outputs // scale_rows), -(-self._inputs // BLOCK))

    @classmethod
    def over(cls, packed_B: Tensor, form: WeightFormat, num_outputs: int, num_inputs: int) -> PackedLinear:
        """With the bytes that another one of this size and form has packed."""
        layer = cls.__new__(cls)
        layer.num_outputs, layer._inputs, layer.form = num_outputs, num_inputs, form
        layer.packed_B = packed_B
        return layer

    def part(self, first: int, last: int) -> PackedLinear:
        """Over the same bytes, the outputs from `first`, a multiple of PANEL, up to `last`."""
        assert first % PANEL == 0
        num_panels = -(-self.num_outputs // PANEL)
        panel_bytes = self.packed_B.numel() // num_panels
        assert panel_bytes * num_panels == self.packed_B.numel()
        packed_B = self.packed_B[first // PANEL * panel_bytes : -(-last // PANEL) * panel_bytes]
        return PackedLinear.over(packed_B, self.form, last - first, self._inputs)

    def __call__(self, x_TI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """[T, I] float32 or bfloat16 (where weights have no scale: as they want it) -> [T, O] in the same; bias_O
        too."""
        if x_TI.stride(1) != 1:
            x_TI = x_TI.contiguous()
        num_rows = x_TI.shape[0]
        assert x_TI.shape[1] == self._inputs and (bias_O is None or bias_O.dtype is x_TI.dtype)
        assert self.form is not WeightFormat.BF16 or x_TI.dtype is torch.float32
        if self.form is WeightFormat.PLAIN:  # rows of a wider type would be multiplied with what lies behind the panels
            assert self.packed_B.numel() >= -(-self.num_outputs // PANEL) * PANEL * self._inputs * x_TI.itemsize
        y_TO = x_TI.new_empty(num_rows, self.num_outputs)
        _multiply(
            X_TYPES[x_TI.dtype], self.form.number, self.packed_B.data_ptr(), x_TI.data_ptr(), x_TI.stride(0),
            None if bias_O is None else bias_O.data_ptr(), y_TO.data_ptr(), self.num_outputs, num_rows, self._inputs,
            self.num_outputs, torch.get_num_threads(),
        )  # fmt: skip
        return y_TO


def _panel_bytes(form: WeightFormat, inputs: int, item: int) -> int:
    """Multiplier::panel_bytes of experts.h."""
    if form in _WHOLE:
        return inputs * PANEL * item
    blocks = -(-inputs // BLOCK)
    if form in HALVES:
        scales = (2 if form is WeightFormat.INT4_ZERO else 1) * BLOCK // HALF_GROUP * PANEL * 2
        return blocks * scales + -(-inputs // 8) * 8 * PANEL // 2
    return blocks * PANEL * 4 + inputs * PANEL
