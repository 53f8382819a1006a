"""The process that keeps `moesaic serve` running on one node, where the system that started it does not do that.

A part that was killed comes back and joins the others; a head that was killed is met again by them. Systems that do
this themselves (Kubernetes, systemd, compose) start `moesaic serve`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from engine.process.console import say_text
from launch.processes import hear_signals

EXIT_BAD_INPUT = 2
LOOK_SECONDS = 0.1
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds; each early end in a row doubles the pause
STEADY_SECONDS = 60.0  # one that ran for so long was no early end
LEAVE_SECONDS = 20.0  # beyond the drain, until it is killed


class Agent:
    """words: of `moesaic serve`. tries: how often in a row it may end early. drain: seconds that its end may take."""

    def __init__(self, words: Sequence[str], tries: int = 50, drain: float = 30.0) -> None:
        self._command = [sys.executable, "-m", "moesaic", "serve", *words, "--parent", str(os.getpid())]
        self._tries = tries
        self._drain = drain
        self._process: subprocess.Popen[bytes] | None = None
        self._told = 0  # the signal that ends it
        self._told_at = 0.0

    def catch_signals(self) -> None:
        hear_signals(self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Some systems send one to every process of a node, some to the first; the server is in a session of its own
        and hears of it here, once. A second one of its kind ends it at once."""
        if self._told and time.monotonic() - self._told_at > 1.0 and self._process is not None:
            self._process.send_signal(number)
        self.stop(number)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """From any thread: let it drain, and do not start it again."""
        if not self._told:
            self._told, self._told_at = number, time.monotonic()

    def told(self) -> bool:
        return self._told != 0

    def run(self) -> int:
        """Block until it has ended for good; its exit code, as a shell tells it."""
        pause, early = FIRST_PAUSE, 0
        while True:
            began = time.monotonic()
            # A child that outlives the thread that started it is killed by the kernel (--parent).
            with subprocess.Popen(self._command, stdin=subprocess.DEVNULL, start_new_session=True) as process:
                self._process = process
                self._wait(process)
            code = process.returncode if process.returncode >= 0 else 128 - process.returncode
            if self.told():
                return 128 + self._told if code in (128 + signal.SIGINT, 128 + signal.SIGTERM) else code
            if code in (0, EXIT_BAD_INPUT):
                return code
            early = 0 if time.monotonic() - began > STEADY_SECONDS else early + 1
            pause = FIRST_PAUSE if early == 0 else min(2 * pause, LONGEST_PAUSE)
            if early > self._tries:
                say_text(f"it ended early {early} times in a row, the last time with exit code {code}")
                return code
            say_text(f"exit code {code}; started again in {pause:g} s")
            self._sleep(pause)
            if self.told():
                return code

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._told and time.monotonic() < deadline:
            time.sleep(min(LOOK_SECONDS, seconds))

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        """Until it has ended, which is bounded once it has been told to."""
        passed_on = False
        while process.poll() is None:
            if self._told and not passed_on:
                passed_on = True
                # Slurm may have sent it to the server too; the other one of the two is not taken for a second one.
                process.send_signal(signal.SIGINT if self._told == signal.SIGTERM else signal.SIGTERM)
            if self._told and time.monotonic() - self._told_at > self._drain + LEAVE_SECONDS:
                process.kill()
            try:
                process.wait(LOOK_SECONDS)
            except subprocess.TimeoutExpired:
                continue
