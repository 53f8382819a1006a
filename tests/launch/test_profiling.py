"""Timelines of real servers: taken under load, through the loss of a rank, and over two hosts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import urllib.error
from pathlib import Path
from typing import Any

import pytest
from host_servers import host_servers
from served import served, until
from streams import mode, wave
from trace_checks import check_trace, hidden, lanes_of, read_trace

OVERLAPPED = ("--enable-dbo", "on", "--dbo-decode-token-threshold", "1", "--dbo-prefill-token-threshold", "1")


@pytest.mark.slow
def test_a_profile_outlives_a_rank_and_disturbs_nobody(tmp_path: Path) -> None:
    options = ["-dp", "2", "--dtype", "float32", "--admin-api-key", "boss", "--profile-dir", str(tmp_path), *OVERLAPPED]
    with served(tmp_path, *options) as server:
        expected = asyncio.run(wave(server))

        def post(path: str, **body: Any) -> Any:
            return server.post(path, body, "boss")

        def lose() -> None:
            post("/start_profile", name="one.json")
            time.sleep(0.2)
            os.kill(server.children()["rank 1"], signal.SIGKILL)
            until(lambda: mode(server) != "full", 20, "the loss is noticed")

        assert asyncio.run(wave(server, lose)) == expected
        until(lambda: mode(server) == "full", 60, "all ranks serve")
        summary = post("/stop_profile")
        assert (summary["ranks"], summary["lost"], summary["file"]) == ([0], [1], str(tmp_path / "one.json"))
        slices = check_trace(read_trace(tmp_path / "one.json"))
        assert {item["args"]["epoch"] for item in slices if item["name"] == "agreement"} == {0, 1, 2}
        with pytest.raises(urllib.error.HTTPError, match="409"):
            post("/stop_profile")

        started = post("/start_profile")
        assert asyncio.run(wave(server)) == expected
        summary = post("/stop_profile")
        assert (summary["ranks"], summary["lost"]) == ([0, 1], []) and summary["events"] > 1000
        trace = read_trace(Path(started["file"]))
        check_trace(trace)
        for rank in range(2):
            assert len(lanes_of(trace, rank)) == 2 and hidden(trace, rank) > 0
        assert asyncio.run(wave(server)) == expected
    assert "Traceback" not in (tmp_path / "server.log").read_text()


@pytest.mark.slow
def test_two_hosts_are_two_processes_of_one_trace(tmp_path: Path) -> None:
    words = ("-dp", "2", "--admin-api-key", "boss", "--profile-dir", str(tmp_path), *OVERLAPPED)
    with host_servers(tmp_path, *words) as servers:
        servers.start(0, "-dpl", "1")
        servers.start(1, "--headless", "-dpr", "1")
        servers.ready()

        def post(path: str) -> Any:
            command = ["curl", "-s", "-m", "60", "-X", "POST", "-H", "x-api-key: boss", f"http://127.0.0.1:8000{path}"]
            return json.loads(servers.hosts.run(0, command, 90.0))

        started = post("/start_profile")
        assert started["ranks"] == [0, 1]
        servers.streams(4, 20)
        assert post("/stop_profile")["ranks"] == [0, 1]
        trace = read_trace(Path(started["file"]))
        check_trace(trace)
        assert {event["pid"] for event in trace["traceEvents"]} == {0, 1}
        assert set(trace["otherData"]["clocks"].values()) == {"the reference"}
        assert servers.stop() == [0, 0]
