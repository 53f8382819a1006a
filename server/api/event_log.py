"""The server-sent events of a response that runs in the background, kept so that clients can come and go."""

from __future__ import annotations

import asyncio
import time

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.api.generate import SSE_HEADERS
from server.service import Service, record_of


class EventLog:
    """The place of an event in it is its sequence_number."""

    def __init__(self, events: bytes = b"", ended: bool = False) -> None:
        self._events: list[bytes] = []
        self._changed = asyncio.Event()
        self.ended = ended
        self.add(events)

    def __len__(self) -> int:
        return len(self._events)

    def add(self, events: bytes) -> None:
        """events: as they are sent; no line in them is empty but the last of each."""
        if events:
            self._events += [event + b"\n\n" for event in events.removesuffix(b"\n\n").split(b"\n\n")]
            self._wake()

    def end(self) -> bytes:
        """No more will come. Returns all of them."""
        self.ended = True
        self._wake()
        return b"".join(self._events)

    async def after(self, count: int) -> list[bytes]:
        """Waits for those behind the first `count`; []: there are none and there will be none."""
        while len(self._events) <= count and not self.ended:
            await self._changed.wait()
        return self._events[count:]

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Followed(Response):
    """The answer of who follows a log. It ends with the log; that its client goes away ends nothing else. Of
    starlette's Response it keeps only that it is an ASGI application."""

    def __init__(self, service: Service, log: EventLog, begin: int) -> None:
        """begin: the place of the first event that is sent."""
        self._service = service
        self._log = log
        self._begin = begin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        log, sent, in_flight = self._log, self._begin, self._service.in_flight
        current = in_flight.open(record_of(scope).request_id, 0)
        current.deadline = None  # the response has one of its own
        try:
            current.watch(receive)
            current.stream_to(send, SSE_HEADERS)
            while True:
                events = await log.after(sent)
                sent += len(events)
                ended = log.ended and sent >= len(log)
                await current.write(b"".join(events), time.monotonic(), more=not ended)
                if ended:
                    return
        except asyncio.CancelledError:
            if current.cause is None:
                raise
            record_of(scope).status, record_of(scope).finish = 499, current.cause
        finally:
            in_flight.close(current)
