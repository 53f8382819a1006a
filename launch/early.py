"""The process that ranks are forked from, or that becomes the one of a caller (engine/process/fork_process.py), started
before this process has imported what it needs itself, as a second core is free meanwhile. It is told later what for,
and ends with this process if it never is, or sooner where that is likely: a script may import `moesaic.LLM` and make
none. Nothing is imported here that takes long."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import socket
import subprocess
import sys
import time
from typing import NamedTuple

from configs.env import all_variables
from engine.process.orphan import child_command
from launch.lasting import popen

MODULE = "engine.process.fork_process"
ROOM = " " * 2048  # the last word of its command line, where the kernel finds those of the processes it becomes


UNTOLD_SECONDS = 20.0  # after which one that may not be wanted ends
KEPT_SECONDS = 10.0  # for which it is taken


class Inherited(NamedTuple):
    """What a process has from the one that starts it. process: the id of that one; folder: device and inode; cores:
    those that it may use."""

    process: int
    folder: tuple[int, int]
    cores: frozenset[int]
    environment: dict[str, str]


def _inherited() -> Inherited:
    folder = os.stat(".")
    cores = frozenset(os.sched_getaffinity(0)) if sys.platform == "linux" else frozenset[int]()
    return Inherited(os.getpid(), (folder.st_dev, folder.st_ino), cores, all_variables())


class Source(NamedTuple):
    """socket: its standard input, our end. until: in seconds of time.monotonic."""

    process: subprocess.Popen[bytes]
    socket: socket.socket
    inherited: Inherited
    until: float = math.inf

    def tell(self, told: bytes) -> None:
        """told: a `Told` of engine/process/fork_process.py, as JSON."""
        with contextlib.suppress(OSError):  # it has ended, which whoever watches it will see
            self.socket.send(told)

    def drop(self) -> None:
        """Nothing is wanted of it."""
        self.socket.close()
        if self.inherited.process == os.getpid():  # not in a fork
            self.process.kill()
            self.process.wait()

    @property
    def fits(self) -> bool:
        """Whether one that is started now would be the same."""
        return time.monotonic() < self.until and self.inherited == _inherited() and self.process.poll() is None


_started: list[Source] = []  # at most one, started early


def start_source(*, lasting: bool = True) -> Source:
    """In this process's environment. lasting: it waits to be told for as long as this process lives."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    until, untold = (math.inf, []) if lasting else (time.monotonic() + KEPT_SECONDS, ["--untold", str(UNTOLD_SECONDS)])
    with theirs:  # a group of its own, as launch/processes.py starts the others
        command = child_command(MODULE, [*untold, "--room", ROOM])
        return Source(popen(command, stdin=theirs.fileno(), process_group=0), ours, _inherited(), until)


def start_early() -> None:
    _started.append(start_source())


def start_maybe() -> None:
    """For an LLM that may be made, in a process of its own: where torch has been imported it would compute here. Not in
    a worker of multiprocessing, which imports what its parent's script does."""
    processes = sys.modules.get("multiprocessing.process")
    if "torch" in sys.modules or _started or (processes is not None and processes.parent_process() is not None):
        return
    _started.append(start_source(lasting=False))
    atexit.register(drop_early)


def take_source() -> Source:
    """The one that was started early, once, if it is what another would be; then others."""
    while _started:
        source = _started.pop()
        if source.fits:
            return source
        source.drop()
    return start_source()


def drop_early() -> None:
    """Nothing will be forked."""
    while _started:
        _started.pop().drop()
