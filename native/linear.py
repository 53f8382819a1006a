"""Linear layers of bfloat16, and of few rows of float32, in the native kernels (native/src/linear.h, rows.h).

Legend: T tokens, I input features, O output features.
"""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from native import rows
from native.choice import fixed_order
from native.features import Isa, isa
from native.library import function

MAX_DOT_ROWS = 8  # of float32: with more torch is faster
MAX_ROWS_F32 = 64  # the same with AVX2 alone
MAX_ROWS = 2048  # with more torch is as fast, where it has products of bfloat16 (benchmarks/bench_ops.py --only linear)

_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS = (_POINTER, _NUMBER, _POINTER, _NUMBER, _POINTER, _POINTER, *[_NUMBER] * 4, ctypes.c_int)
_linear_bf16, _linear_f32 = function("linear_bf16", *_ARGUMENTS), function("linear_f32", *_ARGUMENTS)

_use_large_pages = function("native_use_large_pages", _POINTER, _NUMBER)
_linear_bf16_best = function(
    "linear_bf16_best", _POINTER, _NUMBER, _POINTER, _NUMBER, _POINTER, *[_NUMBER] * 3, ctypes.c_int
)


def use_large_pages(values: Tensor) -> None:
    """Fewer misses when weights are read through; for memory that has not been written to yet."""
    if values.device.type == "cpu" and isa() > Isa.NONE:
        _use_large_pages(values.data_ptr(), values.numel() * values.element_size())


def can_run(x_TI: Tensor) -> bool:
    """Whether the native kernels multiply such rows here."""
    return x_TI.dtype is torch.bfloat16 and x_TI.device.type == "cpu" and isa() > Isa.NONE


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x W^T + b, [T, O]: as torch.nn.functional.linear, in the native kernels where they are faster."""
    num_rows = x_TI.shape[0]
    multiply = _linear_bf16
    if x_TI.dtype is torch.float32 and rows.can_run(x_TI):
        alone = isa() is Isa.AVX2
        if num_rows > (MAX_ROWS_F32 if alone else MAX_DOT_ROWS) and not fixed_order():
            return F.linear(x_TI, weight_OI, bias_O)
        if not alone or weight_OI.stride(1) != 1:
            return rows.dots(x_TI if x_TI.stride(1) == 1 else x_TI.contiguous(), weight_OI, bias_O)
        multiply = _linear_f32
    elif not can_run(x_TI) or (num_rows > MAX_ROWS and isa() >= Isa.AVX512_BF16 and not fixed_order()):
        return F.linear(x_TI, weight_OI, bias_O)
    if x_TI.stride(1) != 1:
        x_TI = x_TI.contiguous()
    num_outputs, num_inputs = weight_OI.shape
    assert weight_OI.stride(1) == 1 and weight_OI.dtype is x_TI.dtype and x_TI.shape[1] == num_inputs
    y_TO = x_TI.new_empty(num_rows, num_outputs)
    multiply(
        x_TI.data_ptr(), x_TI.stride(0), weight_OI.data_ptr(), weight_OI.stride(0),
        None if bias_O is None else bias_O.data_ptr(), y_TO.data_ptr(), num_outputs, num_rows, num_inputs, num_outputs,
        torch.get_num_threads(),
    )  # fmt: skip
    return y_TO


def best_output(x_TI: Tensor, weight_OI: Tensor, best_T: Tensor | None = None) -> Tensor:
    """argmax of `linear`, int64 [T], the first of equals, in best_T if there is one; the products are never all in
    memory. The caller asks `can_run`."""
    x_TI = x_TI.contiguous()
    num_rows, num_inputs = x_TI.shape
    num_outputs = weight_OI.shape[0]
    assert weight_OI.stride(1) == 1 and weight_OI.dtype is torch.bfloat16 and weight_OI.shape[1] == num_inputs
    best_T = torch.empty(num_rows, dtype=torch.int64) if best_T is None else best_T
    assert best_T.is_contiguous() and best_T.shape == (num_rows,)
    _linear_bf16_best(
        x_TI.data_ptr(), num_inputs, weight_OI.data_ptr(), weight_OI.stride(0), best_T.data_ptr(), num_rows, num_inputs,
        num_outputs, torch.get_num_threads(),
    )  # fmt: skip
    return best_T
