"""An all-to-all that another one is put into, to know how long its exchanges are under way and waited for, and to
record when it sends, waits, and lets the experts work.

A lane of a rank that never splits steps has no such wrapper while no profile is taken; `recorded` and `unrecorded`
change a layer's lanes between two steps.

Legend: T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns
from typing import Any, Generic, TypeVar

from msgspec import Struct
from torch import Tensor

from ep.protocol import AllToAll, Arrived, Pending, Routing
from ep.recorder import Kind, Recorder
from moe_kernels import Layout, TokenBatch

V = TypeVar("V")


class ExchangeTimes:
    """Of all lanes of a rank, since its start. Written by the thread that computes; any other may read.

    communication: seconds from when rows were sent until they were taken, summed over the exchanges; exposed: the part
    of it in which this rank did nothing but wait. An exchange that was waited for took all of its communication.
    """

    def __init__(self) -> None:
        self.communication = 0.0
        self.exposed = 0.0
        self.under_way: dict[int, _Watched[Any]] = {}  # the last exchange of each lane

    def timed(self, lanes: Sequence[AllToAll]) -> list[AllToAll]:
        """The lanes that the rank exchanges through from now on."""
        self.under_way.clear()
        return [InstrumentedLane(lane, number, times=self) for number, lane in enumerate(lanes)]

    def finish(self) -> None:
        """Wait for the exchanges under way: a forward pass that is not carried on leaves its lanes in order, if it
        ended in a combine."""
        for pending in self.under_way.values():
            if not pending.done:
                pending.wait()
        self.under_way.clear()


def recorded(lanes: Sequence[AllToAll], recorder: Recorder, layer: int) -> list[AllToAll]:
    """The lanes of a layer, recorded. `recorder` takes the place of one that they may have had."""
    found: list[AllToAll] = []
    for number, lane in enumerate(unrecorded(lanes)):
        inner, times = (lane.inner, lane.times) if isinstance(lane, InstrumentedLane) else (lane, None)
        found.append(InstrumentedLane(inner, number, times, recorder, layer, plain=lane))
    return found


def unrecorded(lanes: Sequence[AllToAll]) -> list[AllToAll]:
    """The lanes of a layer as they are without records."""
    return [lane.plain if isinstance(lane, InstrumentedLane) and lane.plain is not None else lane for lane in lanes]


class InstrumentedLane:
    """One lane, or one layer's use of it; it has at most one exchange under way.

    All that a rank computes for its lanes is computed by one thread, so what lies between two exchanges of a lane is
    known by where the last slice ended (Recorder.resumed).
    """

    def __init__(
        self,
        inner: AllToAll,
        lane: int,
        times: ExchangeTimes | None = None,
        recorder: Recorder | None = None,
        layer: int = 0,
        plain: AllToAll | None = None,
    ) -> None:
        """plain: the lane that this one stands in for while `recorder` records."""
        self.inner = inner
        self.lane = lane
        self.times = times
        self.plain = plain
        self._recorder = recorder
        self._layer = layer

    @property
    def layout(self) -> Layout:
        """Of the rows of this step: a pair's change from step to step."""
        return self.inner.layout

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Pending[Arrived]:
        num_tokens = x_TD.shape[0]
        recorder = self._recorder
        if recorder is not None:
            self.record(Kind.ATTENTION, recorder.resumed, num_tokens)
        began = perf_counter_ns()
        sent = self.inner.dispatch(x_TD, routing)
        self.record(Kind.DISPATCH, began, num_tokens)
        return _Sent(self, Kind.WAIT_DISPATCH, sent, num_tokens)

    def combine(self, y: Tensor, ticket: object, out_TD: Tensor) -> Pending[Tensor]:
        assert isinstance(ticket, _Ticket)
        self.record(Kind.EXPERTS, ticket.arrived_at, ticket.num_rows)
        began = perf_counter_ns()
        back = self.inner.combine(y, ticket.inner, out_TD)
        self.record(Kind.COMBINE, began, ticket.num_rows)
        return _Watched(self, Kind.WAIT_COMBINE, back, out_TD.shape[0])

    def close(self) -> None:
        self.inner.close()

    def record(self, kind: Kind, began: int, amount: int, ended: int = 0) -> None:
        """A slice. ended: 0 for now."""
        recorder = self._recorder
        if recorder is not None:
            recorder.resumed = ended or perf_counter_ns()
            recorder.add(kind, began, recorder.resumed, recorder.step, amount, self._layer, self.lane)


class _Ticket(Struct, frozen=True):
    inner: object
    arrived_at: int
    num_rows: int  # padding included


class _Watched(Generic[V]):
    __slots__ = ("_kind", "_lane", "_num_tokens", "_pending", "_sent", "done", "ended")

    def __init__(self, lane: InstrumentedLane, kind: Kind, pending: Pending[V], num_tokens: int) -> None:
        self.done = False
        self.ended = 0  # the wait
        self._lane = lane
        self._kind = kind
        self._pending = pending
        self._num_tokens = num_tokens
        self._sent = perf_counter_ns()
        if lane.times is not None:
            lane.times.under_way[lane.lane] = self

    def wait(self) -> V:
        began = perf_counter_ns()
        value = self._pending.wait()
        now = self.ended = perf_counter_ns()
        self.done = True
        times = self._lane.times
        if times is not None:
            times.communication += (now - self._sent) * 1e-9
            times.exposed += (now - began) * 1e-9
        self._lane.record(self._kind, began, self._num_tokens, now)
        return value


class _Sent(_Watched[Arrived]):
    __slots__ = ()

    def wait(self) -> Arrived:
        arrived = super().wait()
        batch = arrived.batch
        x = batch.x_TD if isinstance(batch, TokenBatch) else batch.x
        return Arrived(batch, _Ticket(arrived.ticket, self.ended, x.shape[:-1].numel()))
