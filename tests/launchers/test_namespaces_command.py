"""`moesaic launch netns`: one command brings a cluster of two hosts up on this machine, and takes it down again."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster import READY, Streams, command_lines, gone, kill, ranks, servers, wait_code, wait_mode
from host_servers import need_hosts
from served import descendants, until

pytestmark = [pytest.mark.launchers, pytest.mark.slow]
URL = "http://10.78.0.1:8000"


@contextmanager
def launched(tmp_path: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    need_hosts()
    log = (tmp_path / "launch.log").open("w")
    command = [sys.executable, "-m", "moesaic", "launch", "netns", "--startup-timeout", "120", *words]
    process = subprocess.Popen(command, stdout=log, stderr=log)
    below: list[int] = []
    try:
        yield process
        below = descendants(process.pid)
    finally:
        if process.poll() is None:
            below = descendants(process.pid)
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        gone(below)
        log.close()
        sys.stderr.write((tmp_path / "launch.log").read_text())
    assert subprocess.run(["ip", "link", "show", "type", "bridge"], capture_output=True).stdout.count(b"moe") == 0


def test_two_hosts_serve_survive_and_drain(tmp_path: Path) -> None:
    with launched(tmp_path, "--", "--dtype", "float32") as process:
        wait_mode(URL, "full")
        expected = Streams(URL).finish()
        assert not any(isinstance(answer, Exception) for answer in expected)

        running = Streams(URL)
        kill(ranks(servers(process.pid)[1])[1])
        assert running.finish() == expected
        wait_mode(URL, "full")

        node = servers(process.pid)[1]
        running = Streams(URL)
        kill(node, *command_lines(node))
        assert running.finish() == expected
        until(lambda: servers(process.pid).get(1, node) != node, READY, "it was started again")
        wait_mode(URL, "full")
        assert Streams(URL).finish() == expected

        running = Streams(URL)
        process.send_signal(signal.SIGTERM)
        assert running.finish() == expected
        assert wait_code(process, 60) == 0
