"""Two all-to-alls that live together and share the experts' weights: one for steps with many tokens, one for steps with
few.

Which one a step takes follows from the largest number of tokens that any rank brings to it: all ranks have agreed on
that before the step begins (engine/agreement.py), so they all take the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct
from torch import Tensor

from ep.protocol import AllToAll, Arrived, Later, Pending, Routing
from ep.vocab_parallel import MAX_ROWS, Part, VocabParallel
from moe_kernels import Layout
from native.tape import Late

Confirm = Callable[[], None]


class StepState:
    """What the exchanges of one rank must know of the step under way, and do around it. One per rank; the lanes of
    every epoch are made with it."""

    def __init__(self) -> None:
        self._largest: int | None = None
        self.recorded_tokens = 0
        self._waits: dict[int, Callable[[Late], None]] = {}
        self._before: list[Callable[[], None]] = []
        self._after: list[Callable[[], Confirm]] = []
        self.vocab: VocabParallel | None = None  # of an epoch whose ranks share their head

    @property
    def largest(self) -> int:
        """Tokens of the rank that has most. Raises RuntimeError outside of a step: the ranks have agreed on no number
        then, and one that takes the last step's may take another backend than its peers."""
        if self._largest is None:
            raise RuntimeError("the exchange has not been told of this step (StepState.begin)")
        return self._largest

    def record(self, tokens: int, waits: Mapping[int, Callable[[Late], None]]) -> None:
        """In steps in which no rank has more than so many tokens the exchanges of this epoch can be on a tape
        (native/tape.py). waits: of each lane, by its key, what waits for the others where the tape stops."""
        self.recorded_tokens, self._waits = tokens, dict(waits)

    def wait_late(self, late: Late) -> None:
        """Until a tape that has stopped in an exchange may go on. Raises PeerLost."""
        self._waits[late.key](late)

    def watch(self, before: Callable[[], None] | None = None, after: Callable[[], Confirm] | None = None) -> None:
        """before: called when a step has been agreed on; after: when its exchanges are queued on the device. What that
        gives waits for their end and raises PeerLost if not all of them were whole."""
        if before is not None:
            self._before.append(before)
        if after is not None:
            self._after.append(after)

    def forget(self) -> None:
        """The lanes are not used any more, and no step is under way."""
        self.ended()
        self.record(0, {})
        self.vocab = None
        self._before.clear()
        self._after.clear()

    def begin(self, largest: int) -> None:
        """A step begins, in which no rank has more than `largest` tokens; the same on all ranks."""
        self._largest = largest
        for act in self._before:
            act()

    def logits(self, hidden_PD: Tensor, part: Part, largest: int) -> Tensor | None:
        """Of the rows that this rank samples in the step, [P, V], computed by all ranks together; None: each has its
        own to compute. Every rank asks once in each step; largest: as of `begin`. Raises PeerLost."""
        if self.vocab is None or largest > MAX_ROWS:
            return None
        return self.vocab.logits(hidden_PD, part)

    def ended(self) -> None:
        """The exchanges of the step, or of what was captured, are queued: what comes next has a size of its own."""
        self._largest = None

    def seal(self) -> Confirm:
        """All exchanges of the step are queued on the device. What comes back waits for their end, also when the next
        step is queued behind them by then, and raises PeerLost unless what they brought is whole; until it has returned
        nothing of the step is read. Backends whose waits say so themselves have nothing to add; a GPU's kernels cannot
        raise.

        Queued in reverse order and waited for in order: so the wait of the first watcher, which is the group's, is
        for what all others have queued too.
        """
        self.ended()
        if not self._after:
            return _nothing
        confirms = [act() for act in reversed(self._after)]

        def confirm() -> None:
            for wait in reversed(confirms):
                wait()

        return confirm

    def confirm(self) -> None:
        """The same, waiting at once."""
        self.seal()()


def _nothing() -> None:
    """No backend has anything to add."""


class _Ticket(Struct, frozen=True):
    a2a: AllToAll
    ticket: object


class PairedLane:
    """One lane of both. Steps in which no rank has more than `few` tokens go by `small`, all others by `large`."""

    def __init__(self, state: StepState, large: AllToAll, small: AllToAll, few: int) -> None:
        self._state = state
        self._large = large
        self._small = small
        self._few = few

    @property
    def layout(self) -> Layout:
        """Of the rows of this step."""
        return self._taken().layout

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Pending[Arrived]:
        a2a = self._taken()
        return Later(_arrived, a2a, a2a.dispatch(x_TD, routing))

    def combine(self, y: Tensor, ticket: object, out_TD: Tensor) -> Pending[Tensor]:
        assert isinstance(ticket, _Ticket)
        return ticket.a2a.combine(y, ticket.ticket, out_TD)

    def close(self) -> None:
        self._large.close()
        self._small.close()

    def _taken(self) -> AllToAll:
        return self._small if self._state.largest <= self._few else self._large


def _arrived(a2a: AllToAll, pending: Pending[Arrived]) -> Arrived:
    arrived = pending.wait()
    return Arrived(arrived.batch, _Ticket(a2a, arrived.ticket))
