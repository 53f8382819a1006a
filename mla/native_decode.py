"""Decodes in the native kernels: queries go into the latent's space, attend to the cache in place, and results come out
of it.

Legend: B sequences with one query each, H heads; N, P, C, X, V widths (mla/protocol.py), R rows of the cache.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from layers.paged_decode import PagedDecode, can_decode
from layers.step import StepInput
from mla import native_tiles
from mla.native_tiles import LatentTiles
from mla.protocol import MlaShape
from native import function

_X_TYPES = {torch.float32: 0, torch.bfloat16: 1}
_POINTER, _NUMBER, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_Strides = _NUMBER * 4  # QueryStrides of attention.h
_attention_absorb = function(
    "attention_absorb", _INT, _POINTER, _POINTER, _Strides, _POINTER, _POINTER, *[_NUMBER] * 5, _INT
)
_attention_expand = function("attention_expand", _INT, *[_POINTER] * 3, *[_NUMBER] * 4, _INT)


def can_run(shape: MlaShape, dtype: torch.dtype, device: torch.device) -> bool:
    return shape.qk_nope_head_dim % 2 == 0 and can_decode(dtype, device)


class NativeDecode:
    """The decodes of one step, at least one; prepared once for all layers."""

    def __init__(self, step: StepInput, shape: MlaShape, scale: float, dtype: torch.dtype) -> None:
        self.num_sequences = step.num_decodes
        self._shape, self._scale = shape, scale
        self._attend = (
            LatentTiles(step, shape)
            if native_tiles.can_run(shape, dtype)
            else PagedDecode(step, shape.num_heads, 1, shape.cache_dim, shape.latent_dim, dtype)
        )

    def __call__(
        self, q_nope_BHN: Tensor, q_pe_BHP: Tensor, cache_RX: Tensor, w_uk_HNC: Tensor, w_uv_HVC: Tensor
    ) -> Tensor:
        """[B, H, V]."""
        shape, num = self._shape, self.num_sequences
        x_type, threads = _X_TYPES[q_nope_BHN.dtype], torch.get_num_threads()
        assert w_uk_HNC.is_contiguous() and w_uv_HVC.is_contiguous() and w_uk_HNC.dtype is q_nope_BHN.dtype
        assert q_nope_BHN.stride(2) == q_pe_BHP.stride(2) == 1 and q_pe_BHP.dtype is q_nope_BHN.dtype
        q_BHX = q_nope_BHN.new_empty(num, shape.num_heads, shape.cache_dim)
        strides = _Strides(*q_nope_BHN.stride()[:2], *q_pe_BHP.stride()[:2])
        _attention_absorb(
            x_type, q_nope_BHN.data_ptr(), q_pe_BHP.data_ptr(), strides, w_uk_HNC.data_ptr(), q_BHX.data_ptr(),
            num, shape.num_heads, shape.qk_nope_head_dim, shape.latent_dim, shape.qk_rope_head_dim, threads,
        )  # fmt: skip
        keys = cache_RX[:, None]
        mixed_BHC = self._attend(q_BHX, keys, keys[..., : shape.latent_dim], self._scale)
        out_BHV = q_nope_BHN.new_empty(num, shape.num_heads, shape.v_head_dim)
        _attention_expand(
            x_type, mixed_BHC.data_ptr(), w_uv_HVC.data_ptr(), out_BHV.data_ptr(),
            num, shape.num_heads, shape.latent_dim, shape.v_head_dim, threads,
        )  # fmt: skip
        return out_BHV
