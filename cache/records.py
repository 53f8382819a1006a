"""The records of state groups: versions of the state of every sequence, and checkpoints for the prefix cache. No torch
here.

A record is a number that all state groups share. Record 0 is the state before the first token: zeros that are never
written. A step reads a sequence's current record and writes a free one, which becomes the current one when the step's
tokens are released. So a step that was dropped has changed nothing, and a state that stood at the end of a block can be
kept as a checkpoint without copying it. Steps run in the order of their schedules on one device, so a record may be
handed out again as soon as no later schedule reads it.

A step with drafts writes the state behind the last token that is certain, and keeps in the same record what it has
projected of the drafts. Those that were accepted come first in the sequence's next step, which moves the state by them.
A checkpoint is such a record too: of its kept inputs none is used.
"""

from __future__ import annotations

from collections import OrderedDict, deque

ZEROS = 0


class StateRecords:
    """Records 0 .. num_records - 1; at most num_checkpoints of them are kept for the prefix cache."""

    def __init__(self, num_records: int, num_checkpoints: int) -> None:
        self.num_records = num_records
        self._num_checkpoints = num_checkpoints
        self._free = list(range(num_records - 1, ZEROS, -1))
        self._refs: dict[int, int] = {}
        self._key_to_record: OrderedDict[bytes, int] = OrderedDict()  # least recently used first

    def find(self, key: bytes) -> int | None:
        return self._key_to_record.get(key)

    def begin(self, key: bytes | None) -> SequenceState:
        """The state of a sequence that goes on from the checkpoint of this key (None: from nothing)."""
        record = ZEROS
        if key is not None:
            record = self._key_to_record[key]
            self._key_to_record.move_to_end(key)
            self._refs[record] += 1
        return SequenceState(record)

    def arrive(self) -> SequenceState:
        """The state of a sequence that has a record of its own, which is filled from elsewhere."""
        return SequenceState(self._take())

    def schedule(self, state: SequenceState) -> tuple[int, int]:
        """(what the next step of the sequence reads, what it writes)."""
        written = self._take()
        reads = state.pending[-1] if state.pending else state.current
        state.pending.append(written)
        return reads, written

    def commit(self, state: SequenceState, key: bytes | None = None) -> None:
        """The oldest scheduled step is done: what it wrote is current. key: keep it as a checkpoint."""
        self._release(state.current)
        state.current, state.num_kept = state.pending.popleft(), 0
        if key is not None and self._num_checkpoints and key not in self._key_to_record:
            while len(self._key_to_record) >= self._num_checkpoints:
                self._release(self._key_to_record.popitem(last=False)[1])
            self._key_to_record[key] = state.current
            self._refs[state.current] += 1

    def drop_pending(self, state: SequenceState) -> None:
        """The scheduled steps are forgotten."""
        while state.pending:
            self._release(state.pending.popleft())

    def end(self, state: SequenceState) -> None:
        self.drop_pending(state)
        self._release(state.current)
        state.current, state.num_kept = ZEROS, 0

    def forget_checkpoints(self) -> None:
        while self._key_to_record:
            self._release(self._key_to_record.popitem()[1])

    def check(self, states: list[SequenceState]) -> None:
        """For tests: raises AssertionError unless exactly these sequences and the checkpoints hold records."""
        holders: dict[int, int] = {}
        owned = [record for state in states for record in (state.current, *state.pending)]
        for record in [*owned, *self._key_to_record.values()]:
            if record != ZEROS:
                holders[record] = holders.get(record, 0) + 1
        assert holders == self._refs
        assert sorted([*self._free, *holders]) == list(range(1, self.num_records)), "a record is lost, or in two places"

    def _take(self) -> int:
        if not self._free:  # checkpoints are only what is left over
            while self._key_to_record and not self._free:
                self._release(self._key_to_record.popitem(last=False)[1])
        record = self._free.pop()
        self._refs[record] = 1
        return record

    def _release(self, record: int) -> None:
        if record == ZEROS:
            return
        self._refs[record] -= 1
        if self._refs[record] == 0:
            del self._refs[record]
            self._free.append(record)


class SequenceState:
    """current: the record after the last token released, or before the last num_kept of them, whose inputs it keeps.
    pending: what steps in flight write, oldest first."""

    __slots__ = ("current", "num_kept", "pending")

    def __init__(self, current: int) -> None:
        self.current = current
        self.num_kept = 0
        self.pending: deque[int] = deque()
