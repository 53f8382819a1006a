"""HTTP itself, over a connection to the real server on a fake of the rank side."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import struct

import pytest
from server_parts import listening, server, until

BODY = json.dumps({"prompt": "Once", "max_tokens": 2}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n" % len(
    BODY
)
OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n\r\n"


def test_an_offer_of_another_protocol_is_not_taken_and_loses_no_body() -> None:
    """Java's HTTP client makes it with its first request."""

    async def run() -> None:
        async with server() as s, listening(s) as url:
            port = int(url.split(":")[2].split("/")[0])
            for cut in (0, 20, len(HEAD) + 30, len(HEAD + OFFER) + 5):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                message = HEAD + OFFER + BODY
                writer.write(message[:cut])
                await writer.drain()
                await asyncio.sleep(0)
                writer.write(message[cut:] + HEAD + b"\r\n" + BODY)  # and one more without
                for _ in range(2):
                    head = await reader.readuntil(b"\r\n\r\n")
                    assert head.startswith(b"HTTP/1.1 200"), head
                    size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                    assert json.loads(await reader.readexactly(size))["usage"]["completion_tokens"] == 2
                writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 400")
            writer.close()

    asyncio.run(run())


def test_a_client_that_sends_several_requests_at_once_and_leaves(caplog: pytest.LogCaptureFixture) -> None:
    """The one that runs ends at once, the others do not begin, and nothing of it is an error of the server."""

    async def run() -> None:
        async with server() as s, listening(s) as url:
            s.ranks.paused = True
            _, writer = await asyncio.open_connection("127.0.0.1", int(url.split(":")[2].split("/")[0]))
            writer.write((HEAD + b"\r\n" + BODY) * 4)
            await until(lambda: s.ranks.running, "the first one runs")
            connection = writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            await until(lambda: not s.ranks.running, "the ranks are told")
            await until(lambda: not s.service.in_flight, "all are gone")

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
