"""The supervisor of a server on several machines, on the machine that has the front.

Other machines connect (launch/remote.py), say which ranks they bring, and are refused when something does not fit. When
all ranks are there everybody is told to start them. From then on a machine that says nothing for 3 s, or whose
connection ends, is lost: its ranks are, and the others go on. It may come back.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from configs.engine import Plan
from configs.env import child_environment
from configs.hosts import Hosts, Network, family_of, front_endpoint, overlap, resolve
from configs.server import ServerConfig
from engine.process.console import say, say_text
from engine.process.heartbeat import read_sign
from front.messages import RankLost
from launch.control import (
    SILENT_SECONDS,
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
from launch.identity import differences, other_weights, versions
from launch.monitor import RankMonitor
from launch.processes import Child
from launch.supervisor import EXIT_RANK_LOST, LOOK_SECONDS, RANK_GRACE, Supervisor

HELLO_SECONDS = 5.0  # for a connection to say what it is
MAX_UNKNOWN_PEERS = 64  # that have not
END_GRACE = 2.0  # beyond the time that its ranks have: for another machine to end


class _Host(Struct):
    """Another machine, from its Hello until its link ends."""

    link: ControlConnection
    first: int
    local: int
    processes: dict[int, int] = {}  # of its ranks that have not ended

    @property
    def ranks(self) -> str:
        last = self.first + self.local - 1
        return f"rank {last}" if self.local == 1 else f"ranks {self.first} to {last}"


class HeadSupervisor(Supervisor):
    def __init__(
        self,
        plan: Plan,
        server: ServerConfig,
        hosts: Hosts,
        runtime_root: Path,
        startup_timeout: float,
        on_ready: Callable[[str], None],
    ) -> None:
        """ValueError when the address is not this machine's or the port is taken."""
        hosts = replace(hosts, head=resolve(hosts.head))
        try:
            self.listener = socket.create_server((hosts.head, hosts.port), family=family_of(hosts.head))
        except OSError as error:
            raise ValueError(
                f"cannot listen on {hosts.head}:{hosts.port} (--data-parallel-address): {error.strerror}"
            ) from None
        self.listener.setblocking(False)
        super().__init__(plan, server, runtime_root, startup_timeout, on_ready)
        self.network_options = ("--network", str(self.runtime.write("network.json", None)))
        self.monitor = self._new_monitor()
        self.parts = hosts
        self.hosts: list[_Host] = []
        self.unknown_peers: list[ControlConnection] = []  # that have not said Hello
        self.addresses: dict[int, str] = dict.fromkeys(range(hosts.local), hosts.head)
        self.network: Network | None = None  # once all are there
        self.store: Child | None = None
        self.restarting = False
        self.parting = False

    def _new_monitor(self) -> RankMonitor:
        ranks = range(self.plan.data_parallel_size_local)
        options = self.network_options
        return RankMonitor(
            self.children, self.plan, self.runtime, self.startup_timeout, ranks=ranks, options=options, standby=True
        )

    def _start(self) -> None:
        """The ranks follow when all machines are there."""
        arguments = ["--host", self.parts.head, "--port", str(self.parts.store_port)]
        self.store = self.children.start("store", -1, "engine.process.store_process", arguments, child_environment(1))
        self._start_front("--endpoint", front_endpoint(self.parts.head, self.parts.port))
        say_text(
            f"waiting for {self.parts.size - self.parts.local} rank(s) of other machines at "
            f"{self.parts.head}:{self.parts.port}"
        )

    def _front_left(self, front: Child) -> int:
        if not self.stopped_by:
            self._part(max(0, front.process.returncode or 0))
        return super()._front_left(front)

    def _stopped(self) -> int:
        code = super()._stopped()
        self._part(code)
        return code

    def _part(self, code: int) -> None:
        """It is over for the other machines too."""
        if self.parting:
            return
        self.parting = True
        self.listener.close()
        for host in self.hosts:
            host.link.send(End(code))
        if self.store is not None and self.store.process.returncode is None:
            self.store.process.kill()  # it never leaves by itself

    def _end(self) -> None:
        self._part(EXIT_RANK_LOST)
        super()._end()
        deadline = time.monotonic() + RANK_GRACE + END_GRACE
        while self.hosts and time.monotonic() < deadline:
            self.children.exited(LOOK_SECONDS, descriptors(host.link for host in self.hosts))
            for host in self.hosts:
                host.link.receive()
            self.hosts = [host for host in self.hosts if not host.link.closed]
        for link in (*self.unknown_peers, *(host.link for host in self.hosts)):
            link.close()

    # ---- what the loop of Supervisor asks ----

    def _exited(self) -> list[Child]:
        connections = descriptors([*(host.link for host in self.hosts), *self.unknown_peers])
        return self.children.exited(LOOK_SECONDS, [self.listener.fileno(), *connections])

    def _lost(self, dead: list[Child]) -> list[RankLost]:
        if self.store in dead:
            raise RuntimeError("the process where ranks meet has ended")
        self._accept()
        lost = self.monitor.look(dead)
        for host in list(self.hosts):
            lost += self._hear(host)
        return lost

    def _fence(self, process: int) -> None:
        super()._fence(process)
        for host in self.hosts:
            for rank, known in host.processes.items():
                if known == process:
                    host.link.send(Fence(rank, process))

    def _restart(self, on: bool) -> None:
        super()._restart(on)
        if on != self.restarting:
            self.restarting = on
            for host in self.hosts:
                host.link.send(Restarts(on))

    def _hopeless(self) -> str:
        """A machine that is here starts its ranks again itself."""
        return "" if self.hosts else super()._hopeless()

    # ---- other machines ----

    def _accept(self) -> None:
        for _ in range(MAX_UNKNOWN_PEERS):
            try:
                connection, _ = self.listener.accept()
            except OSError:  # no process is there
                break
            try:
                self.unknown_peers.append(ControlConnection(connection))
            except OSError:  # it has left again
                connection.close()
            if len(self.unknown_peers) > MAX_UNKNOWN_PEERS:
                self.unknown_peers.pop().close()
        for link in list(self.unknown_peers):
            for message in link.receive():
                if isinstance(message, Hello) and link in self.unknown_peers:
                    self.unknown_peers.remove(link)
                    self._greet(link, message)
            if link in self.unknown_peers and (link.closed or link.silent > HELLO_SECONDS):
                link.close()
                self.unknown_peers.remove(link)

    def _greet(self, link: ControlConnection, hello: Hello) -> None:
        refused = self._refusal(link, hello)
        if refused is not None:
            say("host_refused", address=link.peer, reason=repr(refused.error))
            link.send(refused)
            link.close()
            return
        host = _Host(link, hello.first, hello.local)
        self.hosts.append(host)
        self.addresses.update(dict.fromkeys(range(host.first, host.first + host.local), link.peer))
        say("host_joined", address=link.peer, first_rank=host.first, ranks=host.local)
        if self.network is not None:
            link.send(Welcome(self.network, join=True))
            link.send(Restarts(self.restarting))
        elif len(self.addresses) == self.parts.size:
            self._all_are_there()

    def _refusal(self, link: ControlConnection, hello: Hello) -> Refused | None:
        """Why this machine cannot take part."""
        for package, ours in versions().items():
            theirs = hello.versions.get(package, "unknown")
            if theirs != ours:
                return Refused(f"version of {package} is {theirs} there and {ours} on the head")
        unlike = differences(hello.plan, self.plan)
        if unlike:
            return Refused("; ".join(unlike))
        unlike_weights = other_weights(hello.plan, self.plan)
        if unlike_weights:
            return Refused(unlike_weights)
        end = hello.first + hello.local
        if hello.local < 1 or end > self.parts.size:
            return Refused(
                f"data_parallel_size_local is {hello.local}: ranks {hello.first} to {end - 1} of {self.parts.size}"
            )
        for host in self.hosts:
            if overlap(hello.first, hello.local, [(host.first, host.local)]):
                return Refused(
                    f"data_parallel_start_rank {hello.first}: {host.link.peer} has {host.ranks}",
                    again=host.link.silent > 1.0,
                )
        if overlap(hello.first, hello.local, [(0, self.parts.local)]):
            return Refused(f"data_parallel_start_rank {hello.first}: the head has ranks 0 to {self.parts.local - 1}")
        if self.network is not None:
            known = set(self.network.addresses[hello.first : end])
            if known != {link.peer}:
                return Refused(f"these ranks were at {', '.join(sorted(known))}: a machine comes back with its address")
        return None

    def _all_are_there(self) -> None:
        addresses = tuple(self.addresses[rank] for rank in range(self.parts.size))
        counts = [self.parts.local, *(host.local for host in sorted(self.hosts, key=lambda host: host.first))]
        parts = tuple(part for part, count in enumerate(counts) for _ in range(count))
        self.network = Network(head=self.parts.head, port=self.parts.port, addresses=addresses, parts=parts)
        self.runtime.write("network.json", self.network)
        for host in self.hosts:
            host.link.send(Welcome(self.network, join=False))
        self.monitor.start()

    def _hear(self, host: _Host) -> list[RankLost]:
        lost = []
        link = host.link
        for message in link.receive():
            if isinstance(message, Started):
                host.processes[message.rank] = message.process
            elif isinstance(message, Lost):
                host.processes.pop(message.rank, None)
                life = self.clock() - message.age
                reason = f"{message.reason} (on {link.peer})"
                lost.append(RankLost(message.rank, reason, life, message.process, message.intact))
            elif isinstance(message, Signs):
                self._take_signs(host, message)
            elif isinstance(message, Leaving):
                link.close()
                link.closed = message.reason  # says more than that the connection has ended
            else:
                link.close("it says what only a head says")
        if not link.closed and link.silent > SILENT_SECONDS:
            link.close(f"no word from it for {link.silent:.1f} s")
        if link.closed:
            lost += self._gone(host)
        return lost

    def _take_signs(self, host: _Host, message: Signs) -> None:
        ahead = message.now - self.clock()
        for rank, payload in message.signs.items():
            sign = read_sign(payload, ahead) if host.first <= rank < host.first + host.local else None
            if sign is not None:
                self.monitor.elsewhere[rank] = sign

    def _gone(self, host: _Host) -> list[RankLost]:
        reason = f"its machine {host.link.peer} is lost: {host.link.closed}"
        say("host_lost", address=host.link.peer, first_rank=host.first, ranks=host.local, reason=repr(host.link.closed))
        self.hosts.remove(host)
        for rank in range(host.first, host.first + host.local):
            self.monitor.elsewhere.pop(rank, None)
        if self.network is None:  # nothing has started: another may come in its place
            for rank in range(host.first, host.first + host.local):
                del self.addresses[rank]
            return []
        last_life = self.clock() - host.link.silent
        processes = host.processes or dict.fromkeys(
            range(host.first, host.first + host.local), 0
        )  # 0: none was told of
        return [RankLost(rank, reason, last_life, process) for rank, process in sorted(processes.items())]
