"""An all-to-all that another one is put into, to record when it sends, waits, and lets the experts work.

While nobody records, it is not there: `traced` and `plain` change a layer's lanes between two steps.

Legend: T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Generic, TypeVar

from torch import Tensor

from ep.protocol import AllToAll, Arrived, Pending, Routing
from ep.recorder import Kind, Recorder
from moe_kernels import Layout, TokenBatch

V = TypeVar("V")


class TracedAllToAll:
    """One layer's use of one lane. All that a rank computes for its lanes is computed by one thread, so what lies
    between two exchanges of a lane is known by where the last slice ended (Recorder.resumed)."""

    def __init__(self, inner: AllToAll, recorder: Recorder, layer: int, lane: int) -> None:
        self.inner = inner
        self.recorder = recorder
        self._layer = layer
        self._lane = lane

    @property
    def layout(self) -> Layout:
        """Of the rows of this step."""
        return self.inner.layout

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Pending[Arrived]:
        num_tokens = x_TD.shape[0]
        self.record(Kind.ATTENTION, self.recorder.resumed, num_tokens)
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
        return _Waited(self, Kind.WAIT_COMBINE, back, out_TD.shape[0])

    def close(self) -> None:
        self.inner.close()

    def record(self, kind: Kind, began: int, amount: int) -> int:
        """A slice that ends now; returns now."""
        recorder, now = self.recorder, perf_counter_ns()
        recorder.add(kind, began, now, recorder.step, amount, self._layer, self._lane)
        recorder.resumed = now
        return now


def traced(lanes: Sequence[AllToAll], recorder: Recorder, layer: int) -> list[AllToAll]:
    """The lanes of a layer, recorded. `recorder` takes the place of one that they may have had."""
    return [TracedAllToAll(inner, recorder, layer, lane) for lane, inner in enumerate(plain(lanes))]


def plain(lanes: Sequence[AllToAll]) -> list[AllToAll]:
    """The lanes of a layer as they are without records."""
    return [lane.inner if isinstance(lane, TracedAllToAll) else lane for lane in lanes]


@dataclass(frozen=True, slots=True)
class _Ticket:
    inner: object
    arrived_at: int
    num_rows: int  # padding included


class _Waited(Generic[V]):
    __slots__ = ("_kind", "_lane", "_num_tokens", "_pending", "ended")

    def __init__(self, lane: TracedAllToAll, kind: Kind, pending: Pending[V], num_tokens: int) -> None:
        self.ended = 0  # the wait
        self._lane = lane
        self._kind = kind
        self._pending = pending
        self._num_tokens = num_tokens

    def wait(self) -> V:
        began = perf_counter_ns()
        value = self._pending.wait()
        self.ended = self._lane.record(self._kind, began, self._num_tokens)
        return value


class _Sent(_Waited[Arrived]):
    __slots__ = ()

    def wait(self) -> Arrived:
        arrived = super().wait()
        batch = arrived.batch
        x = batch.x_TD if isinstance(batch, TokenBatch) else batch.x
        return Arrived(batch, _Ticket(arrived.ticket, self.ended, x.shape[:-1].numel()))
