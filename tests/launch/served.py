"""A real server, started by the real command line, for tests: `with served(...) as server`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ports import free_port

STARTUP = 90.0  # seconds; generous, because CI may share its cores


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str
    runtime_root: Path

    def get(self, path: str, key: str = "none") -> Any:
        request = urllib.request.Request(self.url + path, headers={"x-api-key": key})
        with urllib.request.urlopen(request, timeout=30) as answer:
            body = answer.read()
        return json.loads(body) if answer.headers.get_content_type() == "application/json" else body.decode()

    def post(self, path: str, payload: dict[str, Any], key: str = "none") -> Any:
        headers = {"Content-Type": "application/json", "x-api-key": key}
        request = urllib.request.Request(self.url + path, json.dumps(payload).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    def children(self) -> dict[str, int]:
        """Process ids by module: {"engine.process.rank_process 0": pid, ..., "server.process": pid}."""
        found = {}
        for pid in descendants(self.process.pid):
            words = command_line(pid)
            if "engine.process.rank_process" in words:
                found[f"rank {words[words.index('--rank') + 1]}"] = pid
            elif "server.process" in words:
                found["front"] = pid
        return found

    def standby(self) -> list[int]:
        """The processes that wait to become ranks, or get ready for that."""
        return [pid for pid in descendants(self.process.pid) if "engine.process.standby_process" in command_line(pid)]

    def wait_ready(self) -> None:
        """Or until it has ended."""
        ready = self.runtime_root
        until(lambda: self.process.poll() is not None or list(ready.glob("*/ready")), STARTUP, "the server is ready")

    def wait(self, timeout: float) -> int:
        return self.process.wait(timeout)


def command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def descendants(pid: int) -> list[int]:
    """Live processes below `pid` (zombies do not count)."""
    parent_of = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:2]
                if state != "Z":
                    parent_of[int(entry.name)] = int(parent)
    found: list[int] = []
    todo = [pid]
    while todo:
        below = [child for child, parent in parent_of.items() if parent == todo[0]]
        found += below
        todo = todo[1:] + below
    return found


def until(condition: Any, timeout: float, what: str) -> Any:
    """Poll until `condition()` is true, at most `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {timeout} s: {what}")


@contextlib.contextmanager
def served(
    tmp_path: Path, *arguments: str, said: IO[Any] | int | None = None, runtime: Path | None = None
) -> Iterator[Server]:
    """Start `moesaic serve`, wait until it is ready, and make sure that nothing of it is left afterwards. said: where stdout and
    stderr go; None: into server.log. runtime: its MOESAIC_RUNTIME_DIR; None: a new one."""
    with starting(tmp_path, *arguments, said=said, runtime=runtime) as server:
        server.wait_ready()
        assert server.process.poll() is None, (tmp_path / "server.log").read_text()
        yield server


@contextlib.contextmanager
def starting(
    tmp_path: Path, *arguments: str, said: IO[Any] | int | None = None, runtime: Path | None = None
) -> Iterator[Server]:
    """The same without waiting."""
    port = free_port()
    command = [sys.executable, "-m", "moesaic", "serve", "--port", str(port), *arguments]
    own = None if runtime is not None else tempfile.mkdtemp(prefix="moe-")
    runtime = runtime or Path(own or "")
    environment = {**os.environ, "MOESAIC_RUNTIME_DIR": str(runtime)}
    log = (tmp_path / "server.log").open("w")
    process = subprocess.Popen(
        command, stdout=log if said is None else said, stderr=log if said is None else said, text=True, env=environment
    )
    server = Server(process, f"http://127.0.0.1:{port}", runtime)
    try:
        yield server
    finally:
        below = descendants(process.pid)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
        process.kill()
        process.wait()
        log.close()
        if own is not None:
            shutil.rmtree(own)
        for pid in below:
            until(lambda pid=pid: not command_line(pid), 10, f"process {pid} has left")
