"""Which implementation of an operation runs: Triton's for tensors on a GPU where triton is installed, torch's
otherwise. Which one multiplies by the experts' weights is in moe_kernels/backends.py.

Triton is imported when the first tensor on a GPU arrives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from torch import Tensor

from layers.choice import on_gpu
from layers.choice import triton_implementation as form_of
from moe_kernels.grouped_gemm import run_experts as torch_run_experts
from moe_kernels.layout import ExpertBatch
from moe_kernels.permute import permute as torch_permute
from moe_kernels.permute import permute_some as torch_permute_some
from moe_kernels.permute import sum_rows as torch_sum_rows
from moe_kernels.permute import unpermute as torch_unpermute
from moe_kernels.quant import dequantize_rows as torch_dequantize_rows
from moe_kernels.quant import quantize_rows as torch_quantize_rows
from moe_kernels.quant import silu_mul_quantize as torch_silu_mul_quantize
from moe_kernels.silu_mul import silu_mul as torch_silu_mul
from moe_kernels.tokens import sum_pairs as torch_sum_pairs
from moe_kernels.tokens import take_rows as torch_take_rows
from moe_kernels.topk import grouped_sigmoid_topk as torch_grouped_sigmoid_topk
from moe_kernels.topk import grouped_softmax_topk as torch_grouped_softmax_topk
from moe_kernels.topk import softmax_topk as torch_softmax_topk

P = ParamSpec("P")
Result = TypeVar("Result")


def triton_implementation(module: str, name: str) -> Callable[..., Any]:
    """The function of this name in moe_kernels/triton/<module>.py."""
    return cast(Callable[..., Any], form_of(f"moe_kernels.triton.{module}", name))


def _by_device(torch_form: Callable[P, Result], module: str, room: str = "moe_kernels") -> Callable[P, Result]:
    """Decides by the device of the first argument. Triton's form has the same name in <room>/triton/<module>.py."""

    @functools.wraps(torch_form)
    def chosen(*args: P.args, **kwargs: P.kwargs) -> Result:
        x = args[0]
        assert isinstance(x, Tensor | ExpertBatch)
        if not on_gpu(x.device if isinstance(x, Tensor) else x.x.device):
            return torch_form(*args, **kwargs)
        return cast(Result, form_of(f"{room}.triton.{module}", torch_form.__name__)(*args, **kwargs))

    return chosen


dequantize_rows = _by_device(torch_dequantize_rows, "quant")
grouped_sigmoid_topk = _by_device(torch_grouped_sigmoid_topk, "topk")
grouped_softmax_topk = _by_device(torch_grouped_softmax_topk, "topk")
permute = _by_device(torch_permute, "permute")
permute_some = _by_device(torch_permute_some, "permute")
quantize_rows = _by_device(torch_quantize_rows, "quant")
run_experts = _by_device(torch_run_experts, "grouped_gemm")
silu_mul = _by_device(torch_silu_mul, "silu_mul", "layers")
silu_mul_quantize = _by_device(torch_silu_mul_quantize, "quant")
softmax_topk = _by_device(torch_softmax_topk, "topk")
sum_pairs = _by_device(torch_sum_pairs, "permute")
sum_rows = _by_device(torch_sum_rows, "permute")
take_rows = _by_device(torch_take_rows, "permute")
unpermute = _by_device(torch_unpermute, "permute")
