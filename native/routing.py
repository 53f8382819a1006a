"""Which experts a token goes to, in native kernels (native/src/rows.h).

The caller asks `rows.can_run` first. Legend: T tokens, E experts, K chosen.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from native.library import function

_X_TYPES = {torch.float32: 0, torch.bfloat16: 1}
_POINTER, _NUMBER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


class _GroupedCall(ctypes.Structure):
    """GroupedCall of rows.h."""

    _fields_ = (
        *((name, _NUMBER) for name in ("experts", "groups", "kept", "k")),
        *((name, _POINTER) for name in ("logits", "bias", "index", "weight")),
        ("renormalize", _NUMBER),
        ("softmax", _NUMBER),
        ("scale", _FLOAT),
        ("smallest", _FLOAT),
    )


_rows_softmax_topk = function(
    "rows_softmax_topk", _INT, _POINTER, _NUMBER, _NUMBER, _NUMBER, _INT, _POINTER, _POINTER, _INT
)

_rows_grouped_topk = function("rows_grouped_topk", ctypes.POINTER(_GroupedCall), _NUMBER, _INT)


def softmax_topk(logits_TE: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """(expert int64 [T, K], weight float32 [T, K]) in falling order; weights: a softmax over all experts, or over
    the chosen."""
    logits_TE = logits_TE.contiguous()
    num_rows, num_experts = logits_TE.shape
    expert_TK = torch.empty((num_rows, top_k), dtype=torch.int64)
    weight_TK = torch.empty((num_rows, top_k), dtype=torch.float32)
    _rows_softmax_topk(
        _X_TYPES[logits_TE.dtype],
        logits_TE.data_ptr(),
        num_rows,
        num_experts,
        top_k,
        renormalize,
        expert_TK.data_ptr(),
        weight_TK.data_ptr(),
        torch.get_num_threads(),
    )
    return expert_TK, weight_TK


def grouped_sigmoid_topk(
    logits_TE: Tensor, bias_E: Tensor, top_k: int, num_groups: int, topk_groups: int, renormalize: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """As moe_kernels.grouped_sigmoid_topk, of float32 logits: (expert int64 [T, K], weight float32 [T, K])."""
    assert bias_E.dtype is torch.float32
    return _grouped_topk(logits_TE, bias_E.contiguous(), top_k, num_groups, topk_groups, renormalize, scale)


def grouped_softmax_topk(
    logits_TE: Tensor, top_k: int, num_groups: int, topk_groups: int, scale: float
) -> tuple[Tensor, Tensor]:
    """As moe_kernels.grouped_softmax_topk, of float32 logits: (expert int64 [T, K], weight float32 [T, K])."""
    return _grouped_topk(logits_TE, None, top_k, num_groups, topk_groups, False, scale)


def biased_softmax_topk(logits_TE: Tensor, bias_E: Tensor, top_k: int, smallest_sum: float) -> tuple[Tensor, Tensor]:
    """As moe_kernels.biased_softmax_topk, of float32 logits: (expert int64 [T, K], weight float32 [T, K])."""
    assert bias_E.dtype is torch.float32
    return _grouped_topk(logits_TE, bias_E.contiguous(), top_k, 1, 1, True, 1.0, True, smallest_sum)


def _grouped_topk(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    top_k: int,
    num_groups: int,
    topk_groups: int,
    renormalize: bool,
    scale: float,
    softmax: bool = False,
    smallest: float = 0.0,
) -> tuple[Tensor, Tensor]:
    logits_TE = logits_TE.contiguous()
    assert logits_TE.dtype is torch.float32
    num_rows, num_experts = logits_TE.shape
    expert_TK = torch.empty((num_rows, top_k), dtype=torch.int64)
    weight_TK = torch.empty((num_rows, top_k), dtype=torch.float32)
    call = _GroupedCall(
        num_experts,
        num_groups,
        topk_groups,
        top_k,
        logits_TE.data_ptr(),
        None if bias_E is None else bias_E.data_ptr(),
        expert_TK.data_ptr(),
        weight_TK.data_ptr(),
        renormalize,
        softmax,
        scale,
        smallest,
    )
    _rows_grouped_topk(ctypes.byref(call), num_rows, torch.get_num_threads())
    return expert_TK, weight_TK
