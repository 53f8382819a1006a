"""The process that ranks are forked from (engine/process/fork_process.py), started before a server's own process has
imported what it needs, as a second core is free meanwhile. It is told later what
for, and ends with this process if it never is."""

from __future__ import annotations

import socket
import subprocess
from dataclasses import dataclass

from engine.process.orphan import child_command

MODULE = "engine.process.fork_process"
ROOM = " " * 2048  # the last word of its command line, where the kernel finds those of the processes it becomes


@dataclass(frozen=True, slots=True)
class Source:
    """socket: its standard input, our end."""

    process: subprocess.Popen[bytes]
    socket: socket.socket


_started: list[Source] = []  # at most one, by `start_early`


def start_source() -> Source:
    """In this process's environment."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:  # a group of its own, as launch/processes.py starts the others
        command = child_command(MODULE, ["--room", ROOM])
        return Source(subprocess.Popen(command, stdin=theirs.fileno(), process_group=0), ours)


def start_early() -> None:
    _started.append(start_source())


def take_source() -> Source:
    """The one that was started early, once; then others."""
    return _started.pop() if _started else start_source()


def drop_early() -> None:
    """Nothing will be forked."""
    while _started:
        source = _started.pop()
        source.socket.close()
        source.process.kill()
        source.process.wait()
