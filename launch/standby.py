"""Processes that become the next ranks that are started (engine/process/standby_process.py), so that nothing is
imported between a loss and a rank's return. A machine's supervisor keeps as many as it has ranks, where memory allows.

They are children like the ranks: seen by a pidfd when they end, ended with their parent. The end of one is no rank's
loss; another one is started.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable

from msgspec import Struct

from configs.machine import free_memory
from engine.process.console import say
from engine.process.standby_process import READY
from launch.processes import Child, Children

MODULE = "engine.process.standby_process"
NAME = "standby"
LONGEST_PAUSE = 60.0  # seconds: each one in a row that has ended by itself doubles the pause before the next ...
FIRST_PAUSE = 1.0  # ... from this on
KEPT_FREE = 2 << 30  # bytes: with less only one waits


class _Waiting(Struct):
    """ready: it waits for its command line."""

    child: Child
    ready: bool = False

    @property
    def pid(self) -> int:
        return self.child.process.pid


class Standby:
    def __init__(
        self,
        children: Children,
        module: str,
        architecture: str,
        environment: dict[str, str],
        forks: bool = False,
        free: Callable[[], int] = free_memory,
    ) -> None:
        """module: what a rank's process runs; architecture: of the model; forks: they and the ranks may be forked from
        one that has imported (launch/forks.py); free: bytes of memory that are."""
        self._children = children
        self._module, self._architecture, self._forks = module, architecture, forks
        self._options = [f"--module={module}", "--architecture", architecture]
        self._environment = environment
        self._free = free
        self._waiting: list[_Waiting] = []  # in the order in which they were started
        self._failed = 0  # in a row
        self._ended = 0.0

    def fork_from_now_on(self, seconds: float) -> None:
        """If that may be. seconds: how long the first fork may wait for the imports."""
        if self._forks:
            self._children.fork_from(self._module, [MODULE], self._architecture, self._environment, seconds)

    @property
    def processes(self) -> list[int]:
        """All of them, the oldest first."""
        return [one.pid for one in self._waiting]

    @property
    def ready(self) -> list[int]:
        """Those that wait for their command line; the first one is the next rank."""
        self._hear()
        return [one.pid for one in self._waiting if one.ready]

    def _hear(self) -> None:
        for one in self._waiting:
            if not one.ready and one.child.link is not None:
                with contextlib.suppress(OSError):  # nothing has come yet, or it has ended
                    one.ready = one.child.link.recv(len(READY)) == READY
                    if one.ready:
                        say("standby_ready", pid=one.pid)

    def look(self, dead: list[Child], now: float) -> None:
        """Call it now and then, with the children that have ended since."""
        for one in [one for one in self._waiting if one.child in dead]:
            self._children.forget(one.child)
            self._waiting.remove(one)
            self._failed += 1
            self._ended = now
        self._hear()

    def keep(self, words: list[str], now: float, count: int) -> None:
        """Start one when there are fewer than `count` and none is getting ready, which takes a core. words: a rank's
        command line as it may be."""
        pause = min(FIRST_PAUSE * 2 ** (self._failed - 1), LONGEST_PAUSE) if self._failed else 0.0
        if len(self._waiting) >= count or not all(one.ready for one in self._waiting) or now - self._ended < pause:
            return
        if self._waiting and self._free() < KEPT_FREE:
            return
        self.fork_from_now_on(0.0)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        arguments = [*self._options, "--words", json.dumps(words)]
        with theirs:
            child = self._children.start(NAME, -1, MODULE, arguments, self._environment, theirs.fileno())
        child.link = ours
        self._waiting.append(_Waiting(child))

    def become(self, name: str, rank: int, arguments: list[str]) -> Child | None:
        """The first one that is ready is this rank from now on. None: there is no process that waits."""
        line = json.dumps([*arguments, "--parent", str(os.getpid())]).encode() + b"\n"
        self._hear()
        for one in [one for one in self._waiting if one.ready]:
            link = one.child.link
            assert link is not None
            try:
                sent = link.send(line)
            except OSError:  # it has ended, which is seen by the next look
                sent = 0
            if sent != len(line):
                one.ready = False
                one.child.process.kill()
                continue
            one.child.unlink()
            one.child.name, one.child.rank = name, rank
            self._waiting.remove(one)
            self._failed = 0
            return one.child
        return None
