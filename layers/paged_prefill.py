"""Causal attention of prompts in the native kernel (native/src/prefill.h): it walks the block table, nothing is
gathered.

Legend: T tokens of the step, B sequences, H query heads, Hkv key/value heads, K width of a key, V width of a value, R
rows of the cache, N blocks per sequence.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from layers.step import StepInput
from native import Isa, function, isa

_X_TYPES = {torch.float32: 0, torch.bfloat16: 1}
_NUMBERS = (
    "x_type", "num_sequences", "num_heads", "num_kv_heads", "key_dim", "shared_dim", "v_head_dim", "block_size",
    "q_stride", "key_stride", "shared_stride", "value_stride", "out_stride", "starts", "ends", "lens", "table",
    "table_stride", "q", "keys", "shared", "values", "out", "window", "sinks",
)  # fmt: skip


class _Call(ctypes.Structure):
    """PrefillCall of prefill.h; pointers as numbers."""

    _fields_ = (*((name, ctypes.c_int64) for name in _NUMBERS), ("scale", ctypes.c_float))


_attention_prefill = function("attention_prefill", ctypes.POINTER(_Call), ctypes.c_int)
_attention_fixed_order = function("attention_fixed_order", ctypes.POINTER(_Call), ctypes.c_int)


def can_prefill(dtype: torch.dtype, device: torch.device, key_dim: int, shared_dim: int = 0) -> bool:
    """Whether prompts with such queries and keys can be attended to here. shared_dim: the part of a key's width that is
    the same for all heads."""
    even = dtype is torch.float32 or (key_dim % 2 == 0 and shared_dim % 2 == 0)
    return even and device.type == "cpu" and dtype in _X_TYPES and isa() > Isa.NONE


class PagedPrefill:
    """Some sequences of a step, at least one, prepared once for all layers.

    Each one's queries are the last of its tokens; they see the tokens before them and themselves.
    """

    def __init__(
        self,
        queries: Sequence[tuple[int, int]],
        lens: Sequence[int],
        table_BN: Tensor,
        block_size: int,
        window: int = 0,
    ) -> None:
        """queries: of each sequence its first query among the tokens, and the place behind its last. lens: tokens of
        each sequence. table: int64, its blocks. window: keys that a query sees, its own included; 0: all."""
        assert len(queries) == len(lens) == table_BN.shape[0]
        assert all(0 <= first <= last for first, last in queries)
        starts_ends = torch.tensor(queries, dtype=torch.int64).T.contiguous()
        self._keep(starts_ends, torch.tensor(lens, dtype=torch.int64), table_BN.contiguous(), block_size, window)

    def _keep(self, starts_ends: Tensor | None, lens_B: Tensor, table_BN: Tensor, block_size: int, window: int) -> None:
        assert table_BN.dtype is lens_B.dtype is torch.int64
        self.num_sequences = len(lens_B)
        self.block_size, self.window = block_size, window
        self._starts_ends, self._lens_B, self._table_BN = starts_ends, lens_B, table_BN
        self._attend = _attention_prefill

    @classmethod
    def of_decodes(cls, lens_B: Tensor, table_BN: Tensor, block_size: int, window: int = 0) -> PagedPrefill:
        """Sequences with one query each, one after another. lens and table (contiguous) are read where they are, at
        every call: a graph can hold it."""
        decodes = cls.__new__(cls)
        decodes._keep(None, lens_B, table_BN, block_size, window)
        decodes._attend = _attention_fixed_order
        return decodes

    @staticmethod
    def behind_decodes(step: StepInput, window: int = 0) -> PagedPrefill:
        """All sequences of the step but its decodes."""
        first, starts = step.num_decodes, step.query_starts
        queries = [(starts[b], starts[b + 1]) for b in range(first, step.num_sequences)]
        return PagedPrefill(queries, step.kv_lens[first:], step.block_table_BN[first:], step.block_size, window)

    def __call__(
        self,
        q_THK: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        scale: float,
        out_THV: Tensor,
        shared_cache: Tensor | None = None,
        sinks_H: Tensor | None = None,
    ) -> None:
        """Writes the rows of out [T, H, V] that are these sequences' queries.

        k_cache [R, Hkv, K], v_cache [R, Hkv, V], shared_cache [R, S]: K numbers, and S more that all heads share, make
        up a key; q [T, H, K + S]. Tokens and cache rows may be apart; rows that no query sees are not looked at. sinks
        float32: as layers.reference.paged_attention has them.
        """
        shared_dim = 0 if shared_cache is None else shared_cache.shape[1]
        _, num_heads, width = q_THK.shape
        num_kv_heads, key_dim, v_head_dim = *k_cache.shape[1:], v_cache.shape[2]
        assert width == key_dim + shared_dim and num_heads % num_kv_heads == 0 and scale > 0
        assert q_THK.dtype is k_cache.dtype is v_cache.dtype is out_THV.dtype
        assert _rows_are_whole(k_cache) and _rows_are_whole(v_cache) and _rows_are_whole(out_THV)
        if not _rows_are_whole(q_THK):
            q_THK = q_THK.contiguous()
        call = _Call(
            _X_TYPES[q_THK.dtype],
            self.num_sequences,
            num_heads,
            num_kv_heads,
            key_dim,
            shared_dim,
            v_head_dim,
            self.block_size,
            q_THK.stride(0),
            k_cache.stride(0),
            0 if shared_cache is None else shared_cache.stride(0),
            v_cache.stride(0),
            out_THV.stride(0),
            0 if self._starts_ends is None else self._starts_ends[0].data_ptr(),
            0 if self._starts_ends is None else self._starts_ends[1].data_ptr(),
            self._lens_B.data_ptr(),
            self._table_BN.data_ptr(),
            self._table_BN.shape[1],
            q_THK.data_ptr(),
            k_cache.data_ptr(),
            0 if shared_cache is None else shared_cache.data_ptr(),
            v_cache.data_ptr(),
            out_THV.data_ptr(),
            self.window,
            0 if sinks_H is None else sinks_H.data_ptr(),
            scale,
        )
        self._attend(ctypes.byref(call), torch.get_num_threads())


def _rows_are_whole(x_RHK: Tensor) -> bool:
    """Heads lie side by side."""
    return x_RHK.stride(2) == 1 and (x_RHK.shape[1] == 1 or x_RHK.stride(1) == x_RHK.shape[2])
