"""What each kind of cache group has of a sequence when its rank has ended, and where it goes in another rank's cache.

A kind of group answers two questions (`Part`): behind how many of the sequence's first tokens one can go on with what
is there, and which rows are to be copied for that. A sequence is taken over as far as *every* group can provide it, as
a prefix is found (cache/manager.py). No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from cache.manager import Holding
from cache.rows import CacheRows
from cache.spec import CacheGroup, CacheSpec


class Move(NamedTuple):
    """Rows of a field (of a state group: records) that follow each other there and here."""

    there: int
    num: int
    here: int


class Taken(NamedTuple):
    """A sequence that is taken over, of that row there. num_tokens: as many as `reaches` has given; end: with those
    behind them that a step was about to compute. blocks: the row's table of that number. held: what the sequence has
    here."""

    rows: CacheRows
    row: int
    num_tokens: int
    end: int
    blocks: Callable[[int], Sequence[int]]
    held: Holding


class Part(Protocol):
    """Of one group."""

    def reaches(self, rows: CacheRows, row: int, num_tokens: int) -> int:
        """The most tokens, num_tokens or fewer, behind which that row's sequence can go on; 0: none."""
        ...

    def moves(self, taken: Taken) -> list[Move]:
        """Raises LookupError where a block is not the sequence's own any more."""
        ...


class TokenPart:
    """Paged and window groups: of the blocks that the next token sees, all rows."""

    def __init__(self, group: CacheGroup, block_size: int, table: int) -> None:
        """table: the number of its table of blocks."""
        self._group, self._block_size, self._table = group, block_size, table

    def reaches(self, rows: CacheRows, row: int, num_tokens: int) -> int:
        """A rank may have gone on by a step that nobody has heard of, and given a block back that is seen here."""
        needed, kept = (self._first(num) for num in (num_tokens, int(rows.behind[row])))
        return num_tokens if kept <= needed else 0

    def moves(self, taken: Taken) -> list[Move]:
        size, seen = self._block_size, slice(self._first(taken.num_tokens), -(-taken.end // self._block_size))
        moves: list[Move] = []
        for there, here in zip(taken.blocks(self._table)[seen], taken.held.tables[self._table][seen], strict=True):
            if there < 0:
                raise LookupError(f"block {there}")
            move = Move(there * size, size, here * size)
            if moves and (moves[-1].there + moves[-1].num, moves[-1].here + moves[-1].num) == (move.there, move.here):
                moves[-1] = moves[-1]._replace(num=moves[-1].num + size)
            else:
                moves.append(move)
        return moves

    def _first(self, num_tokens: int) -> int:
        return self._group.first_block(num_tokens, self._block_size)


class StatePart:
    """State groups: the record that stands there."""

    def reaches(self, rows: CacheRows, row: int, num_tokens: int) -> int:
        return max((num for num in rows.states(row) if num <= num_tokens), default=0)

    def moves(self, taken: Taken) -> list[Move]:
        assert taken.held.state is not None
        return [Move(taken.rows.states(taken.row)[taken.num_tokens], 1, taken.held.state.current)]


def parts_of(spec: CacheSpec, block_size: int) -> list[Part]:
    """One for each group."""
    parts: list[Part] = []
    num_tables = 0
    for group in spec:
        if group.kind == "state":
            parts.append(StatePart())
        else:
            parts.append(TokenPart(group, block_size, num_tables))
            num_tables += 1
    return parts


def reach(parts: Sequence[Part], rows: CacheRows, row: int, num_tokens: int) -> int:
    """The most tokens that all of them can provide, num_tokens or fewer."""
    while num_tokens and (least := min(part.reaches(rows, row, num_tokens) for part in parts)) < num_tokens:
        num_tokens = least
    return num_tokens
