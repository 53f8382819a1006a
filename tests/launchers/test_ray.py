"""The driver that `moesaic launch ray` prints, on a real Ray cluster of two nodes on this machine (and a third one without
processors, which has Ray's own head)."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster import READY, Streams, alive, gone, kill, ranks, servers, wait_code, wait_mode
from ports import free_port, free_ports
from served import command_line, descendants, until

pytestmark = [
    pytest.mark.launchers,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="there is no ray: pip install 'moesaic[ray]'"),
]
ROOT = Path(__file__).resolve().parents[2]
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}


class Farm:
    """Ray's own head, and nodes with one processor each."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.address = f"127.0.0.1:{(port := free_port())}"
        self.nodes: list[subprocess.Popen[bytes]] = []
        self._head = ["--head", "--port", str(port), "--include-dashboard=false", "--num-cpus", "0"]
        self._head += ["--temp-dir", str(root)]

    def start(self) -> None:
        self._start(*self._head)
        for _ in range(2):
            self.add()

    def add(self) -> None:
        self._start("--address", self.address, "--num-cpus", "1")

    def _start(self, *words: str) -> None:
        """Until it is there: nodes of one machine that start at the same time choose the same names for their sockets."""
        common = ["--node-ip-address", "127.0.0.1", "--object-store-memory", "80000000", "--block"]
        path = self.log(f"ray-{len(self.nodes)}")
        with path.open("wb") as log:
            node = self.run(["-m", "ray.scripts.scripts", "start", *words, *common], log)
        self.nodes.append(node)
        until(lambda: node.poll() is not None or "Ray runtime started" in path.read_text(), READY, f"{path} is there")
        assert node.poll() is None, path.read_text()

    def run(self, words: list[str], log: object) -> subprocess.Popen[bytes]:
        variables = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        variables |= QUIET | {"RAY_ADDRESS": self.address}
        command = [sys.executable, *words]
        return subprocess.Popen(command, stdout=log, stderr=log, env=variables, cwd=ROOT, start_new_session=True)  # type: ignore[call-overload,no-any-return]

    def log(self, name: str) -> Path:
        return self.root / f"{name}.log"

    def server(self, index: int) -> tuple[subprocess.Popen[bytes] | None, int]:
        """The Ray node that has this node of the server, and the process of `moesaic serve`."""
        for node in self.nodes:
            if node.poll() is None and index in (found := servers(node.pid)):
                return node, found[index]
        return None, 0


@contextmanager
def ray_farm() -> Iterator[Farm]:
    root = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # paths of its sockets are short
    farm = Farm(root)
    try:
        farm.start()
        yield farm
    finally:
        below = [pid for node in farm.nodes for pid in (node.pid, *descendants(node.pid))]
        for pid in below:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        for node in farm.nodes:
            node.wait(20)
        gone(below)
        for log in sorted(root.glob("*.log")):
            sys.stderr.write(f"---- {log.name}\n{log.read_text()[-6000:]}")
        shutil.rmtree(root, ignore_errors=True)


def printed(port: int, ports: int) -> str:
    words = ["--print", "--nodes", "2", "--ranks-per-node", "1", "--port", str(port), "--rpc-port", str(ports)]
    words += ["--startup-timeout", "120", "--", "--dtype", "float32", "--num-gpu-blocks-override", "512"]
    command = [sys.executable, "-m", "moesaic", "launch", "ray", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout


def test_two_nodes_serve_survive_and_drain() -> None:
    url = f"http://127.0.0.1:{(port := free_port())}"
    with ray_farm() as farm:
        script = printed(port, free_ports(8))
        with farm.log("driver").open("wb") as log:
            driver = farm.run(["-c", "import os, sys; os.execv('/bin/bash', ['bash', '-c', sys.argv[1]])", script], log)
        farm.nodes.append(driver)  # ended with the others
        wait_mode(url, "full")
        expected = Streams(url).finish()
        assert not any(isinstance(answer, Exception) for answer in expected)

        running = Streams(url)  # the ranks of one node
        kill(ranks(farm.server(1)[1])[1])
        assert running.finish() == expected
        wait_mode(url, "full")

        node, _ = farm.server(1)  # a whole node, with all that Ray has there
        assert node is not None
        running = Streams(url)
        kill(node.pid, *descendants(node.pid))
        assert running.finish() == expected
        wait_mode(url, "degraded")
        farm.add()
        wait_mode(url, "full")
        assert Streams(url).finish() == expected

        server = farm.server(0)[1]  # the head's own server: its node starts it again, and meets the other one
        kill(server)
        until(lambda: farm.server(0)[1] not in (0, server), READY, "it was started again")
        wait_mode(url, "full")
        assert Streams(url).finish() == expected

        running = Streams(url)
        driver.send_signal(signal.SIGTERM)
        assert running.finish() == expected
        assert wait_code(driver, READY) == 0
        assert not [pid for node in farm.nodes for pid in descendants(node.pid) if "moesaic" in command_line(pid)]
        assert "Traceback" not in farm.log("driver").read_text()
