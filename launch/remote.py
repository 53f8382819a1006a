"""The process that `moesaic serve --headless` is: it starts the ranks of one machine and watches them for the head.

It connects to the head (launch/head.py), says which ranks it brings, and starts them when it is told to. When the
connection ends or the head says nothing for 2 s, it ends its ranks, because the others go on without them, and tries to
come back for a minute.

Exit codes: 0 the server has ended or this machine was told to leave, 2 bad input or refused by the head, 3 the head is
lost, 128 and the signal's number when a signal ended it while its ranks were loading or the head was looked for.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from pathlib import Path
from types import FrameType

from msgspec import structs

from configs.engine import Plan
from configs.hosts import Hosts, family_of, front_endpoint, resolve
from engine.process.console import say_line, say_text
from engine.process.orphan import life_of
from launch.control import (
    BEAT_SECONDS,
    LEASE_SECONDS,
    ControlConnection,
    End,
    Fence,
    Hello,
    Leaving,
    Lost,
    Refused,
    Restarts,
    Signs,
    Started,
    Welcome,
    descriptors,
)
from launch.identity import versions
from launch.monitor import RankMonitor
from launch.processes import Child, Children, RuntimeDir, hear_signals
from launch.supervisor import LOOK_SECONDS, ONE_SIGNAL_SECONDS, RANK_GRACE

EXIT_BAD_INPUT, EXIT_HEAD_LOST = 2, 3
RETURN_SECONDS = 60.0  # how long a lost head is looked for
RETRY_SECONDS = 0.5
CONNECT_SECONDS = 2.0
DRAIN_WORD_SECONDS = 1.0  # after a signal: for the head to say that it has got one too
LAST_WORD_SECONDS = 20.0  # once its ranks leave: until the head says so itself


class RemoteSupervisor:
    """Runs the ranks of one machine to their end."""

    def __init__(self, plan: Plan, hosts: Hosts, runtime_root: Path, startup_timeout: float) -> None:
        self.plan = plan
        self.hosts = hosts
        self.startup_timeout = startup_timeout
        self.runtime = RuntimeDir(runtime_root)
        self.signals = 0
        self.stopped_by = 0  # the first signal ...
        self.signalled = 0.0  # ... and when it came
        self.hurried = False  # another one came later
        self.said = ""  # last, of what may be said again and again
        self.hello = Hello(
            versions=versions(),
            plan=structs.replace(plan, reasons={}),
            first=hosts.first,
            local=hosts.local,
        )

    def run(self) -> int:
        """Block until it is over; the exit code."""
        hear_signals(self._on_signal)
        patience = self.startup_timeout
        try:
            while True:
                link = self._connect(patience)
                if link is None and self.signals:
                    return self.stopped("while it looked for the head")
                if link is None:
                    say_text(f"the head at {self.hosts.head}:{self.hosts.port} was not found within {patience:g} s")
                    return EXIT_HEAD_LOST
                with Children() as children:
                    code = _Session(self, link, children).run()
                if code is not None:
                    return code
                patience = RETURN_SECONDS
        finally:
            self.runtime.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signals += 1
        self.stopped_by = self.stopped_by or number
        self.signalled = self.signalled or time.monotonic()
        self.hurried = self.hurried or time.monotonic() - self.signalled > ONE_SIGNAL_SECONDS

    def stopped(self, when: str) -> int:
        """The exit code for a signal that came too early for anything to be drained."""
        say_text(f"ended at once by {signal.Signals(self.stopped_by).name}, {when}")
        return 128 + self.stopped_by

    def _connect(self, patience: float) -> ControlConnection | None:
        """Try until the head answers. None: it does not within `patience` seconds, or this machine is told to leave."""
        deadline = time.monotonic() + patience
        while not self.signals and time.monotonic() < deadline:
            try:
                address = resolve(self.hosts.head)  # each time: a head that is started again may have another one
            except ValueError as error:
                self._say_once(f"{error}; trying on")
                time.sleep(RETRY_SECONDS)
                continue
            connection = socket.socket(family_of(address))
            connection.setblocking(False)
            with contextlib.suppress(OSError):
                self._await(connection, address)
                link = ControlConnection(connection)
                link.send(self.hello)
                return link
            connection.close()
            time.sleep(RETRY_SECONDS)
        return None

    def _say_once(self, text: str) -> None:
        if text != self.said:
            self.said = text
            say_text(text)

    def _await(self, connection: socket.socket, address: str) -> None:
        """Connect within CONNECT_SECONDS, or until a signal; OSError otherwise. A wait in the kernel would outlast
        the signal."""
        deadline = time.monotonic() + CONNECT_SECONDS
        with contextlib.suppress(BlockingIOError):
            connection.connect((address, self.hosts.port))
        while not self.signals and time.monotonic() < deadline:
            if select.select([], [connection], [], LOOK_SECONDS)[1]:
                break
        error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))


class _Session:
    """One connection with the head, and the ranks that run under it."""

    def __init__(self, owner: RemoteSupervisor, link: ControlConnection, children: Children) -> None:
        self._owner = owner
        self._link = link
        self._children = children
        self._monitor: RankMonitor | None = None
        self._lives: dict[int, tuple[int, int]] = {}  # rank -> process and its life, as the head knows
        self._signed = 0.0  # when the head was last told of the ranks' signs of life
        self._refused: Refused | None = None
        self._end: End | None = None
        self._served = False  # the server has been ready
        self._drains = False  # it ends: the head says when

    def run(self) -> int | None:
        """The exit code; None: the head is lost, or wants this machine later."""
        link = self._link
        while True:
            dead = self._children.exited(LOOK_SECONDS, descriptors([link]))
            for message in link.receive():
                self._hear(message)
            if self._monitor is not None:
                self._look(self._monitor, dead)
            code = self._over()
            if code is not None:
                return code
            left = self._monitor is not None and self._monitor.left  # the front has told the ranks to leave
            if link.closed or link.silent > (LAST_WORD_SECONDS if left else LEASE_SECONDS):
                return self._alone(left)

    def _look(self, monitor: RankMonitor, dead: list[Child]) -> None:
        now = time.monotonic()
        if now - self._signed > BEAT_SECONDS:
            self._signed = now
            self._link.send(Signs(now, monitor.sign_payloads()))
        for lost in monitor.look(dead):
            process, life = self._lives.pop(lost.rank, (0, 0))
            known = life if process == lost.process else lost.process
            self._link.send(Lost(lost.rank, lost.reason, time.monotonic() - lost.time, known, lost.intact))
        for rank, process in monitor.processes.items():
            if self._lives.get(rank, (0, 0))[0] != process:
                self._lives[rank] = process, life_of(process)
                self._link.send(Started(rank, self._lives[rank][1]))

    def _hear(self, message: object) -> None:
        if isinstance(message, Welcome):
            self._start(message)
        elif isinstance(message, Refused):
            self._refused = message
        elif isinstance(message, End):
            self._end = message
        elif isinstance(message, Fence) and self._monitor is not None:
            process, life = self._lives.get(message.rank, (0, 0))
            if life == message.process:
                self._monitor.fence(process)
        elif isinstance(message, Restarts) and self._monitor is not None:
            self._drains = self._served and not message.on
            self._served = self._served or message.on
            self._monitor.restarts = message.on and not self._owner.signals
        else:
            self._link.close("it says what no head says")

    def _start(self, welcome: Welcome) -> None:
        owner, hosts = self._owner, self._owner.hosts
        path = owner.runtime.write("network.json", welcome.network)
        ranks = range(hosts.first, hosts.first + hosts.local)
        # Told by what each machine is, not by its address: two parts of a server may be on one machine.
        options = ("--network", str(path), "--front", front_endpoint(self._link.peer, hosts.port))
        self._monitor = RankMonitor(
            self._children,
            owner.plan,
            owner.runtime,
            owner.startup_timeout,
            ranks=ranks,
            options=options,
            standby=True,
            watches=False,
        )
        self._monitor.start(welcome.join)
        say_text(
            f"ranks {ranks[0]} to {ranks[-1]} {'join' if welcome.join else 'start'}; head {hosts.head}:{hosts.port}"
        )

    def _over(self) -> int | None:
        """The exit code when this machine is done."""
        if self._end is not None:
            self._children.end(
                RANK_GRACE if self._end.code == 0 else 0.0
            )  # only a front that drained tells ranks to leave
            return self._end.code
        if self._refused is not None and not self._refused.again:
            say_line(f"moesaic: error: the head refuses: {self._refused.error}")
            return EXIT_BAD_INPUT
        if self._owner.signals and not self._may_drain():
            self._children.end(grace=0.0)
            self._link.send(Leaving("it was told to leave"))
            self._link.close()
            if self._monitor is None or self._monitor.loading:
                return self._owner.stopped("while its ranks were loading")
            return 0
        return None

    def _may_drain(self) -> bool:
        """A system that ends all nodes tells all at once: the head's drain then has these ranks too."""
        if self._owner.hurried or not self._served:
            return False
        return self._drains or time.monotonic() - self._owner.signalled < DRAIN_WORD_SECONDS

    def _alone(self, left: bool) -> int | None:
        """The head is gone: the ranks end before it takes them for lost."""
        self._children.end(grace=RANK_GRACE if left else 0.0)
        if left:
            return 0
        if self._refused is not None:
            time.sleep(RETRY_SECONDS)
            return None
        say_text(f"the head is lost: {self._link.closed or 'no word from it'}; ranks have ended, looking for it again")
        self._link.close()
        return None
