"""The manifests' containers as the kubelet would run them, but on this machine: the doctor's exit code, what the probes
get while the server loads, serves, is short of a node and drains, and how long its end takes."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster import READY, Streams, command_lines, get, gone, kill, wait_code, wait_mode
from ports import free_port, free_ports
from served import descendants, until

from models.tiny import CHECKPOINT

pytestmark = [pytest.mark.launchers, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


class Node:
    """A pod of one node: its containers' commands with the variables that its fields stand for, and names of pods in the
    place of which this machine's address is put."""

    def __init__(self, document: dict[str, Any], index: int, tmp_path: Path) -> None:
        self.pod = document["spec"]["template"]["spec"]
        [self.container] = self.pod["containers"]
        self.grace = self.pod["terminationGracePeriodSeconds"]
        self._index = index
        self._log = tmp_path / f"pod-{index}.log"
        self.process: subprocess.Popen[bytes] | None = None

    def _command(self, container: dict[str, Any]) -> list[str]:
        assert container["command"][0] == "moesaic"
        named = {"NODE_RANK": str(self._index)}
        words = [re.sub(r"\$\((\w+)\)", lambda found: named[found[1]], word) for word in container["command"][1:]]
        return [
            sys.executable,
            "-m",
            "moesaic",
            *("127.0.0.1" if re.fullmatch(r"moesaic-head-0\.moesaic|0\.0\.0\.0", word) else word for word in words),
        ]

    def init(self) -> subprocess.CompletedProcess[str]:
        [doctor] = self.pod["initContainers"]
        return subprocess.run(self._command(doctor), capture_output=True, text=True, cwd=ROOT, timeout=60)

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command(self.container), stdout=log, stderr=log, cwd=ROOT, start_new_session=True
            )

    def probe(self, name: str) -> bool:
        """As the kubelet asks: whether the status is one of 200 to 399."""
        request = self.container[name]["httpGet"]
        [port] = [one["containerPort"] for one in self.container["ports"] if one["name"] == request["port"]]
        return 200 <= get(f"http://127.0.0.1:{port}{request['path']}", self.container[name]["timeoutSeconds"])[0] < 400

    def probes(self) -> list[bool]:
        return [self.probe(name) for name in PROBES]

    def pre_stop(self) -> None:
        """Blocks, as the kubelet does before it sends SIGTERM."""
        command = self.container["lifecycle"]["preStop"]["exec"]["command"]
        assert subprocess.run(command, timeout=self.grace).returncode == 0


@contextmanager
def two_pods(tmp_path: Path, kind: str) -> Iterator[tuple[str, list[Node]]]:
    port = free_port()
    words = ["--print", "--kind", kind, "--nodes", "2", "--port", str(port), "--rpc-port", str(free_ports(8))]
    words += ["--startup-timeout", "120", "--shutdown-timeout", "20", str(CHECKPOINT), "--", "--dtype", "float32"]
    words += ["--num-gpu-blocks-override", "512"]
    command = [sys.executable, "-m", "moesaic", "launch", "k8s", *words]
    text = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    documents = [one for one in yaml.safe_load_all(text) if one["kind"] == "StatefulSet"]
    nodes = [Node(document, index, tmp_path) for index, document in enumerate(documents)]
    try:
        yield f"http://127.0.0.1:{port}", nodes
    finally:
        below: list[int] = []
        for node in nodes:
            if node.process is not None:
                below += [node.process.pid, *descendants(node.process.pid)]
                node.process.kill()
                node.process.wait(10)
        gone(below)
        for log in sorted(tmp_path.glob("pod-*.log")):
            sys.stderr.write(f"---- {log.name}\n{log.read_text()}")


def test_probes_of_a_server_that_loads_serves_and_drains(tmp_path: Path) -> None:
    with two_pods(tmp_path, "statefulset") as (url, [head, worker]):
        for node in (head, worker):
            done = node.init()
            assert done.returncode == 0, done.stdout + done.stderr
        assert "ports" not in worker.container and not set(PROBES) & worker.container.keys()

        head.start()  # alone: it is loading for as long as the other one does not come
        until(lambda: head.probe("livenessProbe"), READY, "the process answers")
        assert head.probes() == [False, False, True]
        assert get(f"{url}/health")[0] == get(f"{url}/ready")[0] == 503
        worker.start()
        until(lambda: head.probe("startupProbe"), READY, "the server has started")
        assert head.probes() == [True, True, True]
        expected = Streams(url).finish()
        assert not any(isinstance(answer, Exception) for answer in expected)

        assert worker.process is not None and head.process is not None
        kill(worker.process.pid, *command_lines(worker.process.pid))  # a dead pod: the other one is not restarted
        worker.process.wait(10)
        wait_mode(url, "degraded")
        assert head.probes() == [True, True, True]
        worker.start()  # by restartPolicy Always, which a pod has that says nothing
        wait_mode(url, "full")

        running = Streams(url)
        head.pre_stop()
        assert head.probes() == [True, True, True]  # services forget the pod meanwhile, and clients still come
        answers = running.finish()
        running = Streams(url)
        head.process.send_signal(signal.SIGTERM)
        until(lambda: not head.probe("readinessProbe"), 10, "the readiness probe fails")
        if head.process.poll() is None and (status := get(f"{url}/live")[0]):
            assert status == 200
        assert answers == running.finish() == expected
        assert wait_code(head.process, head.grace) == 0
        assert wait_code(worker.process, worker.grace) == 0


def test_a_worker_that_is_told_to_leave_does_not_end_the_server(tmp_path: Path) -> None:
    """As when its node is drained: the pod's own SIGTERM, within its grace period."""
    with two_pods(tmp_path, "statefulset") as (url, [head, worker]):
        head.start()
        worker.start()
        wait_mode(url, "full")
        assert worker.process is not None
        running = Streams(url)
        worker.process.send_signal(signal.SIGTERM)
        assert wait_code(worker.process, worker.grace) == 0
        assert not any(isinstance(answer, Exception) for answer in running.finish())
        assert head.probes() == [True, True, True]
