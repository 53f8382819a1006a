"""The residual stream of a step's tokens at the layers that the step began last, in memory that outlives the rank: a
step that a loss has broken off goes on there, and not at the embedding (docs/surviving.md).

A rank keeps it at the start of layers that exchange rows with other ranks, and behind the last of them. No rank begins
such a layer before all others have begun the one before it, so two of them are enough: whatever moment ranks end in,
all have one in common.

The memory: `KeptTokens.num_bytes` that say what is kept, then the rows [places, tokens, bytes of a row].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cache.rows import Ints

NUM_PLACES = 2
_NUMBERS = NUM_PLACES + 2  # before the arrays
_PAGE = 4096

Bytes = npt.NDArray[np.uint8]


class Kept(NamedTuple):
    """Of one token. layers: of each place, at the start of which layer its row is; -1: of none."""

    layers: tuple[int, ...]
    rows: Bytes  # [places, bytes of a row]


class KeptTokens:
    """What is kept. layers [places], int64: at the start of which layer the rows of that place are; -1: they are being
    written, or are of no step. Whoever runs the steps writes it."""

    def __init__(self, memory: Bytes, num_rows: int) -> None:
        """memory: bytes, of which `num_bytes` are used; num_rows: of the batch."""
        whole = memory[: 8 * (_NUMBERS + 4 * num_rows)].view(np.int64)
        self.layers: Ints = whole[:NUM_PLACES]
        self._count = whole[NUM_PLACES : NUM_PLACES + 1]  # entries of the step
        self._advanced = whole[NUM_PLACES + 1 : _NUMBERS]  # tokens by which each of them has gone on
        self._entries_4E = whole[_NUMBERS:].reshape(4, num_rows)  # as of `entries`

    @staticmethod
    def num_bytes(num_rows: int) -> int:
        return -(-8 * (_NUMBERS + 4 * num_rows) // _PAGE) * _PAGE

    def entries(self) -> Iterator[tuple[int, int, int, int]]:
        """Of each entry of the step its stay, where it starts, how many tokens it has, and the first of its rows;
        nothing while no layer is kept."""
        if (self.layers >= 0).any():
            for stay, start, num, first in self._entries_4E[:, : int(self._count[0])].T.tolist():
                yield stay, start + int(self._advanced[0]), num, first


class Residuals(KeptTokens):
    """With the rows, as whoever runs the steps has them. num_tokens: steps of more are not kept; 0: none is."""

    def __init__(self, memory: Bytes, num_rows: int, num_tokens: int, row_bytes: int) -> None:
        super().__init__(memory, num_rows)
        self.num_tokens = num_tokens
        first, size = self.num_bytes(num_rows), NUM_PLACES * num_tokens * row_bytes
        rows = memory[first : first + size].reshape(NUM_PLACES, num_tokens, row_bytes)
        places = torch.from_numpy(rows).unbind(), torch.from_numpy(self.layers).unbind()
        self._places: list[tuple[Tensor, Tensor]] = list(zip(*places, strict=True))

    def begin(
        self, stays_E: Ints, starts_E: Ints | Sequence[int], counts_E: Ints | int, firsts_E: Ints | Sequence[int]
    ) -> None:
        """A step of no more than num_tokens begins: its tokens from firsts_E on are counts_E of these stays
        (cache/rows.py) from starts_E on. Others are guesses, which nobody goes on with."""
        self.layers[:] = -1  # first: the process may end at any time
        stays, starts, counts, firsts = self._entries_4E[:, : len(stays_E)]
        stays[:], starts[:], counts[:], firsts[:] = stays_E, starts_E, counts_E, firsts_E
        self._advanced[0], self._count[0] = 0, len(stays_E)

    def advance(self) -> None:
        """A step begins in which each entry of the one before goes on by its next token; all have one."""
        if self.num_tokens:
            self.layers[:] = -1
            self._advanced[0] += 1

    def clear(self) -> None:
        """A step begins that is not kept."""
        if self.num_tokens:
            self.layers[:] = -1
            self._count[0] = 0

    def place(self, number: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Where the residual stream goes, [num_tokens, D], and the layer at whose start it is, int64 []; of the
        number-th layer that is kept."""
        rows_TD, layer = self._places[number % NUM_PLACES]
        return rows_TD.view(dtype), layer

    def kept(self) -> dict[tuple[int, int], Kept]:
        """Stay and position -> what is kept of the token. No step may be under way."""
        layers, rows = tuple(self.layers.tolist()), [rows_TD.numpy() for rows_TD, _ in self._places]
        return {
            (stay, start + index): Kept(layers, np.stack([place[first + index] for place in rows]))
            for stay, start, num, first in self.entries()
            for index in range(num)
        }


def no_residuals() -> Residuals:
    """Of a rank that keeps none."""
    return Residuals(np.zeros(KeptTokens.num_bytes(0), dtype=np.uint8), 0, 0, 1)
