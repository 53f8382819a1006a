"""Steps that verify drafts: how they are laid out, and what leads from them to the passes behind them
(native/src/drafts.cpp).

Legend: T tokens of the step, S sequences, A passes, N blocks per sequence.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from native.features import Isa, isa
from native.library import function

Ints = npt.NDArray[np.int64]

_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64


class _BatchRows(ctypes.Structure):
    """BatchRows of drafts.cpp."""

    _fields_ = (
        ("token_ids", _POINTER), ("token_stride", _NUMBER), ("known", _POINTER), ("num_blocks", _POINTER),
        ("most_tokens", _NUMBER),
    )  # fmt: skip


class _LayOut(ctypes.Structure):
    """LayOutCall of drafts.cpp."""

    _fields_ = (
        ("batch", _POINTER),
        *((name, _NUMBER) for name in ("sequences", "groups", "block_size", "columns", "next_columns")),
        *((name, _POINTER) for name in ("rows", "starts", "counts", "drafts", "tables", "next_tables", "fields")),
        ("field_stride", _NUMBER),
        *((name, _POINTER) for name in ("lens", "row_of", "behind", "first")),
        ("used", _NUMBER),
        ("room", _NUMBER),
    )

    sequences: int
    rows: int
    starts: int
    counts: int
    drafts: int
    row_of: int
    behind: int
    first: int
    used: int
    room: int


class _Call(ctypes.Structure):
    """FollowCall of drafts.cpp."""

    _fields_ = (
        ("batch", _POINTER),
        *((name, _NUMBER) for name in ("sequences", "passes", "block_size")),
        *((name, _POINTER) for name in ("drawn", "given", "positions", "starts", "rows", "table")),
        *((name, _NUMBER) for name in ("columns", "next_columns")),
        *((name, _POINTER) for name in ("places", "next_positions", "next_slots", "next_lens", "next_table")),
    )


_drafts_follow = function("drafts_follow", ctypes.POINTER(_Call))
_drafts_lay_out = function("drafts_lay_out", ctypes.POINTER(_LayOut))


def can_run() -> bool:
    """Whether the kernel is here."""
    return isa() > Isa.NONE


class BatchRows:
    """What the kernels read and write of the rows of a batch, which stays where it is. token_ids: int32 [rows, ..];
    known, num_blocks: int64 [rows]; tables: of each token group of the cache, int64 [rows, columns]. most_tokens: of a
    sequence."""

    def __init__(
        self,
        token_ids: npt.NDArray[np.int32],
        known: Ints,
        num_blocks: Ints,
        tables: Sequence[Ints],
        block_size: int,
        most_tokens: int,
    ) -> None:
        self._kept = token_ids, known, num_blocks, tuple(tables)
        self._call = _BatchRows(
            token_ids.ctypes.data, token_ids.shape[1], known.ctypes.data, num_blocks.ctypes.data, most_tokens
        )
        self.address = ctypes.addressof(self._call)
        self._tables = (_POINTER * len(tables))(*(table.ctypes.data for table in tables))
        self._columns, self._block_size = tables[0].shape[1], block_size

    def layout(self, fields_FT: Ints, lens_T: Ints, tables: Sequence[Tensor]) -> LayOut:
        """Of steps that lie there. fields_FT: token ids, positions, and slots of each group."""
        next_tables = (_POINTER * len(tables))(*(table.data_ptr() for table in tables))
        call = _LayOut(
            self.address, 0, len(tables), self._block_size, self._columns, tables[0].stride(0), None, None, None, None,
            ctypes.addressof(self._tables), ctypes.addressof(next_tables), fields_FT.ctypes.data,
            fields_FT.strides[0] // fields_FT.itemsize, lens_T.ctypes.data,
        )  # fmt: skip
        return LayOut(call, (self, next_tables, fields_FT, lens_T, tables))


class LayOut:
    """Lays out steps of as many tokens that verify drafts."""

    def __init__(self, call: _LayOut, kept: tuple[object, ...]) -> None:
        self._call, self._kept = call, kept

    def __call__(
        self, rows: list[int], starts: list[int], counts: list[int], drafts: list[int], num_tokens: int
    ) -> tuple[Ints, Ints, Ints, Ints, int, int]:
        """rows_T, positions_T behind each token, where sequences begin [S + 1], their rows [S]; how many columns of the
        tables count; places behind its tokens for which each sequence has blocks at least. drafts: of all sequences,
        one after another, behind the first token of each, which is known."""
        num, call = len(rows), self._call
        said = np.array(rows + starts + counts + drafts, dtype=np.int64)
        made = np.empty(2 * num_tokens + num + 1, dtype=np.int64)
        there, here = said.ctypes.data, made.ctypes.data
        call.sequences = num
        call.rows, call.starts, call.counts, call.drafts = there, there + 8 * num, there + 16 * num, there + 24 * num
        call.row_of, call.behind, call.first = here, here + 8 * num_tokens, here + 16 * num_tokens
        _drafts_lay_out(call)
        rows_T, behind_T = made[:num_tokens], made[num_tokens : 2 * num_tokens]
        return rows_T, behind_T, made[2 * num_tokens :], said[:num], call.used, call.room


def follow(
    batch: BatchRows | None,
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
    axis; table_RN: blocks of each row of the batch. batch: gets the tokens that count; None:
    it has them from elsewhere. following: positions, slots, kv_lens [A S] and the block table [S, N] of the passes, of
    which each is a token further; None: there are none."""
    num = len(rows_S)
    passes = 0 if following is None or not num else len(following[0]) // num
    nothing = (None, None, None, None) if following is None else tuple(part.data_ptr() for part in following)
    assert table_RN.stride(1) == 1 and (following is None or following[3].stride(1) == 1)
    _drafts_follow(
        _Call(
            None if batch is None else batch.address, num, passes, block_size, *(part.data_ptr() for part in step),
            starts.data_ptr(), rows_S.data_ptr(),
            table_RN.data_ptr(), table_RN.stride(0), 0 if following is None else following[3].stride(0),
            places_S.data_ptr(), *nothing,
        )
    )  # fmt: skip
