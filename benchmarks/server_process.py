"""A server under test, in processes of its own: `moesaic serve` on a free port of this machine, watched from outside."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

START_SECONDS = 180.0
STANDBY_SECONDS = 60.0
ADMIN_KEY = "bench-faults"
PHASES = ("detect", "agree", "repair", "first_token", "total")


class Server:
    """`moesaic serve` with these words behind it, on a free port, in a directory of its own."""

    def __init__(self, words: list[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{port}"
        self.root = Path(tempfile.mkdtemp(prefix="mf-"))
        self.log = (self.root / "log").open("w")
        command = [sys.executable, "-m", "moesaic", "serve", "--port", str(port), "--no-log-requests"]
        command += words
        environment = {**os.environ, "MOESAIC_RUNTIME_DIR": str(self.root), "MOESAIC_ADMIN_KEY": ADMIN_KEY}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log, env=environment)
        self.seen: set[int] = set()  # every process of it that was ever seen

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not list(self.root.glob("*/ready")):
            if self.process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"the server did not start:\n{(self.root / 'log').read_text()[-4000:]}")
            time.sleep(0.05)

    def wait_standby(self, count: int) -> None:
        """For processes that wait to become ranks, as so many do where no rank was lost a moment ago and memory
        allows."""
        deadline = time.monotonic() + STANDBY_SECONDS
        while (self.root / "log").read_text().count("event=standby_ready") < count and time.monotonic() < deadline:
            time.sleep(0.1)

    def ranks(self) -> dict[int, int]:
        """Process ids by rank."""
        found = {}
        for pid in descendants(self.process.pid):
            self.seen.add(pid)
            words = command_line(pid)
            if "engine.process.rank_process" in words:
                found[int(words[words.index("--rank") + 1])] = pid
        return found

    def experts_moving(self) -> int:
        """How many wait to be moved; 0 also when nobody can say just now."""
        url = f"{self.url}/eplb/status"
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url, timeout=10) as answer:
            return int(json.loads(answer.read()).get("moving", 0))
        return 0

    def rebalance(self) -> None:
        """Ask for the best placement of the loads so far; refused when nothing has been counted yet."""
        headers = {"Authorization": f"Bearer {ADMIN_KEY}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/eplb/rebalance", b"{}", headers)
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(request, timeout=10):
            pass

    def losses_known(self) -> int:
        """How often the log says that a rank is lost."""
        return (self.root / "log").read_text().count("event=rank_lost")

    def metrics(self) -> str:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    def serving(self) -> list[int]:
        lines = [line for line in self.metrics().splitlines() if line.startswith("moesaic:rank_up{")]
        return [int(line.split('engine="')[1].split('"')[0]) for line in lines if line.endswith(" 1.0")]

    def recoveries(self) -> dict[str, float]:
        """Mean seconds of each phase."""
        totals: dict[str, float] = {}
        for line in self.metrics().splitlines():
            if line.startswith(("moesaic:recovery_seconds_sum", "moesaic:recovery_seconds_count")):
                name = line.split('phase="')[1].split('"')[0] + ("_sum" if "_sum{" in line else "_count")
                totals[name] = float(line.split()[-1])
        return {name: totals[f"{name}_sum"] / max(1.0, totals[f"{name}_count"]) for name in PHASES}

    def end(self) -> int:
        """The number of processes that are left."""
        self.ranks()
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        deadline = time.monotonic() + 10
        while (left := [pid for pid in self.seen if command_line(pid)]) and time.monotonic() < deadline:
            time.sleep(0.1)
        self.process.kill()
        self.log.close()
        shutil.rmtree(self.root)
        return len(left)


def descendants(pid: int) -> Iterator[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:2]
                if state != "Z":
                    children.setdefault(int(parent), []).append(int(entry.name))
    todo = [pid]
    while todo:
        below = children.get(todo.pop(), [])
        yield from below
        todo += below


def command_line(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return []
