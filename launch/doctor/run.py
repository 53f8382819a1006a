"""The doctor of one machine, or one of several that meet: the head collects what all have found, and tells them all.

They meet at the head's first port (--data-parallel-rpc-port), and listen on those that the server will use, so that a
closed port is found here. Every wait has a bound; all of it takes less than 20 s beyond the wait for the others.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path as FilePath

from msgspec import Struct, field

from configs.hosts import Hosts, family_of, resolve
from engine.process.console import say_text
from launch.doctor.checkpoint import complete, read_speed
from launch.doctor.compare import clocks, compare, links, reach
from launch.doctor.devices import devices, interfaces
from launch.doctor.findings import Finding, worst
from launch.doctor.machine import Machine, cpu_flags, quick_checks
from launch.doctor.paths import Listeners, look, send
from launch.doctor.wire import Broken, Facts, Look, Looked, Message, Path, Peer, Send, Verdict, connect, hear, tell
from launch.identity import versions

HELLO_SECONDS = 5.0
LOOK_SECONDS = 12.0  # beyond what paths.look may take
SEND_SECONDS = 10.0
RETRY_SECONDS = 0.2
FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "amx_bf16", "amx_int8")


class Doctor(Struct, frozen=True, kw_only=True):
    """machine: this one; model: directory of the checkpoint, None: it is not here; error: why no plan could be made,
    and fix what to type; hosts: its part of a launch; first_ports: beside those of ranks and front. nodes: 1: it is
    alone. rows: as compare.links takes them."""

    machine: Machine
    model: FilePath | None
    error: str = ""
    fix: str = "see the message"
    hosts: Hosts | None = None
    nodes: int = 1
    patience: float = 10.0
    rows: tuple[int, int] = (0, 0)
    expected: float = 0.0
    clock: Callable[[], float] = time.time
    known_versions: dict[str, str] = field(default_factory=versions)

    @property
    def node(self) -> int:
        return self.machine.node

    def alone(self) -> list[Finding]:
        """All that can be found without the others."""
        found = self.quick()
        if self.model is not None:
            found.append(read_speed(self.node, self.model))
        return found + devices(self.machine)

    def quick(self) -> list[Finding]:
        found = [Finding("plan", self.node, "broken", self.error, self.fix)] if self.error else []
        whole = [] if self.model is None else [complete(self.node, self.model)]
        return [*found, *whole, *quick_checks(self.machine)]

    def run(self) -> list[Finding]:
        """What is found on all nodes, or on this one where it is alone or does not find the head."""
        if self.hosts is None or self.nodes == 1:
            return self.alone()
        return self._lead(self.hosts) if self.node == 0 else self._follow(self.hosts)

    # ---- the head ----

    def _lead(self, hosts: Hosts) -> list[Finding]:
        own = self.alone()
        try:
            address = resolve(hosts.head)
            listener = socket.create_server((address, hosts.port), family=family_of(address))
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            text = f"cannot listen on {hosts.head}:{hosts.port}: {why}"
            return [
                *own,
                Finding("address", 0, "broken", text, "ip addr; --data-parallel-address must be of this machine"),
            ]
        ports = [hosts.port + number for number in (1, 2, 3)] + _rank_ports(hosts)
        listeners = Listeners(address, ports, self.clock)
        own.append(interfaces(self.machine, address))
        with listener, contextlib.ExitStack() as stack:
            stack.callback(listeners.close)
            links_of: dict[int, socket.socket] = {}
            facts = {0: self._facts(address, listeners, own)}
            odd = self._gather(listener, links_of, facts)
            for connection in links_of.values():
                stack.enter_context(connection)
            present = [facts[node] for node in sorted(facts)]
            found = [finding for one in present for finding in one.findings] + odd + self._absent(facts, address)
            found += compare(present)
            looked, sent = self._measure(links_of, present)
            found += clocks(looked) + reach(looked, present) + links(looked, sent, present, self.rows, self.expected)
            for connection in links_of.values():
                with contextlib.suppress(Broken):
                    tell(connection, Verdict(found), HELLO_SECONDS)
        return found

    def _facts(self, address: str, listeners: Listeners, own: Sequence[Finding]) -> Facts:
        ports = [
            Finding(
                "ports",
                self.node,
                "broken",
                f"port {port} of {address} cannot be used: {why}",
                f"ss -ltnp sport = :{port}",
            )
            for port, why in listeners.taken.items()
        ]
        flags = cpu_flags(self.machine)
        return Facts(
            node=self.node,
            versions=self.known_versions,
            plan=self.machine.plan,
            address=address,
            ports=listeners.ports,
            features=[name for name in FEATURES if name in flags],
            findings=[*own, *ports],
        )

    def _gather(
        self, listener: socket.socket, links_of: dict[int, socket.socket], facts: dict[int, Facts]
    ) -> list[Finding]:
        """Until all are there, or as long as they are waited for. What came that was none of them."""
        odd: list[Finding] = []
        deadline = time.monotonic() + self.patience
        while len(facts) < self.nodes and (left := deadline - time.monotonic()) > 0:
            listener.settimeout(left)
            try:
                connection, place = listener.accept()
            except OSError:
                break
            try:
                said = hear(connection, HELLO_SECONDS)
                if not isinstance(said, Facts) or said.node in facts or not 0 < said.node < self.nodes:
                    raise Broken("it is no other node of this launch")
            except Broken as error:
                odd.append(Finding("meeting", 0, "broken", f"{place[0]}: {error}", "another --data-parallel-rpc-port"))
                connection.close()
                continue
            facts[said.node], links_of[said.node] = said, connection
        return odd

    def _absent(self, facts: dict[int, Facts], address: str) -> list[Finding]:
        loopback = address.startswith("127.") or address == "::1"
        fix = "ip addr; --data-parallel-address: one that other machines reach" if loopback else (
            f"the same command there; nc -vz {address} {self.hosts.port if self.hosts else 0} from there"
        )  # fmt: skip
        return [
            Finding("meeting", node, "broken", f"it has not come to {address} within {self.patience:g} s", fix)
            for node in range(self.nodes)
            if node not in facts
        ]

    def _measure(self, links_of: dict[int, socket.socket], present: Sequence[Facts]) -> tuple[list[Path], list[Path]]:
        """Ports and distances by all at once; then rates, each node sending to one and receiving from one at a time."""
        peers = [Peer(one.node, one.address, one.ports) for one in present]
        looked = self._ask(links_of, {node: Look(peers) for node in links_of}, lambda: look(0, peers, self.clock))
        closed = {(path.source, path.target) for path in looked if path.refused}
        sent: list[Path] = []
        by_node = {peer.node: peer for peer in peers}
        nodes = sorted(by_node)
        for shift in range(1, len(nodes)):
            pairs = {node: nodes[(index + shift) % len(nodes)] for index, node in enumerate(nodes)}
            pairs = {node: to for node, to in pairs.items() if (node, to) not in closed and by_node[to].ports}
            own = pairs.pop(0, None)
            questions: dict[int, Message] = {node: Send(to) for node, to in pairs.items()}
            ours = [] if own is None else [by_node[own]]
            sent += self._ask(links_of, questions, partial(_send_each, ours))
        return looked, sent

    def _ask(
        self, links_of: dict[int, socket.socket], questions: dict[int, Message], own: Callable[[], list[Path]]
    ) -> list[Path]:
        for node, question in list(questions.items()):
            try:
                tell(links_of[node], question, HELLO_SECONDS)
            except Broken as error:
                say_text(f"node {node}: {error}")
                del questions[node]
        paths = own()
        for node in questions:
            try:
                said = hear(links_of[node], LOOK_SECONDS)
                paths += said.paths if isinstance(said, Looked) else []
            except Broken as error:
                say_text(f"node {node}: {error}")
        return paths

    # ---- the others ----

    def _follow(self, hosts: Hosts) -> list[Finding]:
        own = self.alone()
        try:
            connection = self._find(hosts)
        except Broken as error:
            fix = f"ip route get {hosts.head}; nc -vz {hosts.head} {hosts.port}; the same command on the head"
            return [*own, Finding("meeting", self.node, "broken", str(error), fix)]
        with connection:
            address = str(connection.getsockname()[0])
            own.append(interfaces(self.machine, address))
            listeners = Listeners(address, _rank_ports(hosts), self.clock)
            try:
                tell(connection, self._facts(address, listeners, own), HELLO_SECONDS)
                return self._answer(connection)
            except Broken as error:
                return [*own, Finding("meeting", self.node, "broken", f"the head: {error}", "see what it says")]
            finally:
                listeners.close()

    def _find(self, hosts: Hosts) -> socket.socket:
        deadline = time.monotonic() + self.patience
        while True:
            try:
                return connect(resolve(hosts.head), hosts.port, min(2.0, self.patience))
            except (OSError, ValueError) as error:
                why = (error.strerror or "no answer") if isinstance(error, OSError) else str(error)
            if time.monotonic() > deadline:
                raise Broken(f"the head was not found at {hosts.head}:{hosts.port} in {self.patience:g} s: {why}")
            time.sleep(RETRY_SECONDS)

    def _answer(self, connection: socket.socket) -> list[Finding]:
        """What the head asks, until it says what is wrong."""
        peers: dict[int, Peer] = {}
        while True:
            said = hear(connection, self.patience + (LOOK_SECONDS + SEND_SECONDS) * 2)
            if isinstance(said, Look):
                peers = {peer.node: peer for peer in said.peers}
                tell(connection, Looked(look(self.node, said.peers, self.clock)), HELLO_SECONDS)
            elif isinstance(said, Send) and said.to in peers:
                tell(connection, Looked([_send(self.node, peers[said.to])]), HELLO_SECONDS)
            elif isinstance(said, Verdict):
                return said.findings
            else:
                raise Broken("it says what no head says")


def _send(source: int, peer: Peer) -> Path:
    return send(source, peer, peer.ports[-1])


def _send_each(peers: Sequence[Peer]) -> list[Path]:
    return [_send(0, peer) for peer in peers]


def _rank_ports(hosts: Hosts) -> list[int]:
    return [hosts.bell_port(rank) for rank in range(hosts.first, hosts.first + hosts.local)]


def refusal(doctor: Doctor) -> str:
    """Why a server should not be started here, on one line, by what is found at once; "": nothing is known."""
    found = [finding for finding in doctor.quick() if finding.state == "broken"]
    if worst(found) == "ok":
        return ""
    return "; ".join(f"{finding.check}: {finding.text} ({finding.fix})" for finding in found)
