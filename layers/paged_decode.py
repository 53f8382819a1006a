"""Attention of single queries in the native kernel (native/src/attention.h): it walks the block table, nothing is
gathered.

Legend: B sequences with one query each, H query heads, Hkv key/value heads, K width of a key, V width of a value, N
blocks per sequence.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from layers.paged_prefill import PagedPrefill
from layers.step import StepInput
from native import Isa, fixed_order, function, isa

_X_TYPES = {torch.float32: 0, torch.bfloat16: 1}
_FIELDS = (
    "x_type", "num_sequences", "num_heads", "num_kv_heads", "key_dim", "v_head_dim", "block_size", "key_stride",
    "value_stride", "lens", "table", "table_stride", "window",
)  # fmt: skip


class _Shape(ctypes.Structure):
    """AttentionShape of attention.h; pointers as numbers."""

    _fields_ = tuple((name, ctypes.c_int64) for name in _FIELDS)

    key_stride: int
    value_stride: int


_attention_decode = function(
    "attention_decode",
    ctypes.POINTER(_Shape),
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_float,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int,
)


def can_decode(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether such queries and caches can be attended to here."""
    return device.type == "cpu" and dtype in _X_TYPES and isa() > Isa.NONE


class PagedDecode:
    """The decodes of one step (its first num_decodes sequences, at least one), prepared once for all layers."""

    def __init__(
        self,
        step: StepInput,
        num_heads: int,
        num_kv_heads: int,
        key_dim: int,
        v_head_dim: int,
        dtype: torch.dtype,
        window: int = 0,
    ):
        """window: keys that a query sees, its own included; 0: all."""
        self.num_sequences = step.num_decodes
        self._dtype = dtype
        self._lens_B = step.kv_lens_B.contiguous()
        self._table_BN = step.block_table_BN.contiguous()
        assert self._lens_B.dtype is torch.int64 and self._table_BN.dtype is torch.int64
        self._out_shape = (step.num_decodes, num_heads, v_head_dim)
        self._shape = _Shape(
            _X_TYPES[dtype],
            step.num_decodes,
            num_heads,
            num_kv_heads,
            key_dim,
            v_head_dim,
            step.block_size,
            0,
            0,
            self._lens_B.data_ptr(),
            self._table_BN.data_ptr(),
            self._table_BN.shape[1],
            window,
        )
        self._shape_pointer = ctypes.byref(self._shape)
        self._as_prompts: PagedPrefill | None = None
        if fixed_order():
            lens_B, table_BN = self._lens_B[: step.num_decodes], self._table_BN[: step.num_decodes]
            self._as_prompts = PagedPrefill.of_decodes(lens_B, table_BN, step.block_size, window)

    def __call__(
        self, q_BHK: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, sinks_H: Tensor | None = None
    ) -> Tensor:
        """[B, H, V]. k_cache [rows, Hkv, K] and v_cache [rows, Hkv, V] may be views of one memory (MLA: values are the
        first part of the keys); rows of q may be apart. Rows that no query sees are not looked at. sinks float32: as
        layers.reference.paged_attention has them."""
        assert q_BHK.dtype is self._dtype and k_cache.dtype is self._dtype and v_cache.dtype is self._dtype
        if q_BHK.stride(2) != 1 or q_BHK.stride(1) != q_BHK.shape[2]:
            q_BHK = q_BHK.contiguous()
        self._shape.key_stride, self._shape.value_stride = k_cache.stride(0), v_cache.stride(0)
        out_BHV = torch.empty(self._out_shape, dtype=self._dtype)
        if self._as_prompts is not None:
            self._as_prompts(q_BHK, k_cache, v_cache, scale, out_BHV, sinks_H=sinks_H)
            return out_BHV
        _attention_decode(
            self._shape_pointer,
            q_BHK.data_ptr(),
            q_BHK.stride(0),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            scale,
            None if sinks_H is None else sinks_H.data_ptr(),
            out_BHV.data_ptr(),
            torch.get_num_threads(),
        )
        return out_BHV
