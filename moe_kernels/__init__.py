"""Arithmetic of experts on one device; reference.py says what each operation must compute.

choice.py is the place where an operation's implementation is chosen by device (Triton for tensors on a GPU, torch
otherwise), and weights.py the one where the form of the experts' weights is (packed for the native CPU kernels, or as
torch wants them).
"""

from moe_kernels.choice import (
    dequantize_rows,
    grouped_sigmoid_topk,
    grouped_softmax_topk,
    permute,
    permute_some,
    quantize_rows,
    run_experts,
    silu_mul,
    softmax_topk,
    sum_rows,
    unpermute,
)
from moe_kernels.expert_storage import ExpertWeights
from moe_kernels.layout import ExpertBatch, Layout, TokenBatch, TokenMemory
from moe_kernels.matrix import HalfMatrix, ScaledMatrix, WeightFormat
from moe_kernels.permute import Bags
from moe_kernels.token_sums import add_rows, copy_rows, sum_choices
from moe_kernels.topk import biased_softmax_topk, router_logits, router_logits32
from moe_kernels.weights import expert_weights
from native.rows import as_dtype

__all__ = [
    "Bags", "ExpertBatch", "ExpertWeights", "HalfMatrix",
    "Layout", "ScaledMatrix", "TokenBatch", "TokenMemory", "WeightFormat", "add_rows", "as_dtype",
    "biased_softmax_topk", "copy_rows", "dequantize_rows", "expert_weights", "grouped_sigmoid_topk",
    "grouped_softmax_topk", "permute",
    "permute_some", "quantize_rows", "router_logits", "router_logits32", "run_experts", "silu_mul", "softmax_topk",
    "sum_choices", "sum_rows", "unpermute",
]  # fmt: skip
