"""The child processes of a server: one per rank and one front, started, watched and ended as one.

No child outlives its parent: each asks the kernel to be killed when the parent dies (engine/orphan.py), and `end`
kills whatever has not left in time.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import msgspec

MAX_SOCKET_PATH = 80  # a unix socket's path may have 107 bytes; names are appended to this directory
KILLED_SECONDS = 10.0  # until a killed process has ended; longer only in a system call that cannot be broken off


class RuntimeDir:
    """A private directory for sockets, the rendezvous store and configuration files; removed on close."""

    def __init__(self, root: Path) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="moesaic-", dir=root))
        if len(str(self.path)) > MAX_SOCKET_PATH:
            shutil.rmtree(self.path)
            raise ValueError(f"runtime directory {self.path} is too long for unix sockets; set MOESAIC_RUNTIME_DIR")

    def write(self, name: str, value: object) -> Path:
        path = self.path / name
        path.write_bytes(msgspec.json.encode(value))
        return path

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


@dataclass(slots=True)
class Child:
    name: str
    rank: int  # -1 for the front
    process: subprocess.Popen[bytes]
    pidfd: int

    def exit_text(self) -> str:
        code = self.process.returncode
        if code is None:
            return "still running"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class Children:
    """Starts and watches processes; a context manager that ends them all."""

    def __init__(self) -> None:
        self.all: list[Child] = []

    def start(self, name: str, rank: int, module: str, arguments: list[str], environment: dict[str, str]) -> Child:
        command = [sys.executable, "-m", module, *arguments, "--parent", str(os.getpid())]
        # A group of its own: Ctrl-C in the terminal reaches the supervisor only, which ends the others in order.
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, process_group=0)
        child = Child(name, rank, process, os.pidfd_open(process.pid))
        self.all.append(child)
        return child

    def exited(self, timeout: float, wake: Sequence[int] = ()) -> list[Child]:
        """Children found dead within `timeout` seconds; each is reported once. wake: descriptors that end the waiting too,
        when there is something to read."""
        watched = {child.pidfd: child for child in self.all if child.process.returncode is None}
        if not watched and not wake:
            return []
        ready, _, _ = select.select([*watched, *wake], [], [], timeout)
        dead = [watched[descriptor] for descriptor in ready if descriptor in watched]
        for child in dead:
            child.process.wait()
        return dead

    def forget(self, child: Child) -> None:
        """One that has ended, and was reported."""
        self.all.remove(child)
        os.close(child.pidfd)

    def wait_for(self, child: Child, timeout: float) -> None:
        """Until `child` has left, at most `timeout` seconds; others may leave meanwhile."""
        deadline = time.monotonic() + timeout
        while child.process.returncode is None and (left := deadline - time.monotonic()) > 0:
            self.exited(left)

    def end(self, grace: float) -> None:
        """Wait up to `grace` seconds for the rest to leave by themselves, then kill what is left."""
        deadline = time.monotonic() + grace
        while any(child.process.returncode is None for child in self.all):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self.exited(left)
        for child in self.all:
            if child.process.returncode is None:
                child.process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the kernel: nobody can do more
                    child.process.wait(KILLED_SECONDS)
        for child in self.all:
            os.close(child.pidfd)
        self.all.clear()

    def __enter__(self) -> Children:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(grace=0.0)
