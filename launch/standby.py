"""A process that becomes the next rank that is started (engine/process/standby_process.py), so that nothing is imported
between a loss and the rank's return. A machine's supervisor keeps one while all its ranks serve.

It is a child like the ranks: seen by a pidfd when it ends, ended with its parent. Its end is no rank's loss; another
one is started.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket

from engine.process.console import say
from engine.process.standby_process import READY
from launch.processes import Child, Children

MODULE = "engine.process.standby_process"
NAME = "standby"
LONGEST_PAUSE = 60.0  # seconds: each one in a row that has ended by itself doubles the pause before the next ...
FIRST_PAUSE = 1.0  # ... from this on


class Standby:
    def __init__(self, children: Children, module: str, architecture: str, environment: dict[str, str]) -> None:
        """module: what a rank's process runs; architecture: of the model."""
        self._children = children
        self._options = [f"--module={module}", "--architecture", architecture]
        self._environment = environment
        self._child: Child | None = None
        self._ready = False
        self._failed = 0  # in a row
        self._ended = 0.0

    @property
    def process(self) -> int:
        """0: there is none."""
        return 0 if self._child is None else self._child.process.pid

    @property
    def ready(self) -> bool:
        """It waits for its command line."""
        self._hear()
        return self._ready

    def _hear(self) -> None:
        link = None if self._child is None else self._child.link
        if link is not None and not self._ready:
            with contextlib.suppress(OSError):  # nothing has come yet, or it has ended
                self._ready = link.recv(len(READY)) == READY
                if self._ready:
                    say("standby_ready", pid=self.process)

    def look(self, dead: list[Child], now: float) -> None:
        """Call it now and then, with the children that have ended since."""
        if self._child is not None and self._child in dead:
            self._children.forget(self._child)
            self._failed += 1
            self._ended = now
            self._child, self._ready = None, False
        self._hear()

    def keep(self, words: list[str], now: float) -> None:
        """Start one when there is none. words: a rank's command line as it may be."""
        pause = min(FIRST_PAUSE * 2 ** (self._failed - 1), LONGEST_PAUSE) if self._failed else 0.0
        if self._child is not None or now - self._ended < pause:
            return
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        arguments = [*self._options, "--words", json.dumps(words)]
        with theirs:
            child = self._children.start(NAME, -1, MODULE, arguments, self._environment, theirs.fileno())
        child.link = ours
        self._child = child

    def become(self, name: str, rank: int, arguments: list[str]) -> Child | None:
        """It is this rank from now on. None: there is no process that waits."""
        child = self._child
        if child is None or child.link is None or not self.ready:
            return None
        line = json.dumps([*arguments, "--parent", str(os.getpid())]).encode() + b"\n"
        try:
            sent = child.link.send(line)
        except OSError:  # it has ended, which is seen by the next look
            sent = 0
        if sent != len(line):
            child.process.kill()
            return None
        child.unlink()
        child.name, child.rank = name, rank
        self._child, self._ready, self._failed = None, False, 0
        return child
