"""The process that ranks are forked from, or that becomes the one of a caller (engine/process/fork_process.py), started
before this process has imported what it needs itself, as a second core is free meanwhile. It is told later what for,
and ends with this process if it never is."""

from __future__ import annotations

import contextlib
import socket
import subprocess
from typing import NamedTuple

from engine.process.child import child_command
from launch.lasting import popen

MODULE = "engine.process.fork_process"
ROOM = " " * 2048  # the last word of its command line, where the kernel finds those of the processes it becomes


class Source(NamedTuple):
    """socket: its standard input, our end."""

    process: subprocess.Popen[bytes]
    socket: socket.socket

    def tell(self, told: bytes) -> None:
        """told: a `Told` of engine/process/fork_process.py, as JSON."""
        with contextlib.suppress(OSError):  # it has ended, which whoever watches it will see
            self.socket.send(told)

    def drop(self) -> None:
        """Nothing is wanted of it."""
        self.socket.close()
        self.process.kill()
        self.process.wait()


_started: list[Source] = []  # at most one, by `start_early`


def start_source() -> Source:
    """In this process's environment."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:  # a group of its own, as launch/processes.py starts the others
        command = child_command(MODULE, ["--room", ROOM])
        return Source(popen(command, stdin=theirs.fileno(), process_group=0), ours)


def start_early() -> None:
    _started.append(start_source())


def take_source() -> Source:
    """The one that was started early, once; then others."""
    return _started.pop() if _started else start_source()


def drop_early() -> None:
    """Nothing will be forked."""
    while _started:
        _started.pop().drop()
