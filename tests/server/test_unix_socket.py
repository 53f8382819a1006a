"""--uds: the server on a Unix domain socket."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from server_parts import MODEL, server

from moesaic.http_client import Client
from server.process import HttpServer, http_config, listen_at


def test_what_may_stand_at_the_path(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    first = listen_at(path)
    with pytest.raises(ValueError, match="a server listens there already"):
        listen_at(path)
    first.close()  # as one that was killed leaves it
    listen_at(path).close()
    path.unlink()
    path.write_text("mine")
    with pytest.raises(ValueError, match="exists and is no socket"):
        listen_at(path)
    assert path.read_text() == "mine"
    for wrong in (tmp_path / "no folder" / "a.sock", tmp_path / ("x" * 120)):
        with pytest.raises(ValueError, match="--uds"):
            listen_at(wrong)


def test_our_client_speaks_to_it(tmp_path: Path) -> None:
    async def run() -> None:
        path = tmp_path / "a.sock"
        async with server() as s:
            http = HttpServer(http_config(s.app, s.service.config))
            listener = listen_at(path)
            serving = asyncio.create_task(http.serve(sockets=[listener]))
            client = Client(f"unix:{path}")
            asked = {"model": MODEL, "prompt": "Once", "max_tokens": 4}
            assert (await client.post("/v1/completions", asked))["usage"]["completion_tokens"] == 4
            assert [event async for event in client.events("/v1/completions", {**asked, "stream": True})]
            http.should_exit = True
            await serving
        with pytest.raises((ConnectionError, FileNotFoundError)):
            await Client(f"unix:{path}").get("/v1/models")

    asyncio.run(run())
