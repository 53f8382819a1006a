"""What one consumer sees of a running request: an async iterator over what each step adds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

from front.front import EngineFailed
from front.outputs import Delta

Sink = Callable[[list[Delta]], bool]


class RequestStream:
    """An async iterator of list[Delta]: what has come since the last look, in order (usually one engine step's).

    Close it when leaving early (`contextlib.aclosing`): that aborts the request on its rank at once, and so does
    cancelling the task that waits in it. A lost rank shows as a pause; EngineFailed when all are lost. For one task.
    """

    def __init__(self, drop: Callable[[RequestStream], None], num_choices: int) -> None:
        """drop: called when the consumer leaves."""
        self._drop = drop
        self._open = num_choices  # choices whose end has not been read
        self._coming = num_choices  # choices whose end has not come
        self._deltas: list[Delta] = []
        self._error: str | None = None
        self._closed = False
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Sink | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Delta]:
        while not self._deltas:
            if self._closed or not self._open:
                raise StopAsyncIteration
            if self._error is not None:
                raise EngineFailed(self._error)
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                await self.aclose()
                raise
            finally:
                self._waiter = None
        deltas = self._deltas
        self._deltas = []
        for delta in deltas:
            if delta.finish_reason is not None:
                self._open -= 1
        return deltas

    def set_sink(self, sink: Sink) -> None:
        """Spare the consumer's task its wake-up: while it waits in this iterator for the next step, `sink` gets what
        comes.

        What it takes (True) is not iterated over. It must not wait; it is never given the end of a choice.
        """
        self._sink = sink

    async def aclose(self) -> None:
        """Abort the request if it has not finished; what was not read is dropped. May be called again."""
        self._closed = True
        self._deltas = []
        self._drop(self)
        self.wake()

    def push(self, delta: Delta) -> bool:
        """True: nothing more will come."""
        self._deltas.append(delta)
        if delta.finish_reason is not None:
            self._coming -= 1
            self._sink = None  # the end, and what comes with it or after it, is the task's
        return not self._coming

    def fail(self, error: str) -> None:
        self._error = error
        self.wake()

    def wake(self) -> None:
        """What was pushed since the last call can be read."""
        if self._waiter is None or self._waiter.done():
            return
        # The consumer waits, so it has read all that came before this.
        if self._sink is not None and self._deltas and self._poured(self._sink):
            return
        self._waiter.set_result(None)

    def _poured(self, sink: Sink) -> bool:
        try:
            taken = sink(self._deltas)
        except Exception:  # it shows again in the consumer's task, whose request alone it ends
            self._sink = None
            return False
        if taken:
            self._deltas = []
        return taken
