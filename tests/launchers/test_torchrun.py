"""`moesaic launch torchrun`: the printed line is run twice on this machine, for two nodes that meet on loopback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster import READY, Streams, command_lines, gone, kill, ranks, servers, wait_code, wait_mode
from ports import free_port, free_ports
from served import descendants, until

pytestmark = [pytest.mark.launchers, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
OWN_END = 2 * READY  # torchrun waits for its store when it has lost it


class Nodes:
    def __init__(self, tmp_path: Path) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        words = ["--print", "--nodes", "2", "--ranks-per-node", "1", "--hosts", "127.0.0.1,127.0.0.1"]
        words += ["--port", str(port), "--rpc-port", str(free_ports(7)), "--startup-timeout", "120"]
        words += ["--", "--dtype", "float32", "--num-gpu-blocks-override", "512"]
        command = [sys.executable, "-m", "moesaic", "launch", "torchrun", *words]
        self._script = tmp_path / "line.sh"
        self._script.write_text(subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout)
        self._tmp_path = tmp_path
        self.started: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, node: int) -> None:
        with self.log(node).open("ab") as log:
            self.started[node] = subprocess.Popen(
                ["bash", str(self._script)],
                stdout=log,
                stderr=log,
                env={**os.environ, "NODE_RANK": str(node)},
                cwd=ROOT,
                start_new_session=True,
            )

    def log(self, node: int) -> Path:
        return self._tmp_path / f"node-{node}.log"

    def server(self, node: int) -> int:
        """The process of `moesaic serve`; 0: none."""
        return servers(self.started[node].pid).get(node, 0)


@contextmanager
def two_nodes(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path)
    below: list[int] = []
    try:
        for node in (0, 1):
            nodes.start(node)
        wait_mode(nodes.url, "full")
        yield nodes
    finally:
        for process in nodes.started.values():
            below += descendants(process.pid)
            if process.poll() is None:
                process.kill()
            process.wait(10)
        gone(below)  # each ends with the process above it
        for node in nodes.started:
            sys.stderr.write(nodes.log(node).read_text())


def test_two_nodes_serve_survive_and_drain(tmp_path: Path) -> None:
    with two_nodes(tmp_path) as nodes:
        assert "node 1 of 2 (RANK, WORLD_SIZE, MASTER_ADDR), ranks 1 to 1" in nodes.log(1).read_text()
        expected = Streams(nodes.url).finish()
        assert not any(isinstance(answer, Exception) for answer in expected)

        running = Streams(nodes.url)  # the ranks of one node
        kill(ranks(nodes.server(1))[1])
        assert running.finish() == expected
        wait_mode(nodes.url, "full")

        server = nodes.server(1)
        running = Streams(nodes.url)  # its whole server: `moesaic node` starts it again
        kill(server, *command_lines(server))
        assert running.finish() == expected
        until(lambda: nodes.server(1) not in (0, server), READY, "it was started again")
        wait_mode(nodes.url, "full")

        below = descendants(nodes.started[1].pid)
        running = Streams(nodes.url)  # the whole node, torchrun too
        kill(nodes.started[1].pid, *below)
        assert running.finish() == expected
        nodes.started[1].wait(10)
        wait_mode(nodes.url, "degraded")
        nodes.start(1)
        wait_mode(nodes.url, "full")
        assert Streams(nodes.url).finish() == expected

        running = Streams(nodes.url)
        nodes.started[0].send_signal(signal.SIGTERM)
        assert running.finish() == expected
        wait_code(nodes.started[0], OWN_END)
        wait_code(nodes.started[1], OWN_END)
