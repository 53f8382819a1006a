"""A small asyncio HTTP/1.1 client for `chat` and `bench serve`: JSON requests, answers whole or as server-sent events.

Standard library only: a load generator shares the cores with the server that it measures, so it must cost little.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import urlsplit

READ_LIMIT = 1 << 20
CUT_OFF = "the server closed the connection before the end of its answer"

Result = TypeVar("Result")


class HttpError(RuntimeError):
    """The server answered with an error status; the message, and the code where there is one, are its own."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status = status
        self.code = code


def unreached(url: str, error: OSError | HttpError) -> ValueError:
    """What to say of a server that cannot be asked, or has refused."""
    if isinstance(error, ConnectionRefusedError | FileNotFoundError):
        return ValueError(f"{url}: no server listens there; `moesaic serve` starts one")
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return ValueError(f"{url}: {CUT_OFF}")
    return ValueError(f"{url}: {error}")


class Client:
    """One connection per request. `timeout`: seconds without any byte from the server before giving up."""

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 300.0) -> None:
        """url: http://host:port, https://host:port, or unix:PATH (of `moesaic serve --uds PATH`)."""
        self.api_key, self.timeout = api_key, timeout
        self.uds = url.removeprefix("unix:").removeprefix("//") if url.startswith("unix:") else ""
        if self.uds:
            url = "http://localhost"
        try:
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            raise ValueError(f"url {url!r} has no port from 1 to 65535") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url {url!r} must look like http://host:port, https://host:port or unix:PATH")
        self.host, self.port = parts.hostname, port
        self.prefix = parts.path.rstrip("/").removesuffix("/v1")  # as OpenAI's clients are given their base URL
        # The system's authorities, or those of SSL_CERT_FILE, as OpenSSL reads it.
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None

    async def get(self, path: str) -> Any:
        async with _Exchange(self, "GET", path, None) as exchange:
            return json.loads(await exchange.body())

    async def post(self, path: str, payload: dict[str, Any]) -> Any:
        async with _Exchange(self, "POST", path, payload) as exchange:
            return json.loads(await exchange.body())

    async def events(self, path: str, payload: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Each `data:` event as JSON, until [DONE]. An error event raises HttpError."""
        async with _Exchange(self, "POST", path, payload) as exchange:
            async for line in exchange.lines():
                if not line.startswith(b"data: "):
                    continue
                if line == b"data: [DONE]":
                    return
                event: dict[str, Any] = json.loads(line[6:])
                if "error" in event:
                    raise _error(exchange.status, event["error"])
                yield event


class _Exchange:
    """One request and its answer on a connection of its own."""

    def __init__(self, client: Client, method: str, path: str, payload: dict[str, Any] | None) -> None:
        body = b"" if payload is None else json.dumps(payload).encode()
        key = f"Authorization: Bearer {client.api_key}\r\n" if client.api_key else ""
        self.request = (
            f"{method} {client.prefix}{path} HTTP/1.1\r\nHost: {client.host}:{client.port}\r\n"
            f"Connection: close\r\n{key}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode() + body
        self.client = client
        self.status = 0
        self.chunked = False

    async def __aenter__(self) -> _Exchange:
        client = self.client
        if client.uds:
            connect = asyncio.open_unix_connection(client.uds, limit=READ_LIMIT)
        else:
            connect = asyncio.open_connection(client.host, client.port, limit=READ_LIMIT, ssl=client.tls)
        self.reader, self.writer = await self._within(connect)
        try:
            self.writer.write(self.request)
            await self._begin()
        except BaseException:
            self.writer.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.writer.close()

    async def _begin(self) -> None:
        try:
            self.status = int((await self._line()).split()[1])
        except (IndexError, ValueError):
            raise ConnectionError("what answers does not speak HTTP") from None
        while header := await self._line():
            name, _, value = header.partition(b":")
            if name.lower() == b"transfer-encoding" and b"chunked" in value.lower():
                self.chunked = True
        if self.status >= 400:
            raise _error(self.status, await self.body())

    async def _within(self, coming: Awaitable[Result]) -> Result:
        """TimeoutError when the server says nothing for too long."""
        try:
            async with asyncio.timeout(self.client.timeout):
                return await coming
        except TimeoutError:
            raise TimeoutError(f"no answer for {self.client.timeout:g} s") from None
        except BrokenPipeError:  # a name that is left to our own output
            raise ConnectionError(CUT_OFF) from None

    async def _line(self) -> bytes:
        line = await self._within(self.reader.readline())
        if not line.endswith(b"\n"):
            raise ConnectionError(CUT_OFF)
        return line.rstrip(b"\r\n")

    async def _pieces(self) -> AsyncIterator[bytes]:
        while True:
            if self.chunked:
                size = int(await self._line(), 16)
                if not size:
                    return
                try:
                    piece = (await self._within(self.reader.readexactly(size + 2)))[:-2]
                except asyncio.IncompleteReadError:
                    raise ConnectionError(CUT_OFF) from None
            else:
                piece = await self._within(self.reader.read(READ_LIMIT))
                if not piece:
                    return
            yield piece

    async def body(self) -> bytes:
        return b"".join([piece async for piece in self._pieces()])

    async def lines(self) -> AsyncIterator[bytes]:
        rest = b""
        async for piece in self._pieces():
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                yield line.rstrip(b"\r")


def _error(status: int, said: bytes | dict[str, Any]) -> HttpError:
    """said: the body of the answer, or its `error`."""
    try:
        error = json.loads(said)["error"] if isinstance(said, bytes) else said
        return HttpError(status, str(error["message"]), str(error.get("code") or ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        return HttpError(status, said[:200].decode(errors="replace") if isinstance(said, bytes) else "an error")
