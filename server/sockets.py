"""/v1/responses over a WebSocket (docs/apis.md): each `response.create` is a request of its own, and each event of its
stream a message. Source: the Open Responses specification.

A message goes the whole way of a POST with `stream: true`: keys, limits, metrics and errors are the same. Only what
`store: false` leaves out is different: the newest response of a connection can be continued on that connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.stored import CHAIN, ResponseStore
from server.errors import ApiError, bad_request, unavailable
from server.middleware import Keys
from server.service import Service

PATH = "/v1/responses"
LIFETIME_SECONDS = 3600.0  # of a connection; its client opens another one
MAX_CONNECTIONS = 256
MAX_WAITING = 16  # messages of a connection; further ones are not read until there is room
GOING_AWAY = 1001
CLOSE_SECONDS = 5.0
_HANDSHAKE = (b"upgrade", b"connection", b"content-", b"transfer-encoding", b"sec-websocket-", b"expect")

_encode = msgspec.json.Encoder().encode
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_text = msgspec.json.Decoder(str)
_error = msgspec.json.Decoder(dict[str, dict[str, Any]])


class Sockets:
    """The application with WebSockets: `app` serves the requests, also those that come as messages."""

    def __init__(self, app: ASGIApp, service: Service, store: ResponseStore) -> None:
        self._app = app
        self._service = service
        self._store = store
        self._keys = Keys(service.config.api_key_digests, service.config.admin_key_digests)
        self._count = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            await self._app(scope, receive, send)
            return
        await receive()  # websocket.connect
        try:
            self._admit(scope)
        except ApiError as error:
            await _refuse(error, scope, receive, send)
            return
        await send({"type": "websocket.accept"})
        self._count += 1
        connection = _Connection(self._app, scope, receive, send, self._store)
        try:
            async with asyncio.timeout(LIFETIME_SECONDS):
                await connection.run()
        except TimeoutError:
            late = ApiError(408, f"a connection ends after {LIFETIME_SECONDS:g} s", code="websocket_lifetime_reached")
            await connection.fail(late)
        finally:
            self._count -= 1
            connection.forget()
        with contextlib.suppress(OSError, RuntimeError):  # the client has closed it
            await send({"type": "websocket.close", "code": GOING_AWAY})

    def _admit(self, scope: Scope) -> None:
        """ApiError. A browser says whose page opens the connection, and asks nobody's leave beforehand: here it must be
        this server's own, or one of the allowed."""
        config = self._service.config
        headers = dict(scope["headers"])
        path = scope["path"].removeprefix(config.root_path or "")
        if path != PATH:
            raise ApiError(404, f"there is no WebSocket at {path[:200]}", code="route_not_found")
        self._keys.check(PATH, headers)
        origin = headers.get(b"origin", b"").decode("latin-1")
        own = urlsplit(origin).netloc.encode() == headers.get(b"host", b"")
        if origin and not own and not {"*", origin} & set(config.allowed_origins):
            raise ApiError(403, f"the origin {origin[:80]} is not in --allowed-origins", code="origin_not_allowed")
        if self._count >= MAX_CONNECTIONS:
            raise unavailable(f"{MAX_CONNECTIONS} WebSockets are open already; try again later")


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """In the answer to the handshake, where the server can send one."""
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1008})
        return
    headers = [(b"content-type", b"application/json"), *error.headers]
    await send({"type": "websocket.http.response.start", "status": error.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": error.body()})
    with contextlib.suppress(TimeoutError):  # uvicorn calls it an error when we are done before the connection is
        async with asyncio.timeout(CLOSE_SECONDS):
            for _ in range(2):
                await receive()


class _Connection:
    """One client. Its messages are answered one after the other."""

    def __init__(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send, store: ResponseStore) -> None:
        kept = [(name, value) for name, value in scope["headers"] if not name.startswith(_HANDSHAKE)]
        self._headers = [*kept, (b"content-type", b"application/json")]
        self._app = app
        self._scope = scope
        self._receive = receive
        self._send = send
        self._store = store
        self._chain = f"{uuid.uuid4().hex}/"  # keeps what this connection alone may continue apart in the store
        self._newest = ""  # the response that it may continue
        self._inbox: asyncio.Queue[str | bytes] = asyncio.Queue(MAX_WAITING)
        self._gone = asyncio.Event()

    async def run(self) -> None:
        """Until the client has gone."""
        reader = asyncio.create_task(self._read())
        try:
            while not self._gone.is_set():
                message = await self._next()
                if message is not None:
                    await self._answer(message)
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    def forget(self) -> None:
        """What only this connection could continue."""
        self._store.drop(self._chain + self._newest)
        self._newest = ""

    async def fail(self, error: ApiError) -> None:
        await self._say_error(error.status, error.body())

    async def _read(self) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "websocket.disconnect":
                self._gone.set()
                return
            await self._inbox.put(message.get("text") or message.get("bytes") or b"")

    async def _next(self) -> str | bytes | None:
        """None: the client has gone."""
        waits = [asyncio.create_task(self._inbox.get()), asyncio.create_task(self._gone.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return waits[0].result() if waits[0].done() else None  # type: ignore[return-value]
        finally:
            for task in waits:
                task.cancel()

    # ---- one message -------------------------------------------------------------------------------------------

    async def _answer(self, message: str | bytes) -> None:
        try:
            body, previous = _body(message)
        except ApiError as error:
            await self.fail(error)
            return
        reply = _Reply(self)
        sent = False

        async def receive() -> Message:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": body, "more_body": False}
            await self._gone.wait()
            return {"type": "http.disconnect"}

        size = (b"content-length", str(len(body)).encode())
        scope: Scope = {
            **{
                name: self._scope.get(name)
                for name in ("asgi", "http_version", "server", "client", "root_path", "state")
            },
            "type": "http",
            "method": "POST",
            "scheme": "http",
            "path": PATH,
            "raw_path": PATH.encode(),
            "query_string": b"",
            "headers": [*self._headers, size],
            "extensions": {},
            CHAIN: self._chain,
        }
        await self._app(scope, receive, reply.send)
        if reply.status != 200:
            await self._say_error(reply.status, bytes(reply.body))
        if reply.newest:
            if reply.newest != self._newest:
                self.forget()
            self._newest = reply.newest
        elif previous == self._newest:
            self.forget()  # a turn that failed: its client begins anew

    async def say(self, event: bytes) -> None:
        try:
            await self._send({"type": "websocket.send", "text": event.decode()})
        except (OSError, RuntimeError):  # the client went away meanwhile
            self._gone.set()

    async def _say_error(self, status: int, body: bytes) -> None:
        """body: that of an answer over HTTP. `code` is a word in every error here."""
        error = _error.decode(body)["error"]
        said = {name: value for name, value in error.items() if value is not None}
        await self.say(_encode({"type": "error", "status": status, "error": {"code": "invalid_request", **said}}))


class _Reply:
    """What the application answers to one message. newest: the response's id, once it has ended well."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self.status = 0
        self.body = bytearray()  # of an error
        self.newest = ""

    async def send(self, message: Message) -> None:
        """Pieces of a stream are whole events."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif self.status != 200:
            self.body += message.get("body", b"")
        else:
            for event in message.get("body", b"").split(b"\n\n"):
                name, _, data = event.partition(b"\ndata: ")
                if not data:
                    continue  # a sign of life: connections have their own
                if name in (b"event: response.completed", b"event: response.incomplete"):
                    self.newest = msgspec.json.decode(data)["response"]["id"]
                await self._connection.say(data)


def _body(message: str | bytes) -> tuple[bytes, str]:
    """The request, and the response that it continues. ApiError 400."""
    try:
        fields = _fields.decode(message)
        kind, previous = (_word(fields, name) for name in ("type", "previous_response_id"))
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise bad_request(f"a message must be a JSON object with a type: {error}", code="invalid_json") from None
    if kind != "response.create":
        raise bad_request(f"type must be response.create, not {kind!r:.80}", "type", "unknown_event_type")
    del fields["type"]
    return _encode({**fields, "stream": True}), previous


def _word(fields: Mapping[str, msgspec.Raw], name: str) -> str:
    """ "" where it is no text."""
    value = fields.get(name, msgspec.Raw(b'""'))
    return _text.decode(value) if bytes(value).startswith(b'"') else ""
