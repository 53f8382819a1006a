"""An all-to-all that another one is put into, to know how long its exchanges are under way, and how long they are
waited for.

Legend: T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Generic, TypeVar

from torch import Tensor

from ep.protocol import AllToAll, Arrived, Pending, Routing
from moe_kernels import Layout

V = TypeVar("V")


class Flights:
    """Of all lanes of a rank, since its start. Written by whoever computes; anybody may read.

    flown: seconds from when rows were sent until they were taken, summed over the exchanges; waited: the part of it in
    which this rank did nothing but wait. An exchange that was waited for took as long as it was flown.
    """

    def __init__(self) -> None:
        self.flown = 0.0
        self.waited = 0.0
        self._lanes: list[TimedAllToAll] = []

    def timed(self, lanes: Sequence[AllToAll]) -> Sequence[AllToAll]:
        """The lanes that the rank exchanges through from now on."""
        self._lanes = [TimedAllToAll(lane, self) for lane in lanes]
        return self._lanes

    def settle(self) -> None:
        """Wait for whatever is still under way: a forward pass that is not carried on leaves its lanes in order, if it
        ended in a combine."""
        for lane in self._lanes:
            lane.settle()


class TimedAllToAll:
    """One lane; it has at most one exchange under way."""

    def __init__(self, inner: AllToAll, flights: Flights) -> None:
        self.flights = flights
        self._inner = inner
        self._under_way: _Timed[Arrived] | _Timed[Tensor] | None = None

    @property
    def layout(self) -> Layout:
        """Of the rows of this step: a pair's change from step to step."""
        return self._inner.layout

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Pending[Arrived]:
        sent = _Timed(self._inner.dispatch(x_TD, routing), self.flights)
        self._under_way = sent
        return sent

    def combine(self, y: Tensor, ticket: object, out_TD: Tensor) -> Pending[Tensor]:
        back = _Timed(self._inner.combine(y, ticket, out_TD), self.flights)
        self._under_way = back
        return back

    def settle(self) -> None:
        pending, self._under_way = self._under_way, None
        if pending is not None and not pending.done:
            pending.wait()

    def close(self) -> None:
        self._inner.close()


class _Timed(Generic[V]):
    __slots__ = ("_flights", "_pending", "_sent", "done")

    def __init__(self, pending: Pending[V], flights: Flights) -> None:
        self._pending = pending
        self._flights = flights
        self._sent = perf_counter()
        self.done = False

    def wait(self) -> V:
        began = perf_counter()
        value = self._pending.wait()
        now = perf_counter()
        self.done = True
        self._flights.flown += now - self._sent
        self._flights.waited += now - began
        return value
