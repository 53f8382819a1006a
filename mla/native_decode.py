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
        q_BHX = absorb(q_nope_BHN, q_pe_BHP, w_uk_HNC)
        keys = cache_RX[:, None]
        return expand(self._attend(q_BHX, keys, keys[..., : self._shape.latent_dim], self._scale), w_uv_HVC)


def absorb(q_nope_THN: Tensor, q_pe_THP: Tensor, w_uk_HNC: Tensor) -> Tensor:
    """Queries in the latent's space, [T, H, X]; in fixed order a row's numbers are added up in one, whatever T is."""
    num, heads, nope = q_nope_THN.shape
    latent, rope = w_uk_HNC.shape[2], q_pe_THP.shape[2]
    assert w_uk_HNC.is_contiguous() and w_uk_HNC.dtype is q_nope_THN.dtype is q_pe_THP.dtype
    assert q_nope_THN.stride(2) == q_pe_THP.stride(2) == 1
    q_THX = q_nope_THN.new_empty(num, heads, latent + rope)
    strides = _Strides(*q_nope_THN.stride()[:2], *q_pe_THP.stride()[:2])
    _attention_absorb(
        _X_TYPES[q_nope_THN.dtype], q_nope_THN.data_ptr(), q_pe_THP.data_ptr(), strides, w_uk_HNC.data_ptr(),
        q_THX.data_ptr(), num, heads, nope, latent, rope, torch.get_num_threads(),
    )  # fmt: skip
    return q_THX


def expand(mixed_THC: Tensor, w_uv_HVC: Tensor) -> Tensor:
    """Out of the latent's space, [T, H, V]; the same holds."""
    num, heads, latent = mixed_THC.shape
    assert mixed_THC.is_contiguous() and w_uv_HVC.is_contiguous() and w_uv_HVC.dtype is mixed_THC.dtype
    out_THV = mixed_THC.new_empty(num, heads, w_uv_HVC.shape[1])
    _attention_expand(
        _X_TYPES[mixed_THC.dtype], mixed_THC.data_ptr(), w_uv_HVC.data_ptr(), out_THV.data_ptr(),
        num, heads, latent, w_uv_HVC.shape[1], torch.get_num_threads(),
    )  # fmt: skip
    return out_THV
