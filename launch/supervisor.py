"""The process that `moesaic serve` is: it starts the ranks and the front, and watches them.

A rank that ends is told to the front, which goes on without it, and is started again (launch/keeper.py). Everything ends
when the front ends, and when a rank ends before the server was ready.

Exit codes: 0 after a drain, 2 bad input, 3 a rank failed at the start or all are lost, 1 anything else.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from configs.engine import Plan
from configs.env import child_environment
from configs.server import ServerConfig
from engine.messages import RankLost
from engine.wire import Reporter, Resizes
from launch.keeper import RankKeeper
from launch.processes import Child, Children, RuntimeDir

EXIT_RANK_LOST = 3
LOOK_SECONDS = 0.1  # how often heartbeats are read; the end of a process is seen at once
FRONT_GRACE = 5.0  # seconds for the front to tell its clients after a rank was lost
RANK_GRACE = 10.0  # seconds for ranks to leave after the front has told them to


class Supervisor:
    """Runs one server to its end. `on_ready(url)` is called once, when requests are served."""

    def __init__(
        self,
        plan: Plan,
        server: ServerConfig,
        runtime_root: Path,
        startup_timeout: float,
        on_ready: Callable[[str], None],
    ) -> None:
        self.plan = plan
        self.server = server
        self.runtime = RuntimeDir(runtime_root)
        self.startup_timeout = startup_timeout
        self.on_ready = on_ready
        self.children = Children()
        self.front: Child | None = None
        self.signals = 0
        self.clock = time.monotonic
        self.keeper = RankKeeper(self.children, plan, self.runtime, startup_timeout)
        self.reporter = Reporter(f"ipc://{self.runtime.path}/front.ipc")
        self.resizes = Resizes(self.runtime.path / "resizes")

    def run(self) -> int:
        """Block until the server has ended; the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        try:
            self._start()
            return self._watch()
        finally:
            self._end()

    def _start_front(self, *options: str) -> None:
        server_path = self.runtime.write("server.json", self.server)
        arguments = ["--plan", str(self.runtime.path / "plan.json"), "--server", str(server_path)]
        arguments += ["--runtime-dir", str(self.runtime.path), *options]
        self.front = self.children.start("front", -1, "server.process", arguments, child_environment(1))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """The first signal lets the front drain, the second ends it at once; the front tells the ranks."""
        self.signals += 1
        if self.front in self.children.all:
            assert self.front is not None
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.front.pidfd, signal.SIGTERM)

    def _watch(self) -> int:
        assert self.front is not None
        began, ready = self.clock(), False
        while True:
            dead = self._exited()
            if self.front in dead:
                return self._front_left(self.front)
            if not ready and (self.runtime.path / "ready").exists():  # asked before who is lost: that depends on it
                ready = True
                self.on_ready((self.runtime.path / "ready").read_text())
            for count in self.resizes.read():  # after the look for ends: a rank that has left was written off before
                self.keeper.resize(count)
            for lost in self._lost(dead):
                if not ready:
                    return self._failed_at_start(lost)
                self.reporter.send(lost)
            if self.keeper.left:  # the front has told the ranks to leave, and leaves itself
                self.children.wait_for(self.front, FRONT_GRACE)
                return self._front_left(self.front)
            self._restart(ready and not self.signals)
            if not ready and self.clock() - began > self.startup_timeout:
                say_text(f"not ready after {self.startup_timeout:.0f} s (--startup-timeout)")
                return 1

    # ---- what is more on several machines (launch/head.py) ----

    def _start(self) -> None:
        self.keeper.start()
        self._start_front()

    def _end(self) -> None:
        self.children.end(grace=0.0)
        self.reporter.close()
        self.runtime.close()

    def _exited(self) -> list[Child]:
        return self.children.exited(timeout=LOOK_SECONDS)

    def _lost(self, dead: list[Child]) -> list[RankLost]:
        return self.keeper.look(dead)

    def _restart(self, on: bool) -> None:
        self.keeper.restarts = on

    # ---- the end ----

    def _front_left(self, front: Child) -> int:
        code = front.process.returncode
        if code is None:
            say_text(f"the front has not left within {FRONT_GRACE:.0f} s")
            return 1
        if code == 0:
            self.keeper.kill_loading()
            self.children.end(RANK_GRACE)
        elif code != EXIT_RANK_LOST:
            say_text(f"the front ended: {front.exit_text()}")
        return code if code >= 0 else 1

    def _failed_at_start(self, lost: RankLost) -> int:
        """The front's clients are told before everything ends."""
        assert self.front is not None
        say_text(f"rank {lost.rank} ended before the server was ready: {lost.reason}; the server ends with it")
        self.reporter.send(lost)
        self.children.wait_for(self.front, FRONT_GRACE)
        return EXIT_RANK_LOST


def say_text(text: str) -> None:
    print(f"moesaic: {text}", file=sys.stderr, flush=True)
