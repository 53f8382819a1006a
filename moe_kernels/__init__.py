"""Arithmetic of experts on one device. The one place of this room where an implementation is chosen.

Today there is one per operation, in torch, for every device; moe_kernels/reference.py says what each must compute.
"""

from moe_kernels.grouped_gemm import run_experts
from moe_kernels.layout import ExpertBatch, Layout
from moe_kernels.permute import Bags, permute, permute_some, sum_rows, unpermute
from moe_kernels.quant import dequantize_rows, quantize_rows
from moe_kernels.silu_mul import silu_mul
from moe_kernels.topk import grouped_sigmoid_topk, grouped_softmax_topk, softmax_topk

__all__ = [
    "Bags",
    "ExpertBatch",
    "Layout",
    "dequantize_rows",
    "grouped_sigmoid_topk",
    "grouped_softmax_topk",
    "permute",
    "permute_some",
    "quantize_rows",
    "run_experts",
    "silu_mul",
    "softmax_topk",
    "sum_rows",
    "unpermute",
]
