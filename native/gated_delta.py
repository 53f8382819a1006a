"""Linear attention in the native kernel (native/src/delta.h): from what a layer projects of its tokens to what its
heads give, in one call.

Legend: T tokens, B sequences, H value heads, V width of a value, C channels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from native.features import Isa, isa
from native.library import function

MAX_TAPS = 16
_X_TYPES = {torch.float32: 0, torch.bfloat16: 1}
_SIZES = (
    "x_type", "num_sequences", "key_heads", "heads", "key_dim", "value_dim", "taps", "channel_decay", "sigmoid_gate",
)  # fmt: skip
_INPUTS = ("qkv", "gate", "beta", "decay")
_PARAMETERS = ("conv", "rate", "dt_bias", "norm")
_PLACES = ("starts", "reads", "writes", "tails", "states", "out")
_RUNS = ("applied", "guesses", "kept_qkv", "kept_beta", "kept_decay")


class _Call(ctypes.Structure):
    """DeltaCall of delta.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_void_p) for name in _INPUTS),
        *((f"{name}_stride", ctypes.c_int64) for name in _INPUTS),
        *((name, ctypes.c_void_p) for name in (*_PARAMETERS, *_PLACES)),
        ("eps", ctypes.c_float),
        ("lower_bound", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in _RUNS),
        ("most_kept", ctypes.c_int64),
    )


_delta_run = function("delta_run", ctypes.POINTER(_Call), ctypes.c_int)


def can_run(qkv_TC: Tensor, taps: int) -> bool:
    return qkv_TC.dtype in _X_TYPES and qkv_TC.device.type == "cpu" and isa() > Isa.NONE and taps <= MAX_TAPS


def gated_delta(
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    sizes: Sequence[int],
    starts: Tensor | None,
    records: Sequence[Tensor],
    cache: Sequence[Tensor],
    eps: float,
    lower_bound: float,
) -> Tensor:
    """[T, H * V]: layers.gated_delta.gated_delta of its inputs and parameters. sizes: key heads, heads, widths of a key
    and a value, taps, and whether there is a decay for each channel and the gate is a sigmoid. starts: int64 [B + 1],
    where each sequence's tokens begin; None: each has one. records: int64 [B] that are read, and written; of a
    step with drafts also how many kept inputs come first, and how many drafts last, with `starts` on the host
    (layers.step.StateRuns). cache: tails and states; and what was kept, where there may be drafts."""
    qkv_TC = inputs[0]
    reads_B, writes_B, *runs = records
    tails, states, *kept = cache
    assert all(x.is_contiguous() and x.dtype is torch.int64 for x in runs)
    assert all(x.is_contiguous() and x.dtype is qkv_TC.dtype for x in kept)
    assert all(x.stride(1) == 1 and x.dtype is qkv_TC.dtype for x in inputs)
    assert all(x.is_contiguous() and x.dtype is torch.float32 for x in (*parameters, states))
    assert tails.is_contiguous() and tails.dtype is qkv_TC.dtype
    assert reads_B.is_contiguous() and writes_B.is_contiguous() and reads_B.dtype is writes_B.dtype is torch.int64
    out_TV = qkv_TC.new_empty((qkv_TC.shape[0], sizes[1] * sizes[3]))
    call = _Call(
        _X_TYPES[qkv_TC.dtype],
        reads_B.shape[0],
        *sizes,
        *(x.data_ptr() for x in inputs),
        *(x.stride(0) for x in inputs),
        *(x.data_ptr() for x in parameters),
        None if starts is None else starts.data_ptr(),
        *(x.data_ptr() for x in (reads_B, writes_B, tails, states, out_TV)),
        eps,
        lower_bound,
        *([x.data_ptr() for x in (*runs, *kept)] if runs else [None] * len(_RUNS)),
        kept[0].shape[1] if runs else 0,
    )
    _delta_run(ctypes.byref(call), torch.get_num_threads())
    return out_TV
