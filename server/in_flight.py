"""Requests in flight: admission, the client's disconnect, time limits, keep-alives.

A request here is one of HTTP that holds sequences of the engine. What can end it from outside (the client goes away,
stops reading, or its time is up) cancels the task that serves it, which closes its engine streams and so aborts its
sequences at once. One clock serves them all, so that a token costs no timer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Literal

from starlette.types import Receive, Send

from server.errors import bad_request, unavailable
from server.http import ResponseWriter

Cause = Literal["disconnect", "stalled", "timeout"]
STALL_SECONDS = 60.0  # a client that takes nothing for so long is gone
TICK_SECONDS = 0.5
PING = b": keep-alive\n\n"


class InFlightRequest:
    """Make it in the task that serves the request, and `close` it there; then `cause` says what ended it (None:
    itself).

    num_sequences: how many sequences of the engine it holds. answer_id: what its answer is called. prompt_ids: the
    engine's names of its prompts.
    """

    def __init__(self, request_id: str, num_sequences: int, deadline: float | None) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.request_id = request_id
        self.num_sequences = num_sequences
        self.answer_id = ""
        self.prompt_ids: list[str] = []
        self.deadline = deadline
        self.cause: Cause | None = None
        self.pinger: asyncio.Task[None] | None = None
        self._task = task
        self._watcher: asyncio.Task[None] | None = None
        self._open = True
        self._send: Send | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self.started = False  # the response's status line has gone
        self.sending = False
        self.quiet_since = time.monotonic()

    def stop(self, cause: Cause) -> None:
        if self._open and self.cause is None:
            self.cause = cause
            self._task.cancel()

    def watch(self, receive: Receive) -> None:
        """From now on a disconnect stops the request. The body must have been read."""
        self._watcher = asyncio.create_task(self._watch(receive))

    async def _watch(self, receive: Receive) -> None:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.stop("disconnect")
                return

    def close(self) -> None:
        """When something stopped it, the cancellation that told so has been caught by now, and is taken back here."""
        self._open = False
        if self._watcher is not None:
            self._watcher.cancel()
        if self.cause is not None:
            self._task.uncancel()

    # ---- an event stream ---------------------------------------------------------------------------------------

    def stream_to(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        """The request's answer is an event stream: the clock may begin it and fill its silences."""
        self._send = send
        self._headers = headers

    async def write(self, data: bytes, now: float, more: bool = True) -> None:
        """Send whole events, after the status line if this is the first write. now: time.monotonic()."""
        send = self._send
        assert send is not None
        if self.pinger is not None:  # two sends at once could reach a slow connection in the wrong order
            await asyncio.wait([self.pinger])
            self.pinger = None
        self.sending = True
        self.quiet_since = now
        if not self.started:
            self.started = True
            await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        await send({"type": "http.response.body", "body": data, "more_body": more})
        self.sending = False

    def write_to(self, response_writer: ResponseWriter, data: bytes, now: float) -> None:
        """Like `write`, without a wait; only while the response_writer is open and nothing `is_writing`."""
        self.quiet_since = now
        response_writer.write(data)

    @property
    def is_writing(self) -> bool:
        return self.sending or (self.pinger is not None and not self.pinger.done())

    async def _ping(self) -> None:
        send = self._send
        assert send is not None
        if not self.started:
            self.started = True
            await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        await send({"type": "http.response.body", "body": PING, "more_body": True})
        self.quiet_since = time.monotonic()

    def tick(self, now: float, keep_alive: float) -> None:
        quiet = now - self.quiet_since
        if self.deadline is not None and now >= self.deadline:
            self.stop("timeout")
        elif self._send is None:
            return
        elif self.is_writing:
            if quiet >= STALL_SECONDS + keep_alive:
                self.stop("stalled")
        elif keep_alive > 0 and quiet >= keep_alive:
            self.pinger = asyncio.create_task(self._ping())


class InFlightRequests:
    """All of them. capacity(): sequences that run at once; max_queued: how many more may wait."""

    def __init__(
        self, *, capacity: Callable[[], int], max_queued: int, request_timeout: float, keep_alive: float
    ) -> None:
        self._capacity = capacity
        self._max_queued = max_queued
        self._timeout = request_timeout
        self._keep_alive = keep_alive
        self._in_flight: set[InFlightRequest] = set()
        self.num_sequences = 0
        self.num_refused = 0

    def __len__(self) -> int:
        return len(self._in_flight)

    def open(self, request_id: str, num_sequences: int) -> InFlightRequest:
        """ApiError: 503 when too many wait, 400 when the request alone is too many."""
        limit = self._capacity() + self._max_queued
        if num_sequences > limit:
            message = f"{num_sequences} sequences in one request are more than the {limit} that this server takes"
            raise bad_request(message, "n", "too_many_sequences")
        if self.num_sequences + num_sequences > limit:
            self.num_refused += 1
            raise unavailable(f"{self._max_queued} sequences are already waiting; try again later")
        deadline = time.monotonic() + self._timeout if self._timeout > 0 else None
        current = InFlightRequest(request_id, num_sequences, deadline)
        self._in_flight.add(current)
        self.num_sequences += num_sequences
        return current

    def close(self, current: InFlightRequest) -> None:
        self._in_flight.discard(current)
        self.num_sequences -= current.num_sequences
        current.close()

    def prompt_ids(self, request_ids: Sequence[str]) -> list[str]:
        """The engine's names of what these requests hold. An answer's id ("cmpl-...") names its request too."""
        wanted = set(request_ids)
        named = (current for current in self._in_flight if {current.request_id, current.answer_id} & wanted)
        return [name for current in named for name in current.prompt_ids]

    async def clock(self) -> None:
        """Runs until it is cancelled."""
        period = TICK_SECONDS
        for limit in (self._timeout, self._keep_alive):
            if limit > 0:
                period = min(period, limit / 4)
        while True:
            await asyncio.sleep(period)
            now = time.monotonic()
            for current in list(self._in_flight):
                current.tick(now, self._keep_alive)
