"""Which rows of the batch are free. No torch here."""

from __future__ import annotations

from heapq import heappop, heappush

from cache.rows import CacheRows


class BatchRows:
    """Rows 0 .. num_rows - 1. A row is more than memory of the device (the batch keeps state for it), so one that is
    given back is free again only when no step in flight refers to it."""

    def __init__(self, num_rows: int, rows: CacheRows | None = None) -> None:
        """rows: whose stays are kept up to date here."""
        self.num_rows = num_rows
        self._rows = rows or CacheRows.own(num_rows, 0, 0)
        self._free = list(range(num_rows))  # a heap: the lowest goes first
        self._retiring: list[tuple[int, int]] = []  # (last step that refers to it, row)
        self._freed: list[int] = []  # free, and not yet said so in a schedule

    @property
    def any_free(self) -> bool:
        return bool(self._free)

    def take(self, stay: int) -> int:
        row = heappop(self._free)
        self._rows.behind[row] = 0
        self._rows.stays[row] = stay
        return row

    def give_back(self, row: int, last_step: int) -> None:
        """To be called while its blocks are not yet free. last_step: the id of the last step that refers to it."""
        self._rows.stays[row] = 0
        self._retiring.append((last_step, row))

    def release(self, updated_step: int) -> None:
        """Steps up to updated_step are over."""
        if not self._retiring:
            return
        done = [row for last_step, row in self._retiring if last_step <= updated_step]
        self._retiring = [(last_step, row) for last_step, row in self._retiring if last_step > updated_step]
        self._freed += done
        for row in done:
            heappush(self._free, row)

    def take_freed(self, restates: bool) -> list[int]:
        """The rows that a schedule says are free; restates: all of them, because it states the others anew."""
        freed, self._freed = (list(range(self.num_rows)) if restates else self._freed), []
        return freed

    def check(self, num_held: int) -> None:
        """For tests: raises AssertionError unless so many rows are held, and every other one is free or about to be."""
        assert len(self._free) + len(self._retiring) + num_held == self.num_rows, "a row is lost"
        assert len(set(self._free)) == len(self._free)
