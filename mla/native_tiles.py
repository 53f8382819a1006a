"""Latent attention of decodes on matrix tiles (native/src/latent_tiles.h): what is packed of a sequence's keys serves
all heads.

Legend: B sequences with one query each, H heads; C, X widths (mla/protocol.py), R rows of the cache.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from layers.step import StepInput
from mla.protocol import MlaShape
from native import Isa, fixed_order, function, isa, library

_NUMBERS = ("num_sequences", "num_heads", "key_dim", "value_dim", "block_size", "q_stride", "key_stride")


class _Call(ctypes.Structure):
    """LatentTilesCall of latent_tiles.h; pointers as numbers."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in (*_NUMBERS, "lens", "table", "table_stride", "q", "keys", "out")),
        ("scale", ctypes.c_float),
    )


_latent_tiles = function("latent_tiles", ctypes.POINTER(_Call), ctypes.c_int)


def can_run(shape: MlaShape, dtype: torch.dtype) -> bool:
    """Whether matrix tiles are there, faster than other ways (native/choice.py), and full of so many heads. Not where a
    decode must give the bits of a prompt's token."""
    kernels = library()
    if kernels is None or isa() is Isa.NONE or dtype is not torch.bfloat16 or shape.cache_dim % 2 or fixed_order():
        return False
    wanted = kernels["latent_tiles_wanted"]
    wanted.argtypes, wanted.restype = (ctypes.c_int64,), ctypes.c_int
    return bool(wanted(shape.num_heads))


class LatentTiles:
    """The decodes of one step, at least one, prepared once for all layers; called as layers.paged_decode's."""

    def __init__(self, step: StepInput, shape: MlaShape) -> None:
        self._shape, self._block_size, self._num = shape, step.block_size, step.num_decodes
        self._lens_B, self._table_BN = step.kv_lens_B.contiguous(), step.block_table_BN.contiguous()
        assert self._lens_B.dtype is torch.int64 and self._table_BN.dtype is torch.int64

    def __call__(self, q_BHX: Tensor, keys_R1X: Tensor, values_R1C: Tensor, scale: float) -> Tensor:
        """[B, H, C]. values: the first part of the keys."""
        assert q_BHX.is_contiguous() and q_BHX.dtype is keys_R1X.dtype is torch.bfloat16 and keys_R1X.stride(2) == 1
        assert values_R1C.data_ptr() == keys_R1X.data_ptr() and scale > 0
        out_BHC = q_BHX.new_empty(self._num, self._shape.num_heads, self._shape.latent_dim)
        call = _Call(
            self._num,
            self._shape.num_heads,
            self._shape.cache_dim,
            self._shape.latent_dim,
            self._block_size,
            q_BHX.stride(0),
            keys_R1X.stride(0),
            self._lens_B.data_ptr(),
            self._table_BN.data_ptr(),
            self._table_BN.shape[1],
            q_BHX.data_ptr(),
            keys_R1X.data_ptr(),
            out_BHC.data_ptr(),
            scale,
        )
        _latent_tiles(ctypes.byref(call), torch.get_num_threads())
        return out_BHC
