"""uvicorn's HTTP protocol, with limits on headers, OpenAI bodies for what is not HTTP at all, and a shorter way out for
the pieces of an answer."""

from __future__ import annotations

import asyncio

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from server.errors import ApiError

HEADER_SECONDS = 30.0  # a client that has not sent its headers by then is not one
_EXTENSION = "moesaic.response"
_OFFER = (b"upgrade", b"connection", b"http2-settings")  # headers that offer another protocol


class ResponseWriter:
    """The way of a begun answer's pieces straight to the connection, with no coroutine: `write` only while it is
    `open`."""

    __slots__ = ("_cycle", "_flow", "_transport")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._transport = cycle.transport

    @property
    def open(self) -> bool:
        """False: before the head, after the end, and while the client does not keep up."""
        cycle = self._cycle
        return bool(
            cycle.chunked_encoding and not (self._flow.write_paused or cycle.response_complete or cycle.disconnected)
        )

    def write(self, data: bytes) -> None:
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def response_writer_of(scope: Scope) -> ResponseWriter | None:
    """None: this server has no such way, `send` is the only one."""
    writer: ResponseWriter | None = scope.get("extensions", {}).get(_EXTENSION, {}).get("writer")
    return writer


def _offer_response_writer(cycle: RequestResponseCycle | None, scope: object) -> None:
    if cycle is not None and cycle.scope is scope:  # not, if this request was refused
        cycle.scope["extensions"] = {_EXTENSION: {"writer": ResponseWriter(cycle)}}


class StayingProtocol(HttpToolsProtocol):
    """A client may offer another protocol beside its request (Java's offers h2c), which a server need not take. The
    parser takes all behind such headers for the other protocol: so they are read again without the offer.

    A client that has sent several requests at once and leaves has left all of them, not the last one only."""

    _unanswered: tuple[RequestResponseCycle, ...] = ()

    def connection_lost(self, exc: Exception | None) -> None:
        for cycle in self._unanswered:
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._should_upgrade():
                self.handle_websocket_upgrade()
            elif self.scope["method"] == "CONNECT":
                self.send_400_response("CONNECT is not allowed here")
            else:
                self._read_again(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _read_again(self, rest: bytes) -> None:
        """rest: what came behind the headers."""
        lines = [b"%b %b HTTP/1.1" % (self.scope["method"].encode(), self.url)]
        lines += [b"%b: %b" % item for item in self.scope["headers"] if item[0] not in _OFFER]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"\r\n".join([*lines, b"", rest]))

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() and not self._should_upgrade():
            self.scope["method"] = self.parser.get_method().decode("ascii")
        else:
            super().on_headers_complete()
            going = (cycle for cycle in self._unanswered if not cycle.response_complete)
            self._unanswered = (*going, self.cycle)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()


def bounded_protocol(max_header_bytes: int) -> type[asyncio.Protocol]:
    """A protocol class that answers 431 while headers come, before they fill the memory (httptools has no limit)."""

    class BoundedProtocol(StayingProtocol):
        _header_bytes = 0
        _in_headers = False
        _header_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._begin_headers()

        def connection_lost(self, exc: Exception | None) -> None:
            self._end_headers()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._in_headers:
                self._header_bytes += len(data)
                if self._header_bytes > max_header_bytes:
                    self._refuse(ApiError(431, f"the headers are larger than {max_header_bytes} bytes"))

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._begin_headers()

        def on_headers_complete(self) -> None:
            self._end_headers()
            super().on_headers_complete()
            _offer_response_writer(self.cycle, self.scope)  # its task has not begun

        def send_400_response(self, msg: str) -> None:
            self._refuse(ApiError(400, msg, code="invalid_http"))

        def _begin_headers(self) -> None:
            self._end_headers()
            self._header_bytes = 0
            self._in_headers = True
            self._header_timer = self.loop.call_later(HEADER_SECONDS, self._late)

        def _end_headers(self) -> None:
            self._in_headers = False
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None

        def _late(self) -> None:
            self._refuse(ApiError(408, f"no complete headers within {HEADER_SECONDS:g} s"))

        def _refuse(self, error: ApiError) -> None:
            self._end_headers()
            if self.transport.is_closing():
                return
            body = error.body()
            head = b"HTTP/1.1 %d \r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            self.transport.write(head % (error.status, len(body)) + body)
            self.transport.close()

    return BoundedProtocol
