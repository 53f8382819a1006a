"""Small operations on the rows of a step in native kernels (native/src/rows.h), each in one pass.

The caller asks `can_run` first. Legend: T tokens, D hidden size, F width, H query heads, Hkv key/value heads, Dh head
size, E experts, K chosen, R rows of the cache; N, P, C, X widths of MLA (mla/protocol.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from native.features import Isa, isa
from native.library import function

_X_TYPES = {torch.float32: 0, torch.bfloat16: 1}
_POINTER, _NUMBER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


class _HeadsCall(ctypes.Structure):
    """HeadsCall of rows.h."""

    _fields_ = (
        *((name, _NUMBER) for name in ("x_type", "num_heads", "num_kv_heads", "dim")),
        *((name, _POINTER) for name in ("norm", "x", "cos", "sin", "slots", "k_cache", "v_cache")),
        ("k_stride", _NUMBER),
        ("v_stride", _NUMBER),
        ("eps", _FLOAT),
    )


class _LatentCall(ctypes.Structure):
    """LatentCall of rows.h."""

    _fields_ = (
        *((name, _NUMBER) for name in ("x_type", "num_heads", "qk_nope_head_dim", "qk_rope_head_dim", "latent_dim")),
        ("q", _POINTER),
        ("q_stride", _NUMBER),
        ("latent", _POINTER),
        ("latent_stride", _NUMBER),
        *((name, _POINTER) for name in ("norm", "cos", "sin", "slots", "cache")),
        ("cache_stride", _NUMBER),
        ("eps", _FLOAT),
    )


_rows_norm = function(
    "rows_norm", _INT, _POINTER, _POINTER, _NUMBER, _POINTER, _POINTER, _NUMBER, _NUMBER, _NUMBER, _FLOAT, _INT
)
_rows_heads = function("rows_heads", ctypes.POINTER(_HeadsCall), _NUMBER, _INT)
_rows_latent = function("rows_latent", ctypes.POINTER(_LatentCall), _NUMBER, _INT)
_rows_silu_mul = function("rows_silu_mul", _INT, _POINTER, _POINTER, _NUMBER, _NUMBER, _INT)
_rows_sigmoid_gate = function("rows_sigmoid_gate", _INT, _POINTER, _NUMBER, _POINTER, _NUMBER, _NUMBER, _INT)
_rows_add = function("rows_add", _INT, _POINTER, _POINTER, _NUMBER, _NUMBER, _INT)
_rows_halve = function("rows_halve", _POINTER, _POINTER, _NUMBER, _NUMBER, _INT)
_rows_copy = function("rows_copy", _POINTER, _POINTER, _NUMBER, _NUMBER, _INT)
_rows_keep = function("rows_keep", _POINTER, _POINTER, _POINTER, _NUMBER, _NUMBER, _NUMBER)
_rows_weigh = function(
    "rows_weigh", _INT, _POINTER, _POINTER, _NUMBER, _POINTER, _NUMBER, _POINTER, _NUMBER, _NUMBER, _NUMBER, _INT
)
_rows_gather = function("rows_gather", _POINTER, _NUMBER, _POINTER, _POINTER, _NUMBER, _NUMBER, _INT)
_rows_rope = function("rows_rope", _INT, _POINTER, _POINTER, _FLOAT, _POINTER, _POINTER, _NUMBER, _NUMBER, _INT)
_rows_best = function("rows_best", _INT, _POINTER, _NUMBER, _POINTER, _NUMBER, _NUMBER, _INT)
_rows_dots = function(
    "rows_dots", _INT, _POINTER, _NUMBER, _POINTER, _POINTER, _POINTER, _NUMBER, _NUMBER, _NUMBER, _INT
)


def can_run(x: Tensor) -> bool:
    """Whether these operations run on such a tensor here."""
    return x.dtype in _X_TYPES and x.device.type == "cpu" and isa() > Isa.NONE


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / rms(x), rounded, times weight: [T, D]. Rows of x may be apart."""
    assert x_TD.stride(1) == 1
    return _norm(None, x_TD, weight_D, eps)


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Adds x to residual in place, and returns the `rms_norm` of the sum."""
    assert residual_TD.is_contiguous() and x_TD.shape == residual_TD.shape and x_TD.dtype is residual_TD.dtype
    return _norm(x_TD.contiguous(), residual_TD, weight_D, eps)


def rms_norm_in_place(x_TD: Tensor, weight_D: Tensor, eps: float) -> None:
    """x becomes its `rms_norm`; its rows may be apart."""
    assert x_TD.stride(1) == 1
    _norm(None, x_TD, weight_D, eps, x_TD)


def _norm(x_TD: Tensor | None, residual_TD: Tensor, weight_D: Tensor, eps: float, y_TD: Tensor | None = None) -> Tensor:
    num_rows, size = residual_TD.shape
    assert weight_D.dtype is residual_TD.dtype and weight_D.shape == (size,)
    y_TD = residual_TD.new_empty(num_rows, size) if y_TD is None else y_TD
    _rows_norm(
        _X_TYPES[y_TD.dtype],
        None if x_TD is None else x_TD.data_ptr(),
        residual_TD.data_ptr(),
        residual_TD.stride(0),
        weight_D.data_ptr(),
        y_TD.data_ptr(),
        y_TD.stride(0),
        num_rows,
        size,
        eps,
        torch.get_num_threads(),
    )
    return y_TD


def qk_norm_rope_cache(
    qkv_THD: Tensor,
    num_heads: int,
    norm_HD: Tensor | None,
    eps: float,
    rope: tuple[Tensor, Tensor],
    k_cache: Tensor,
    v_cache: Tensor,
    slots_T: Tensor,
) -> None:
    """Norm and rotate queries and keys, and store keys and values. Queries are changed in place.

    qkv [T, H + 2 Hkv, Dh] contiguous; norm [H + Hkv, Dh] or None; rope: what layers.rope.Rope gives; caches [R, Hkv,
    Dh]; slots int64 [T].
    """
    cos, sin = rope
    num_rows, all_heads, dim = qkv_THD.shape
    num_kv_heads = (all_heads - num_heads) // 2
    assert qkv_THD.is_contiguous() and cos.is_contiguous() and sin.is_contiguous() and slots_T.is_contiguous()
    assert cos.numel() == sin.numel() == num_rows * dim and cos.dtype is sin.dtype is k_cache.dtype is qkv_THD.dtype
    call = _HeadsCall(
        _X_TYPES[qkv_THD.dtype],
        num_heads,
        num_kv_heads,
        dim,
        None if norm_HD is None else norm_HD.data_ptr(),
        qkv_THD.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        slots_T.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        k_cache.stride(0),
        v_cache.stride(0),
        eps,
    )
    _rows_heads(ctypes.byref(call), num_rows, torch.get_num_threads())


def place_latent(
    q_THK: Tensor,
    latent_TX: Tensor,
    norm_C: Tensor,
    eps: float,
    rope: tuple[Tensor, Tensor],
    cache_RX: Tensor,
    slots_T: Tensor,
) -> None:
    """MLA: store the normed latent and the rotated key, and rotate the last part of every query in place.

    q [T, H, N + P], each row contiguous; latent [T, C + P]; norm [C]; rope: what layers.rope.Rope gives, P wide; cache
    [R, C + P]; slots int64 [T]. Rows of q and latent may be apart.
    """
    cos, sin = rope
    num_rows, num_heads, key_dim = q_THK.shape
    latent_dim = norm_C.shape[0]
    qk_rope_head_dim = latent_TX.shape[1] - latent_dim
    assert q_THK.stride(2) == latent_TX.stride(1) == cache_RX.stride(1) == 1 and q_THK.stride(1) == key_dim
    assert cos.is_contiguous() and sin.is_contiguous() and slots_T.is_contiguous()
    assert cos.numel() == sin.numel() == num_rows * qk_rope_head_dim
    assert cos.dtype is sin.dtype is cache_RX.dtype is q_THK.dtype is latent_TX.dtype
    call = _LatentCall(
        _X_TYPES[q_THK.dtype],
        num_heads,
        key_dim - qk_rope_head_dim,
        qk_rope_head_dim,
        latent_dim,
        q_THK.data_ptr(),
        q_THK.stride(0),
        latent_TX.data_ptr(),
        latent_TX.stride(0),
        norm_C.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        slots_T.data_ptr(),
        cache_RX.data_ptr(),
        cache_RX.stride(0),
        eps,
    )
    _rows_latent(ctypes.byref(call), num_rows, torch.get_num_threads())


def silu_mul(gate_up_T2F: Tensor) -> Tensor:
    """silu(first half), rounded, times second half: [T, F]."""
    gate_up_T2F = gate_up_T2F.contiguous()
    num_rows, both = gate_up_T2F.shape
    y_TF = gate_up_T2F.new_empty(num_rows, both // 2)
    _rows_silu_mul(
        _X_TYPES[y_TF.dtype], gate_up_T2F.data_ptr(), y_TF.data_ptr(), num_rows, both // 2, torch.get_num_threads()
    )
    return y_TF


def sigmoid_gate(y_TF: Tensor, gate_T: Tensor) -> Tensor:
    """y *= sigmoid(gate), in place; y. gate [T, F], or [T, 1]."""
    num_rows, width = y_TF.shape
    assert y_TF.is_contiguous() and gate_T.is_contiguous() and gate_T.dtype is y_TF.dtype
    assert gate_T.shape[0] == num_rows and gate_T.shape[1] in (1, width)
    _rows_sigmoid_gate(
        _X_TYPES[y_TF.dtype],
        gate_T.data_ptr(),
        gate_T.shape[1],
        y_TF.data_ptr(),
        num_rows,
        width,
        torch.get_num_threads(),
    )
    return y_TF


def add(y_TD: Tensor, x_TD: Tensor) -> Tensor:
    """y += x, in place; y."""
    assert y_TD.is_contiguous() and x_TD.is_contiguous() and x_TD.shape == y_TD.shape and x_TD.dtype is y_TD.dtype
    num_rows, size = y_TD.shape
    _rows_add(_X_TYPES[y_TD.dtype], x_TD.data_ptr(), y_TD.data_ptr(), num_rows, size, torch.get_num_threads())
    return y_TD


def as_dtype(x_TD: Tensor, dtype: torch.dtype) -> Tensor:
    """x, or its numbers in another dtype."""
    if x_TD.dtype is dtype:
        return x_TD
    fits = can_run(x_TD) and x_TD.dtype is torch.float32 and dtype is torch.bfloat16
    return halve(x_TD.contiguous()) if fits else x_TD.to(dtype)


def halve(x_TD: Tensor) -> Tensor:
    """float32 [T, D] in bfloat16, a fresh tensor."""
    assert x_TD.is_contiguous() and x_TD.dtype is torch.float32
    y_TD = torch.empty_like(x_TD, dtype=torch.bfloat16)
    _rows_halve(x_TD.data_ptr(), y_TD.data_ptr(), *x_TD.shape, torch.get_num_threads())
    return y_TD


def copy(y_TD: Tensor, x_TD: Tensor) -> Tensor:
    """y = x, in place; y."""
    assert y_TD.is_contiguous() and x_TD.is_contiguous() and x_TD.shape == y_TD.shape and x_TD.dtype is y_TD.dtype
    num_rows, size = y_TD.shape
    _rows_copy(x_TD.data_ptr(), y_TD.data_ptr(), num_rows, size * y_TD.element_size(), torch.get_num_threads())
    return y_TD


def keep(x_TD: Tensor, y_TD: Tensor, layer: Tensor, number: int) -> None:
    """y = x, and layer (int64 []) = number, which is -1 meanwhile."""
    assert y_TD.is_contiguous() and x_TD.is_contiguous() and x_TD.shape == y_TD.shape and x_TD.dtype is y_TD.dtype
    num_rows, size = y_TD.shape
    _rows_keep(x_TD.data_ptr(), y_TD.data_ptr(), layer.data_ptr(), number, num_rows, size * y_TD.element_size())


def weigh(parts: Sequence[Tensor], slot_TK: Tensor, weight_TK: Tensor, slots_per_part: int, y_TD: Tensor) -> Tensor:
    """y = for each token the sum of weight * row over its choices, in their order, in float32; y.

    slot int64 [T, K], 0 <= slot < slots_per_part * parts; a choice's row is in part slot // slots_per_part, where rows
    lie in the order of tokens and choices; weight float32 [T, K]. Parts contiguous.
    """
    num_rows, size = y_TD.shape
    top_k = slot_TK.shape[1]
    assert slot_TK.is_contiguous() and weight_TK.is_contiguous() and y_TD.is_contiguous()
    assert slot_TK.dtype is torch.int64 and weight_TK.dtype is torch.float32 and weight_TK.shape == (num_rows, top_k)
    assert all(part.is_contiguous() and part.dtype is y_TD.dtype for part in parts)
    bases = (_POINTER * len(parts))(*[part.data_ptr() for part in parts])
    _rows_weigh(
        _X_TYPES[y_TD.dtype],
        slot_TK.data_ptr(),
        weight_TK.data_ptr(),
        slots_per_part,
        bases,
        len(parts),
        y_TD.data_ptr(),
        num_rows,
        top_k,
        size,
        torch.get_num_threads(),
    )
    return y_TD


def gather(table_VD: Tensor, ids_T: Tensor) -> Tensor:
    """table[ids], [T, D]; ids int64 [T], zeros where the table has no such row."""
    assert table_VD.is_contiguous() and ids_T.is_contiguous() and ids_T.dtype is torch.int64
    (num_rows,), (num_entries, size) = ids_T.shape, table_VD.shape
    y_TD = table_VD.new_empty(num_rows, size)
    _rows_gather(
        table_VD.data_ptr(),
        num_entries,
        ids_T.data_ptr(),
        y_TD.data_ptr(),
        num_rows,
        size * table_VD.element_size(),
        torch.get_num_threads(),
    )
    return y_TD


def rope(positions_T: Tensor, frequency_R: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What layers.rope.Rope gives for positions int64 [T] and frequencies float32 [R]: cos and sin, [T, 1, 2 R]."""
    assert positions_T.is_contiguous() and positions_T.dtype is torch.int64 and frequency_R.dtype is torch.float32
    (num_rows,), (num_planes,) = positions_T.shape, frequency_R.shape
    cos = torch.empty((num_rows, 1, 2 * num_planes), dtype=dtype)
    sin = torch.empty((num_rows, 1, 2 * num_planes), dtype=dtype)
    _rows_rope(
        _X_TYPES[dtype],
        positions_T.data_ptr(),
        frequency_R.data_ptr(),
        scale,
        cos.data_ptr(),
        sin.data_ptr(),
        num_rows,
        num_planes,
        torch.get_num_threads(),
    )
    return cos, sin


def dots(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x W^T + b in float32, [T, O]; x float32 or bfloat16, weight and bias float32. Rows of x may be apart."""
    assert x_TI.stride(1) == 1 and weight_OI.is_contiguous() and weight_OI.dtype is torch.float32
    num_rows, num_inputs = x_TI.shape
    num_outputs = weight_OI.shape[0]
    y_TO = torch.empty((num_rows, num_outputs), dtype=torch.float32)
    _rows_dots(
        _X_TYPES[x_TI.dtype], x_TI.data_ptr(), x_TI.stride(0), weight_OI.data_ptr(),
        None if bias_O is None else bias_O.data_ptr(), y_TO.data_ptr(), num_rows, num_inputs, num_outputs,
        torch.get_num_threads(),
    )  # fmt: skip
    return y_TO


def best(x_TF: Tensor, place_T: Tensor | None = None) -> Tensor:
    """Where the largest number of each row is, the first of equals: int64 [T], in place_T if there is one. Rows of x
    may be apart."""
    num_rows, size = x_TF.shape
    assert x_TF.stride(1) == 1
    place_T = torch.empty(num_rows, dtype=torch.int64) if place_T is None else place_T
    assert place_T.is_contiguous() and place_T.shape == (num_rows,)
    _rows_best(
        _X_TYPES[x_TF.dtype], x_TF.data_ptr(), x_TF.stride(0), place_T.data_ptr(), num_rows, size,
        torch.get_num_threads(),
    )  # fmt: skip
    return place_T
