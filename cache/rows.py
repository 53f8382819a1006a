"""Which blocks of the cache each row of a batch has, how far its sequence is computed, and which records hold a whole
state of it. No torch here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

_SINGLES = 6  # arrays of a number for each row
_OF_RECORDS = 2  # and for each record
_STAYS = 1 << 16  # of a sequence: what tells one stay of it in a row from the next


class CacheRows:
    """All int64. num_blocks [rows]; tables: of each token group [rows, columns]; stated [rows]: tokens of the row's
    sequence that were known when it came; computed [rows]: those that earlier steps have computed, at least. They
    belong to whoever runs the steps.

    stays, placed [rows]: whose they are (`stay_of`), 0: nobody's. The scheduler writes the first, and takes it back
    before the row's blocks go to others; whoever runs the steps writes the second, when the row is told of its
    sequence. Where the two are equal, the others are that stay's.

    behind [rows]: tokens of the sequence behind whose windows blocks may belong to others by now. The scheduler's.

    owners, standing [records]: which stay's state a record is (0: nobody's, or a step is writing it), and behind how
    many tokens it stands. So a record says of itself whether it is whole, however its process has ended. They belong to
    whoever runs the steps; there are none where nobody else reads them.
    """

    def __init__(
        self, memory: npt.NDArray[np.uint8], num_rows: int, columns: int, num_tables: int, num_records: int = 0
    ) -> None:
        """memory: bytes, of which `num_bytes` are used; zeros, or what such a table has left."""
        whole = memory[: self.num_bytes(num_rows, columns, num_tables, num_records)].view(np.int64)
        singles, of_records, tables = np.split(whole, np.cumsum([_SINGLES * num_rows, _OF_RECORDS * num_records]))
        self.stays, self.placed, self.stated, self.computed, self.num_blocks, self.behind = singles.reshape(
            _SINGLES, num_rows
        )
        self.owners, self.standing = of_records.reshape(_OF_RECORDS, num_records)
        self.tables: list[Ints] = list(tables.reshape(num_tables, num_rows, columns))

    @staticmethod
    def own(num_rows: int, columns: int, num_tables: int) -> CacheRows:
        """In memory of this process's own."""
        memory = np.zeros(CacheRows.num_bytes(num_rows, columns, num_tables), dtype=np.uint8)
        return CacheRows(memory, num_rows, columns, num_tables)

    @staticmethod
    def num_bytes(num_rows: int, columns: int, num_tables: int, num_records: int = 0) -> int:
        return 8 * (num_rows * (_SINGLES + num_tables * columns) + _OF_RECORDS * num_records)

    def find(self, sequence_id: int) -> int:
        """The row of that sequence; -1: it has none whose blocks are certainly its own."""
        held = np.flatnonzero((self.stays // _STAYS == sequence_id + 1) & (self.stays == self.placed))
        return int(held[0]) if len(held) else -1

    def certain(self, row: int, num_released: int) -> int:
        """How many of its sequence's first tokens are certainly computed. num_released: as many if it has released what
        comes of them; but in an earlier stay, after which they are computed again, it may have known them already."""
        in_this_stay = num_released if num_released >= int(self.stated[row]) else 0
        return max(in_this_stay, int(self.computed[row]), *self.states(row))

    # ---- records ----

    def states(self, row: int) -> dict[int, int]:
        """Of the row's stay: tokens behind which a whole state stands -> its record."""
        records = np.flatnonzero(self.owners == self.stays[row]) if self.stays[row] else ()
        return {int(self.standing[record]): int(record) for record in records}

    def begin_states(self, records: Sequence[int]) -> None:
        """They are about to be written: they are nobody's until `end_states`."""
        if records and len(self.owners):
            self.owners[records] = 0

    def end_states(self, records: Sequence[int], stays: Sequence[int] | Ints, num_tokens: Sequence[int] | Ints) -> None:
        """They are written, and whole: states of these stays behind so many tokens."""
        if records and len(self.owners):
            self.standing[records] = num_tokens
            self.owners[records] = stays  # last: whoever reads this from outside may do so at any time


def stay_of(sequence_id: int, num_preemptions: int) -> int:
    """A number above 0 for the stay of a sequence (0 or more) in a row, between two preemptions."""
    return (sequence_id + 1) * _STAYS + num_preemptions % _STAYS
