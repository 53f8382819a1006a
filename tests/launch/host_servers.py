"""A server on several hosts that are network namespaces (benchmarks/hosts.py), for tests."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hosts import Hosts, namespaces, why_not
from served import STARTUP, descendants, until

PORT = 29000
KEY = "boss"
ROOT = Path(__file__).resolve().parents[2]


def need_hosts() -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(f"no hosts here: {reason}")


def prompt_of(number: int) -> str:
    return f"Once upon a time there were {number} foxes"


@dataclass
class HostServers:
    """process 0 is the head. A host's own HTTP address is asked on the host itself."""

    hosts: Hosts
    tmp_path: Path
    arguments: Sequence[str]
    runtime: Path
    started: list[subprocess.Popen[Any]]  # also those that have ended
    processes: dict[int, subprocess.Popen[Any]] = field(default_factory=dict)

    def start(self, host: int, *options: str) -> subprocess.Popen[Any]:
        head = ["--data-parallel-address", self.hosts.addresses[0], "--data-parallel-rpc-port", str(PORT)]
        command = [sys.executable, "-m", "moesaic", "serve", *self.arguments, *head, *options]
        environment = {**os.environ, "MOESAIC_RUNTIME_DIR": str(self.runtime)}
        with self.log_path(host).open("a") as log:
            self.processes[host] = self.hosts.start(host, command, stdout=log, stderr=log, env=environment, cwd=ROOT)
        self.started.append(self.processes[host])
        return self.processes[host]

    def log_path(self, host: int) -> Path:
        return self.tmp_path / f"host-{host}.log"

    def log(self, host: int) -> str:
        return self.log_path(host).read_text()

    def logs(self) -> str:
        return "\n".join(f"---- host {host}\n{self.log(host)}" for host in self.processes)

    def ready(self) -> None:
        until(
            lambda: self.processes[0].poll() is not None or "moesaic: ready on" in self.log(0),
            STARTUP,
            "the server is ready",
        )
        assert self.processes[0].poll() is None, self.logs()

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        command = ["curl", "-s", "-m", "60", f"http://127.0.0.1:8000{path}", "-H", f"x-api-key: {KEY}"]
        if body is not None:
            command += ["-H", "content-type: application/json", "-d", json.dumps(body)]
        return json.loads(self.hosts.run(0, command, 90.0))

    def resize(self, count: int) -> None:
        """RuntimeError with what the server says when it refuses."""
        answer = self.ask("/admin/ranks", {"count": count})
        if "error" in answer:
            raise RuntimeError(answer["error"]["message"])

    def mode(self) -> str:
        return str(self.ask("/ready").get("mode"))

    def streams(self, count: int, max_tokens: int) -> list[list[int]]:
        """Token ids of so many requests at once, half of them seeded."""
        found: dict[int, list[int]] = {}

        def one(number: int) -> None:
            body = {
                "prompt": prompt_of(number),
                "max_tokens": max_tokens,
                "temperature": 0.0 if number % 2 else 0.8,
                "seed": number,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            found[number] = self.ask("/v1/completions", body)["choices"][0]["token_ids"]

        threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(found) == list(range(count)), self.logs()
        return [found[number] for number in range(count)]

    def ranks(self, host: int) -> dict[int, int]:
        """rank -> process of the ranks on a host."""
        found = {}
        for pid in descendants(self.processes[host].pid):
            with contextlib.suppress(OSError, ValueError):
                words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                if "engine.process.rank_process" in words:
                    found[int(words[words.index("--rank") + 1])] = pid
        return found

    def stop(self) -> list[int]:
        """SIGTERM to the head; the exit codes of all."""
        self.processes[0].send_signal(signal.SIGTERM)
        return [process.wait(40) for process in self.processes.values()]


@contextlib.contextmanager
def host_servers(tmp_path: Path, *arguments: str, num_hosts: int = 2) -> Iterator[HostServers]:
    """Nothing is started yet. Nothing is left afterwards."""
    need_hosts()
    runtime = Path(tempfile.mkdtemp(prefix="moe-"))
    started: list[subprocess.Popen[Any]] = []
    try:
        with Hosts(num_hosts) as hosts:
            servers = HostServers(hosts, tmp_path, (*arguments, "--admin-api-key", KEY), runtime, started)
            yield servers
    finally:
        for process in started:  # killed with their hosts
            process.wait(10)
        shutil.rmtree(runtime, ignore_errors=True)
    assert not [name for name in namespaces() if f"-{os.getpid()}-" in name]
