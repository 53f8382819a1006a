"""The process that `moesaic serve` is: it starts the ranks and the front, and watches them.

A rank that ends is told to the front, which goes on without it, and is started again (launch/monitor.py), also when all
have ended. Everything ends when the front ends, when a rank ends before the server was ready, and when none can be
started again.

Exit codes: 0 after a drain, 2 bad input, 3 a rank failed at the start or all are lost for good, 128 and the signal's
number when a signal ended it before it was ready, or a second one before the drain was over, 1 anything else.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from configs.engine import Plan
from configs.env import child_environment
from configs.server import ServerConfig
from engine.process.console import say_text
from front.messages import NoneLeft, RankLost
from front.wire import Numbers, Reporter
from launch.monitor import RankMonitor
from launch.processes import Child, Children, RuntimeDir, hear_signals

EXIT_RANK_LOST = 3
LOOK_SECONDS = 0.1  # how often heartbeats are read; the end of a process is seen at once
START_SECONDS = 0.005  # how often it is looked whether requests are served, until they are
FRONT_GRACE = 5.0  # seconds for the front to tell its clients after a rank was lost
RANK_GRACE = 10.0  # seconds for ranks to leave after the front has told them to
ONE_SIGNAL_SECONDS = 0.5  # a terminal's SIGINT and a parent's SIGTERM for the same Ctrl-C come within this


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
        self.signals: dict[int, float] = {}  # signal -> when it first came
        self.stopped_by = 0  # the signal that ends everything at once
        self.ready = False
        self.clock = time.monotonic
        self.monitor = RankMonitor(self.children, plan, self.runtime, startup_timeout, standby=True)
        self.reporter = Reporter(self.runtime.front)
        self.resizes = Numbers(self.runtime.file("resizes"))
        self.fences = Numbers(self.runtime.file("fences"))

    def run(self) -> int:
        """Block until the server has ended; the exit code."""
        hear_signals(self._on_signal)
        try:
            self._start()
            code = self._watch()
        finally:
            self._end()
        return 128 + self.stopped_by if self.stopped_by else code

    def _start_front(self, *options: str) -> None:
        server_path = self.runtime.write("server.json", self.server)
        self.runtime.clear("beat-front")
        arguments = ["--plan", str(self.runtime.file("plan.json")), "--server", str(server_path)]
        arguments += [*self.runtime.options, *options]
        self.front = self.children.start("front", -1, "server.process", arguments, child_environment(1))
        self.monitor.front = self.front

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """The first signal lets a server that is ready drain: the front tells the ranks. Otherwise all end at once."""
        now = self.clock()
        first = min(self.signals.values(), default=now)
        again = number in self.signals or now - first > ONE_SIGNAL_SECONDS
        self.signals.setdefault(number, now)
        if not self.ready and self.runtime.read("ready"):
            self.ready = True  # it answers requests already, though this process had not looked yet; nobody is told now
        if again or not self.ready:
            self.stopped_by = self.stopped_by or number
            self._send(signal.SIGKILL, self.children.all)
        elif len(self.signals) == 1 and self.front is not None:
            # The front may have got this one too, from a terminal or Slurm: the other one is no second signal to it.
            self._send(signal.SIGINT if number == signal.SIGTERM else signal.SIGTERM, [self.front])

    def _send(self, number: int, children: Sequence[Child]) -> None:
        for child in children:
            if child in self.children.all:
                with contextlib.suppress(OSError):  # it has ended
                    signal.pidfd_send_signal(child.pidfd, number)

    def _watch(self) -> int:
        assert self.front is not None
        began = self.clock()
        while True:
            dead = self._exited()
            if self.stopped_by:
                return self._stopped()
            if self.front in dead:
                return self._front_left(self.front)
            if not self.ready and (
                address := self.runtime.read("ready")
            ):  # asked before who is lost: that depends on it
                self.ready = True
                self.runtime.show_ready(address)
                self.on_ready(address)
            if self.signals:
                self.runtime.show_ready("")
            for count in self.resizes.read():  # after the look for ends: a rank that has left was written off before
                self.monitor.resize(count)
            for process in self.fences.read():
                self._fence(process)
            for lost in self._lost(dead):
                if not self.ready:
                    text = f"rank {lost.rank} ended before the server was ready: {lost.reason}; the server ends with it"
                    return self._give_up(text, lost)
                self.reporter.send(lost)
            waits = self.monitor.waits.report()
            if waits is not None:
                self.reporter.send(waits)
            if self.monitor.left:  # the front has told the ranks to leave, and leaves itself
                self.children.wait_for(self.front, FRONT_GRACE)
                return self._front_left(self.front)
            self._restart(self.ready and not self.signals)
            hopeless = self._hopeless() if self.ready else ""
            if hopeless:
                return self._give_up(f"all ranks are lost: {hopeless}; the server ends", NoneLeft(hopeless))
            if not self.ready and self.clock() - began > self.startup_timeout:
                say_text(f"not ready after {self.startup_timeout:.0f} s (--startup-timeout)")
                return 1

    # ---- what is more on several machines (launch/head.py) ----

    def _start(self) -> None:
        self._start_front()  # while ranks' imports are being made
        self.monitor.start()

    def _end(self) -> None:
        self.children.end(grace=0.0)
        self.reporter.close()
        self.runtime.close()

    def _exited(self) -> list[Child]:
        return self.children.exited(timeout=LOOK_SECONDS if self.ready else START_SECONDS)

    def _lost(self, dead: list[Child]) -> list[RankLost]:
        return self.monitor.look(dead)

    def _fence(self, process: int) -> None:
        self.monitor.fence(process)

    def _restart(self, on: bool) -> None:
        self.monitor.restarts = on

    def _hopeless(self) -> str:
        return self.monitor.hopeless

    # ---- the end ----

    def _stopped(self) -> int:
        when = "before the drain was over" if self.ready else "before the server was ready"
        say_text(f"ended at once by {signal.Signals(self.stopped_by).name}, {when}")
        return 128 + self.stopped_by

    def _front_left(self, front: Child) -> int:
        code = front.process.returncode
        if self.stopped_by:
            return self._stopped()
        if code is None:
            say_text(f"the front has not left within {FRONT_GRACE:.0f} s")
            return 1
        if code == 0:
            self.monitor.kill_loading()
            self.children.end(RANK_GRACE)
        elif code != EXIT_RANK_LOST:
            say_text(f"the front ended: {front.exit_text()}")
        return code if code >= 0 else 1

    def _give_up(self, text: str, last: RankLost | NoneLeft) -> int:
        """The front's clients are told before everything ends."""
        assert self.front is not None
        say_text(text)
        self.reporter.send(last)
        self.children.wait_for(self.front, FRONT_GRACE)
        return EXIT_RANK_LOST
