"""Processes that are forked from one that has imported what ranks need (engine/process/fork_process.py): a server does
that once, and has its memory once."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable

from engine.process.fork_process import GO, READY, Told
from launch.early import Source

NAME = "forks"
ANSWER_SECONDS = 5.0
PID_BYTES = 16
STEP_SECONDS = 0.05


class Forked:
    """What subprocess.Popen is to a process that it has started."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            found, status = os.waitpid(self.pid, 0 if deadline is None else os.WNOHANG)
            if found:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            else:
                time.sleep(STEP_SECONDS)
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:  # nobody else waits for it, so its id is still its own
            os.kill(self.pid, signal.SIGKILL)


class Forks:
    def __init__(self, start: Callable[[], tuple[Source, Callable[[], bool]]], told: Told, seconds: float) -> None:
        """start: starts the process that others are forked from, and what says whether it is alive. seconds: how long
        the first fork may wait for it to be ready."""
        self._start, self._told = start, json.dumps(told).encode()
        self._socket, self._alive = self._connect()
        self._patience, self._ready = seconds, False

    def fork(self, module: str, words: list[str], stdin: int) -> Forked | None:
        """A process that runs `module` with these words. stdin: a descriptor, or subprocess.DEVNULL. None: it is to be
        started as others are. The first call waits until the imports are done."""
        if not self._is_ready():
            return None
        request = json.dumps([module, *words]).encode()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(ANSWER_SECONDS)
        with ours, contextlib.suppress(OSError):
            with theirs, open(os.devnull, "rb") as nothing:
                files = [theirs.fileno(), nothing.fileno() if stdin == subprocess.DEVNULL else stdin]
                socket.send_fds(self._socket, [request], files)
            pid = int(ours.recv(PID_BYTES) or 0)
            if pid:
                ours.send(GO)
                return Forked(pid)
        return None

    def close(self) -> None:
        self._socket.close()

    def _is_ready(self) -> bool:
        patience, self._patience = self._patience, 0.0
        if self._ready and not self._alive():  # something has ended it: another one imports for the next time
            self._ready = False
            self._socket.close()
            self._socket, self._alive = self._connect()
        if not self._ready:
            with contextlib.suppress(OSError):
                readable, _, _ = select.select([self._socket], [], [], patience)
                self._ready = bool(readable) and self._socket.recv(len(READY)) == READY
        return self._ready

    def _connect(self) -> tuple[socket.socket, Callable[[], bool]]:
        source, alive = self._start()
        source.tell(self._told)
        return source.socket, alive
