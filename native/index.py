"""The indexer of sparse attention in native kernels (native/src/index.h, rows.h): its keys, and what queries choose.

The caller asks `native.rows.can_run` first. Legend: T tokens, U queries that choose, H index heads, I their width, P
rotated dimensions, K most keys chosen, R rows of the cache, W bytes of a row in FP8.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from native.library import function

_X_TYPES = {torch.float32: 0, torch.bfloat16: 1}
_POINTER, _NUMBER, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


class _KeyCall(ctypes.Structure):
    """IndexKeyCall of rows.h."""

    _fields_ = (
        *((name, _NUMBER) for name in ("x_type", "fp8", "num_heads", "dim", "rope_dim")),
        ("q", _POINTER),
        ("q_stride", _NUMBER),
        ("key", _POINTER),
        ("key_stride", _NUMBER),
        *((name, _POINTER) for name in ("norm", "bias", "cos", "sin", "slots", "cache")),
        ("cache_bytes", _NUMBER),
        ("eps", ctypes.c_float),
    )


class _Call(ctypes.Structure):
    """IndexCall of index.h."""

    _fields_ = (
        *((name, _NUMBER) for name in ("x_type", "fp8", "num_queries", "num_heads", "dim", "topk", "block_size")),
        *((name, _NUMBER) for name in ("q_stride", "key_bytes")),
        *((name, _POINTER) for name in ("q", "weight", "keys", "lens", "sequence", "table")),
        ("table_stride", _NUMBER),
        *((name, _POINTER) for name in ("rows", "counts")),
    )


_rows_index = function("rows_index", ctypes.POINTER(_KeyCall), _NUMBER, _INT)
_index_choose = function("index_choose", ctypes.POINTER(_Call), _INT)


def place(
    key_TI: Tensor,
    norm: tuple[Tensor, Tensor, float],
    rope: tuple[Tensor, Tensor],
    cache: Tensor,
    slots_T: Tensor,
    q_THI: Tensor | None,
) -> None:
    """Norm, rotate and store keys, and rotate the first P dimensions of queries in place.

    key [T, I] as projected; norm: weight and bias [I] of a layer norm, and its eps; rope: what layers.rope.Rope gives,
    P wide; cache [R, I], or uint8 [R, W]; slots int64 [T]; q [T, H, I], or None.
    """
    cos, sin = rope
    (num_rows, dim), (weight, bias, eps) = key_TI.shape, norm
    heads = 0 if q_THI is None else q_THI.shape[1]
    assert key_TI.stride(1) == 1 and cos.is_contiguous() and sin.is_contiguous() and slots_T.is_contiguous()
    assert cos.dtype is sin.dtype is weight.dtype is bias.dtype is key_TI.dtype
    assert cache.dtype in (key_TI.dtype, torch.uint8) and cache.stride(1) == 1
    assert q_THI is None or (q_THI.stride(2) == 1 and q_THI.stride(1) == dim and q_THI.dtype is key_TI.dtype)
    call = _KeyCall(
        _X_TYPES[key_TI.dtype],
        cache.dtype is torch.uint8,
        heads,
        dim,
        cos.shape[-1],
        0 if q_THI is None else q_THI.data_ptr(),
        0 if q_THI is None else q_THI.stride(0),
        key_TI.data_ptr(),
        key_TI.stride(0),
        weight.data_ptr(),
        bias.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        slots_T.data_ptr(),
        cache.data_ptr(),
        cache.stride(0) * cache.element_size(),
        eps,
    )
    _rows_index(ctypes.byref(call), num_rows, torch.get_num_threads())


def choose(
    q_UHI: Tensor,
    weight_UH: Tensor,
    cache: Tensor,
    lens_U: Tensor,
    sequence_U: Tensor | None,
    table_BN: Tensor,
    block_size: int,
    topk: int,
) -> tuple[Tensor, Tensor]:
    """(rows of the cache int64 [U, K], how many of them count int64 [U]), as mla.index.choose_keys. weight: float32;
    lens, sequence, table: int64."""
    num_queries, heads, dim = q_UHI.shape
    if q_UHI.stride(2) != 1 or q_UHI.stride(1) != dim:
        q_UHI = q_UHI.contiguous()
    weight_UH, lens_U, table_BN = weight_UH.contiguous(), lens_U.contiguous(), table_BN.contiguous()
    assert weight_UH.dtype is torch.float32 and lens_U.dtype is table_BN.dtype is torch.int64
    assert cache.dtype in (q_UHI.dtype, torch.uint8) and cache.stride(1) == 1
    rows_UK = table_BN.new_empty(num_queries, topk)
    counts_U = table_BN.new_empty(num_queries)
    call = _Call(
        _X_TYPES[q_UHI.dtype],
        cache.dtype is torch.uint8,
        num_queries,
        heads,
        dim,
        topk,
        block_size,
        q_UHI.stride(0),
        cache.stride(0) * cache.element_size(),
        q_UHI.data_ptr(),
        weight_UH.data_ptr(),
        cache.data_ptr(),
        lens_U.data_ptr(),
        None if sequence_U is None else sequence_U.data_ptr(),
        table_BN.data_ptr(),
        table_BN.stride(0),
        rows_UK.data_ptr(),
        counts_U.data_ptr(),
    )
    _index_choose(ctypes.byref(call), torch.get_num_threads())
    return rows_UK, counts_U
