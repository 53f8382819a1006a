"""From a step that verifies drafts to the passes behind it (native/src/drafts.cpp), for tapes.

Legend: T tokens of the step, S sequences, A passes, N blocks per sequence.
"""

from __future__ import annotations

import ctypes

from torch import Tensor

from native.features import Isa, isa
from native.library import function

_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64


class _Call(ctypes.Structure):
    """FollowCall of drafts.cpp."""

    _fields_ = (
        *((name, _NUMBER) for name in ("sequences", "passes", "block_size")),
        *((name, _POINTER) for name in ("drawn", "given", "positions", "starts", "rows", "table")),
        *((name, _NUMBER) for name in ("columns", "next_columns")),
        *((name, _POINTER) for name in ("places", "next_positions", "next_slots", "next_lens", "next_table")),
    )


_drafts_follow = function("drafts_follow", ctypes.POINTER(_Call))


def can_run() -> bool:
    """Whether the kernel is here."""
    return isa() > Isa.NONE


def follow(
    step: tuple[Tensor, Tensor, Tensor],
    starts: Tensor,
    rows_S: Tensor,
    table_RN: Tensor,
    block_size: int,
    places_S: Tensor,
    following: tuple[Tensor, Tensor, Tensor, Tensor] | None,
) -> None:
    """Into places_S the last token of each sequence before which all drafts were right, and what the passes behind it
    read; all int64. step: what was sampled after each token, the token, its position [T]; starts: [S + 1] on the token
    axis; table_RN: blocks of each row of the batch. following: positions, slots, kv_lens [A S] and the block table
    [S, N] of the passes, of which each is a token further; None: there are none."""
    num = len(rows_S)
    passes = 0 if following is None or not num else len(following[0]) // num
    nothing = (None, None, None, None) if following is None else tuple(part.data_ptr() for part in following)
    assert table_RN.stride(1) == 1 and (following is None or following[3].stride(1) == 1)
    _drafts_follow(
        _Call(
            num, passes, block_size, *(part.data_ptr() for part in step), starts.data_ptr(), rows_S.data_ptr(),
            table_RN.data_ptr(), table_RN.stride(0), 0 if following is None else following[3].stride(0),
            places_S.data_ptr(), *nothing,
        )
    )  # fmt: skip
