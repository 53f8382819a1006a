"""From logits to tokens in the native kernel (native/src/sampling.h). engine/sampling/sampler.py is the specification.

Legend: P rows, V vocabulary, N listed (row, token id) pairs, in rising order of the row.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Struct
from torch import Tensor

from native.features import Isa, isa
from native.library import function

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.int32]
Array = Words | npt.NDArray[np.int64] | npt.NDArray[np.float32] | npt.NDArray[np.uint64]

_LOGIT_TYPES = {torch.float32: 0, torch.bfloat16: 1}
_NUMBERS = ("logit_type", "num_rows", "num_tokens", "stride")
_ARRAYS = (
    "random", "temperature", "top_p", "min_p", "top_k", "seed_key", "position", "mask_of", "masks", "has_allowed",
    "allowed_start", "allowed", "forbidden_start", "forbidden", "bias_start", "bias_id", "bias", "penalty_start",
    "penalty_id", "penalty",
)  # fmt: skip


class _SampleCall(ctypes.Structure):
    """SampleCall of sampling.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _NUMBERS),
        ("logits", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in _ARRAYS),
        ("penalty_stride", ctypes.c_int64),
        ("mask_words", ctypes.c_int64),
        ("token", ctypes.c_void_p),
    )


_sampling_rows = function("sampling_rows", ctypes.POINTER(_SampleCall), ctypes.c_int)


class Draws(Struct, frozen=True):
    """What each row wants. random_P: int64, 0 where the largest logit is taken; then the others are not read."""

    random_P: Ints
    temperature_P: Floats
    top_p_P: Floats  # 1: all
    min_p_P: Floats  # 0: all
    top_k_P: Ints  # 0: all
    seed_keys_P: npt.NDArray[np.uint64]  # engine/sampling/noise.py
    positions_P: Ints


class Edits(Struct, frozen=True):
    """Changes to logits before the draw. Token ids are valid; none is twice in a row's list."""

    # int64 [P]: which mask a row has, -1: none; [N, W]: bit i of word w is 1 where token 32 w + i may be drawn. Where
    # the other edits leave none of these, it is the first of them.
    masks: tuple[Ints, Words] | None = None
    allowed: Sequence[tuple[int, Tensor]] = ()  # (p, token ids): the only ones that may be drawn; p rises
    forbidden: tuple[Tensor, Tensor] | None = None  # p int64 [N], ids int64 [N]
    bias: tuple[Tensor, Tensor, Tensor] | None = None  # p, ids, values float32 [1, N]
    # p, ids, float32 [4, N]: counts, repetition, presence, frequency
    penalties: tuple[Tensor, Tensor, Tensor] | None = None


class _Arrays(Struct):
    """Keeps alive what the call points to."""

    arrays: dict[str, Array] = {}

    def put(self, **arrays: Array) -> None:
        for name, array in arrays.items():
            assert array.flags.c_contiguous
            self.arrays[name] = array

    def put_edits(self, num_rows: int, edits: Edits) -> None:
        if edits.masks is not None:
            self.put(mask_of=edits.masks[0], masks=edits.masks[1])
        if edits.allowed:
            lens_P = np.zeros(num_rows + 1, np.int64)
            has_P = np.zeros(num_rows, np.int64)
            for p, ids in edits.allowed:
                lens_P[p + 1], has_P[p] = len(ids), 1
            every = torch.cat([ids for _, ids in edits.allowed]).numpy()
            self.put(has_allowed=has_P, allowed_start=lens_P.cumsum(), allowed=every)
        rows = np.arange(num_rows + 1)
        if edits.forbidden is not None:
            p_N, ids_N = (one.numpy() for one in edits.forbidden)
            self.put(forbidden_start=p_N.searchsorted(rows), forbidden=ids_N)
        if edits.bias is not None:
            p_N, ids_N, values_MN = (one.numpy() for one in edits.bias)
            self.put(bias_start=p_N.searchsorted(rows), bias_id=ids_N, bias=values_MN)
        if edits.penalties is not None:
            p_N, ids_N, values_MN = (one.numpy() for one in edits.penalties)
            self.put(penalty_start=p_N.searchsorted(rows), penalty_id=ids_N, penalty=np.ascontiguousarray(values_MN))


def can_run(logits_PV: Tensor) -> bool:
    """Whether tokens of such logits can be drawn here."""
    return logits_PV.dtype in _LOGIT_TYPES and logits_PV.device.type == "cpu" and isa() > Isa.NONE


def draw_tokens(logits_PV: Tensor, draws: Draws, edits: Edits) -> Tensor:
    """int64 [P]. The caller asks `can_run`. Rows of logits may be apart; they are not changed.

    Tokens of equal probability are kept or dropped together by top_k, top_p and min_p; of equal largest logits the
    first is taken. NaN counts as forbidden; where everything is forbidden the token is 0, or the first of the mask.
    """
    num_rows, num_tokens = logits_PV.shape
    assert logits_PV.stride(1) == 1 and num_tokens > 0
    arrays = _Arrays()
    arrays.put(
        random=draws.random_P,
        temperature=draws.temperature_P,
        top_p=draws.top_p_P,
        min_p=draws.min_p_P,
        top_k=draws.top_k_P,
        seed_key=draws.seed_keys_P,
        position=draws.positions_P,
    )
    arrays.put_edits(num_rows, edits)
    token_P = torch.empty(num_rows, dtype=torch.int64)
    call = _SampleCall(
        _LOGIT_TYPES[logits_PV.dtype],
        num_rows,
        num_tokens,
        logits_PV.stride(0),
        logits_PV.data_ptr(),
        *(arrays.arrays[name].ctypes.data if name in arrays.arrays else None for name in _ARRAYS),
        edits.penalties[1].numel() if edits.penalties is not None else 0,
        edits.masks[1].shape[1] if edits.masks is not None else 0,
        token_P.data_ptr(),
    )
    _sampling_rows(ctypes.byref(call), torch.get_num_threads())
    return token_P
