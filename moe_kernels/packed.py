"""Experts in the native kernels (native/src/experts.h): weights packed into panels, everything in one call.

Legend: S slots, D hidden size, F expert width, B bytes of a slot, T tokens, R rows, C rows per padded slot.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.activation import GATED, ExpertKind
from moe_kernels.expert_storage import ExpertWeights
from moe_kernels.layout import ExpertBatch, Layout, TokenBatch
from moe_kernels.matrix import (
    HALVES,
    HalfMatrix,
    ScaledMatrix,
    WeightFormat,
    dequantize,
    quantize,
    quantize_halves,
)
from moe_kernels.panels import panel_biases, unpack_slot
from moe_kernels.quant import dequantize_rows
from native import Isa, function, isa

_X_TYPES = {torch.float32: 0, torch.bfloat16: 1}


_FIELDS = (
    "x_type",
    "format",
    "num_slots",
    "hidden",
    "width",
    "up_panels",
    "down_panels",
    "up_depth",
    "down_depth",
    "up_bytes",
    "down_bytes",
    "slot_bytes",
    "hidden_stride",
    "has_bias",
    "bias_at",
)
_FLOATS = ("alpha", "limit", "offset")


class _Shape(ctypes.Structure):
    """ExpertShape of experts.h."""

    _fields_ = (*((name, ctypes.c_int64) for name in _FIELDS), *((name, ctypes.c_float) for name in _FLOATS))

    slot_bytes: int
    up_depth: int
    up_panels: int
    bias_at: int


_SHAPE, _POINTER, _NUMBER, _INT = ctypes.POINTER(_Shape), ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_experts_shape = function("experts_shape", _SHAPE)
_experts_pack = function("experts_pack", _SHAPE, *[_POINTER] * 7, _NUMBER, _INT)
_experts_rows = function("experts_rows", _SHAPE, _POINTER, _POINTER, _POINTER, _NUMBER, _POINTER, _INT)
_experts_tokens = function("experts_tokens", _SHAPE, *[_POINTER] * 4, _NUMBER, _NUMBER, _NUMBER, _POINTER, _INT, _INT)
_experts_choices = function("experts_choices", _SHAPE, *[_POINTER] * 3, _NUMBER, _NUMBER, _NUMBER, _POINTER, _INT)
_experts_arrived = function("experts_arrived", _SHAPE, *[_POINTER] * 3, _NUMBER, _POINTER, _NUMBER, _POINTER, _INT)
_use_large_pages = function("native_use_large_pages", _POINTER, _NUMBER)
_touch = function("native_touch", _POINTER, _POINTER, _POINTER)


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether experts of such rows can run here."""
    return device.type == "cpu" and dtype in _X_TYPES and isa() > Isa.NONE


class PackedExperts(ExpertWeights):
    """The experts of S slots, uninitialised. packed_SB: uint8, a slot's bytes are all of its expert."""

    def __init__(
        self,
        num_slots: int,
        hidden: int,
        width: int,
        dtype: torch.dtype,
        form: WeightFormat,
        kind: ExpertKind = GATED,
    ) -> None:
        if form is WeightFormat.BF16 and dtype is torch.bfloat16:
            form = WeightFormat.PLAIN
        self.num_slots, self.dtype, self.format = num_slots, dtype, form
        self._hidden, self._width, self._biased = hidden, width, kind.biased
        activation = {name: getattr(kind.activation, name) for name in _FLOATS}
        self._shape = _Shape(_X_TYPES[dtype], form.number, num_slots, hidden, width, has_bias=kind.biased, **activation)
        _experts_shape(self._shape)
        self.packed_SB = torch.empty(num_slots, self._shape.slot_bytes, dtype=torch.uint8)
        self._num_touched = 0
        _use_large_pages(self.packed_SB.data_ptr(), self.packed_SB.numel())

    def storage(self, slot: int) -> tuple[Tensor, ...]:
        return (self.packed_SB[slot],)

    def whole(self) -> tuple[Tensor, ...]:
        """The memory of all slots."""
        return (self.packed_SB,)

    def lie_in(self, memory: Sequence[Tensor]) -> None:
        """Have the slots in `memory` from now on: like `whole`, and with what it holds."""
        (self.packed_SB,) = memory
        self._num_touched = self.num_slots  # whoever made it has brought it in

    def fill(self, slot: int, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor) -> None:
        matrices = (gate_FD, up_FD, down_DF)
        if self.format not in (WeightFormat.PLAIN, WeightFormat.BF16):
            fewer = zip(matrices, self.format.parts, strict=True)
            self._pack_fewer(slot, [(quantize_halves if form in HALVES else quantize)(m, form) for m, form in fewer])
            return
        dtype = torch.bfloat16 if self.format is WeightFormat.BF16 else self.dtype
        matrices_now = [matrix.to(dtype).contiguous() for matrix in matrices]
        self._pack(slot, [matrix.data_ptr() for matrix in matrices_now], [None, None, None], 1)

    def fill_scaled(self, slot: int, gate_FD: ScaledMatrix, up_FD: ScaledMatrix, down_DF: ScaledMatrix) -> None:
        matrices = (gate_FD, up_FD, down_DF)
        if self.format is not gate_FD.format or len({matrix.scale_rows for matrix in matrices}) > 1:
            self.fill(slot, *(dequantize(matrix, torch.float32) for matrix in matrices))
            return
        self._pack_fewer(slot, matrices)

    def fill_halves(
        self, slot: int, gate_FD: HalfMatrix, up_FD: HalfMatrix, down_DF: HalfMatrix | ScaledMatrix
    ) -> None:
        matrices = (gate_FD, up_FD, down_DF)
        if tuple(matrix.format for matrix in matrices) == self.format.parts:
            self._pack_fewer(slot, matrices)
        else:
            super().fill_halves(slot, *matrices)

    def fill_biases(self, slot: int, gate_F: Tensor, up_F: Tensor, down_D: Tensor) -> None:
        assert self._biased
        self.packed_SB[slot, self._shape.bias_at :] = panel_biases(gate_F, up_F, down_D)

    def clear(self, slot: int) -> None:
        self._prefault(slot)
        self.packed_SB[slot].zero_()

    def read(self, slot: int) -> tuple[Tensor, Tensor, Tensor]:
        return unpack_slot(self.packed_SB[slot], self._hidden, self._width, self.dtype, self.format)

    def run_rows(self, batch: ExpertBatch) -> Tensor:
        padded = batch.layout is Layout.PADDED
        x_now = batch.x if batch.scale is None else dequantize_rows(batch.x, batch.scale, self.dtype)
        x = self._rows(x_now)
        y = x_now.new_empty(x_now.shape)
        rows_S = batch.rows_S
        assert rows_S.dtype is torch.int32 and rows_S.is_contiguous() and rows_S.shape[0] == self.num_slots
        _experts_rows(
            self._shape,
            self.packed_SB.data_ptr(),
            x.data_ptr(),
            rows_S.data_ptr(),
            batch.x.shape[1] if padded else 0,
            y.data_ptr(),
            torch.get_num_threads(),
        )
        return y

    def run_tokens(self, batch: TokenBatch) -> Tensor:
        x_TD = self._rows(batch.x_TD)
        slot_TK, weight_TK = batch.slot_TK.contiguous(), batch.weight_TK.contiguous()
        assert slot_TK.dtype is torch.int64 and weight_TK.dtype is torch.float32 and slot_TK.shape == weight_TK.shape
        assert batch.sum_dtype in (torch.float32, self.dtype)
        num_tokens, top_k = slot_TK.shape
        assert x_TD.shape[0] == num_tokens
        if batch.rows_PD is not None:
            y_PD = batch.rows_PD
            assert y_PD.is_contiguous() and y_PD.dtype is self.dtype and y_PD.shape[1] == self._hidden
            self._run_choices(batch, x_TD, slot_TK, y_PD)
            return y_PD
        y_TD = torch.empty(num_tokens, self._hidden, dtype=batch.sum_dtype)
        _experts_tokens(
            self._shape,
            self.packed_SB.data_ptr(),
            x_TD.data_ptr(),
            slot_TK.data_ptr(),
            weight_TK.data_ptr(),
            batch.first_slot,
            num_tokens,
            top_k,
            y_TD.data_ptr(),
            _X_TYPES[batch.sum_dtype],
            torch.get_num_threads(),
        )
        return y_TD

    def _run_choices(self, batch: TokenBatch, x_TD: Tensor, slot_TK: Tensor, y_PD: Tensor) -> None:
        weights, first, memory = self.packed_SB.data_ptr(), batch.first_slot, batch.memory
        num_tokens, top_k = slot_TK.shape
        if memory is not None and x_TD is batch.x_TD:
            x, slot, y, count = memory.x, memory.slot, memory.rows, memory.num_tokens
            _experts_arrived(self._shape, weights, x, slot, first, count, top_k, y, torch.get_num_threads())
            return
        x, slot, y = x_TD.data_ptr(), slot_TK.data_ptr(), y_PD.data_ptr()
        _experts_choices(self._shape, weights, x, slot, first, num_tokens, top_k, y, torch.get_num_threads())

    def _rows(self, x: Tensor) -> Tensor:
        """x as the kernels read it: contiguous, an even number of columns where they take pairs."""
        assert x.dtype is self.dtype and x.shape[-1] == self._hidden
        return x.contiguous() if self._shape.up_depth == self._hidden else F.pad(x, (0, 1))

    def _pack_fewer(self, slot: int, matrices: Sequence[HalfMatrix | ScaledMatrix]) -> None:
        weights, scales, scale_rows = [], [], 1
        for matrix in matrices:
            if isinstance(matrix, ScaledMatrix):
                weights.append(matrix.weight_OI.contiguous())
                scales.append(matrix.scale.float().contiguous())
                scale_rows = matrix.scale_rows
            else:
                weights.append(matrix.codes.contiguous())
                scales.append(matrix.words)
        self._pack(slot, [weight.data_ptr() for weight in weights], [scale.data_ptr() for scale in scales], scale_rows)

    def _pack(self, slot: int, matrices: list[int], scales: list[int] | list[None], scale_rows: int) -> None:
        start = self._prefault(slot)
        _experts_pack(self._shape, start, *matrices, *scales, scale_rows, torch.get_num_threads())

    def _prefault(self, slot: int) -> int:
        """Where the slot's bytes begin. The pages of slots that are written in order for the first time are
        faulted in."""
        start = self.packed_SB[slot].data_ptr()
        if slot == self._num_touched:
            _touch(start, start + self._shape.slot_bytes, self.packed_SB.data_ptr() + self.packed_SB.numel())
            self._num_touched += 1
        return start
