"""How the front and the ranks reach each other: msgspec messages over ZeroMQ, and doorbells between ranks.

Two sockets per side, one for each direction, because a ZeroMQ socket may be used by one thread only and because a
send on a socket can swallow the wake-up of its file descriptor. Down (front to rank) is ROUTER to DEALER at
`endpoint`, up (ranks to front) is PUSH to PULL at `endpoint` + "-up" (ipc) or the next port (tcp).

Every queue is bounded and no send waits without a bound.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from dbo.alive import mark
from front.messages import Abort, FrontToRank, RankReady, RankToFront, encoder, front_decoder, rank_decoder

log = logging.getLogger("moesaic.wire")

QUEUE_MESSAGES = 65536  # per peer and direction
SEND_SECONDS = 10.0  # how long a rank waits for a front that does not read
SEND_NAP_SECONDS = 0.25  # and how often it shows meanwhile that it lives
_NOW, _BEFORE_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)  # flags of an enum make another one in each send
LINGER_SECONDS = 1.0  # how long close() waits for the last messages to leave
UNHEARD_SECONDS = 30.0  # the same, where the front has said nothing yet: it may still be starting, and not listen
# Over tcp: a peer that does not answer for three seconds is gone, also when its connection is not closed.
_KEEPALIVE = (
    (zmq.TCP_KEEPALIVE, 1),
    (zmq.TCP_KEEPALIVE_IDLE, 1),
    (zmq.TCP_KEEPALIVE_INTVL, 1),
    (zmq.TCP_KEEPALIVE_CNT, 2),
)
HELD_SECONDS = 0.05  # how soon a rank that is ready but cannot be reached yet is tried again


class NotConnected(ConnectionError):
    """There is no such process: the rank has not come up yet, or its process has ended."""


class Ranks(Protocol):
    """All ranks, as the front sees them. Implementations: ZmqRanks here, LocalRanks in
    engine/process/local_ranks.py."""

    @property
    def size(self) -> int: ...

    def send(self, rank: int, message: FrontToRank) -> None: ...

    def receive(self, timeout: float) -> list[RankToFront]:
        """What has come, waiting at most `timeout` seconds for the first; [] when nothing came."""
        ...

    def fence(self, rank: int, process: int) -> None:
        """Have this process of the rank killed, unless it has ended. Does not wait."""
        ...

    def close(self) -> None: ...


class ElasticRanks(Ranks, Protocol):
    """Ranks whose number may change."""

    def resize(self, count: int) -> None:
        """Have ranks 0 to count - 1 started, and those beyond ended when they have left. Does not wait."""
        ...


class Numbers:
    """How the front tells the supervisor the number of ranks, and which processes are to be killed: lines at the end of
    a file for each, so that what was written before a rank was told to leave is there to be read when that rank has
    left."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def write(self, number: int) -> None:
        with self._path.open("ab") as file:
            file.write(b"%d\n" % number)

    def read(self) -> list[int]:
        """The numbers that came since the last call, oldest first."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._offset += len(whole) + len(newline)
        return [int(line) for line in whole.split()]


class ZmqRanks:
    """The front's side. It binds; ranks connect whenever they are up. One thread may send while another receives.

    In asyncio, add a reader on `fileno()` and call `receive(0)` in it. That descriptor is edge-triggered: it becomes
    readable once for any number of messages and stays silent until they are all taken, so the one that is woken must
    take everything. `receive(0)` does; call it once more right after adding the reader, and now and then until all
    ranks are ready: a rank's two sockets connect independently of each other, so its RankReady is held back until it
    can be sent to.
    """

    def __init__(
        self,
        endpoint: str,
        size: int,
        resizes: Numbers | None = None,
        remote: str | None = None,
        fences: Numbers | None = None,
    ) -> None:
        """resizes: where the supervisor is told of another number of ranks; fences: and whom to kill; None: the owner
        of this object tells it. remote: an endpoint for the ranks of other machines besides."""
        self._size = size
        self._resizes = resizes
        self._fences = fences
        self._context = zmq.Context(io_threads=1)
        self._down = _socket(self._context, zmq.ROUTER)
        self._down.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an absent rank is an error, not a silent drop
        self._down.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a restarted rank takes over its old name
        self._up = _socket(self._context, zmq.PULL)
        self._held: list[RankReady] = []
        for address in (endpoint, remote):
            try:
                if address is not None:
                    _toward(self._down, address).bind(address)
                    _toward(self._up, address).bind(_up(address))
            except zmq.ZMQError as error:
                self._context.destroy(linger=0)
                raise ValueError(f"cannot bind {address}: {error}") from None

    @property
    def size(self) -> int:
        return self._size

    def resize(self, count: int) -> None:
        self._size = max(self._size, count)
        if self._resizes is not None:
            self._resizes.write(count)

    def fence(self, rank: int, process: int) -> None:
        if self._fences is not None:
            self._fences.write(process)

    def fileno(self) -> int:
        """Becomes readable when messages may have come; edge-triggered (see the class)."""
        return int(self._up.getsockopt(zmq.FD))

    def send(self, rank: int, message: FrontToRank) -> None:
        """Never blocks. NotConnected, or ConnectionError when the rank has stopped reading."""
        if not 0 <= rank < self._size:
            raise ValueError(f"rank {rank} is not in 0..{self._size - 1}")
        payload = encoder.encode(message)
        try:
            self._down.send(_identity(rank), _BEFORE_MORE)
            self._down.send(payload, _NOW)
        except zmq.Again:
            raise ConnectionError(f"rank {rank} does not read: {QUEUE_MESSAGES} messages wait for it") from None
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise NotConnected(f"rank {rank} is not connected") from None

    def receive(self, timeout: float) -> list[RankToFront]:
        """Everything that has come, waiting at most `timeout` seconds for the first; [] when nothing came."""
        if timeout > 0:
            self._up.poll(int((min(timeout, HELD_SECONDS) if self._held else timeout) * 1000))
        came: list[RankToFront] = [*self._held]
        self._held = []
        for payload in _drain(self._up):
            try:
                came.append(front_decoder.decode(payload))
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                log.error("dropped a message of %d bytes from a rank: %s", len(payload), error)
        messages: list[RankToFront] = []
        for message in came:
            if isinstance(message, RankReady) and not self._reaches(message.rank):
                self._held.append(message)
            else:
                messages.append(message)
        return messages

    def _reaches(self, rank: int) -> bool:
        try:
            self.send(rank, Abort([]))
        except ConnectionError:
            return False
        return True

    def close(self) -> None:
        self._down.close(linger=int(LINGER_SECONDS * 1000))
        self._up.close(linger=0)
        self._context.term()


class Reporter:
    """The supervisor's side: tells the front of ranks that cannot speak for themselves."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context(io_threads=1)
        self._up = _socket(self._context, zmq.PUSH)
        self._up.connect(_up(endpoint))

    def send(self, message: RankToFront) -> None:
        """Never blocks. A full queue (65536 losses that were not read) is an error."""
        self._up.send(encoder.encode(message), flags=zmq.NOBLOCK)

    def close(self) -> None:
        self._up.close(linger=0)
        self._context.term()


class RankSocket:
    """A rank's side."""

    def __init__(self, endpoint: str, rank: int) -> None:
        self._rank = rank
        self._heard = False  # the front
        self._context = zmq.Context(io_threads=1)
        self.inbox = _socket(self._context, zmq.DEALER)
        self.inbox.setsockopt(zmq.IDENTITY, _identity(rank))
        self._up = _socket(self._context, zmq.PUSH)
        self._up.setsockopt(zmq.SNDTIMEO, int(1000 * min(SEND_NAP_SECONDS, SEND_SECONDS)))
        # A connection to another machine may break while both ends live, and what was under way is lost then.
        self.breaks = [] if endpoint.startswith("ipc") else [_breaks_of(one) for one in (self.inbox, self._up)]
        _toward(self.inbox, endpoint).connect(endpoint)
        _toward(self._up, endpoint).connect(_up(endpoint))

    def send(self, message: RankToFront) -> None:
        """Waits up to 10 s when the queue is full, then ConnectionError: tokens are never dropped silently."""
        payload = encoder.encode(message)
        deadline = time.monotonic() + SEND_SECONDS
        while True:
            try:
                self._up.send(payload)
                return
            except zmq.Again:
                mark()  # it is the front that hangs
                if time.monotonic() >= deadline:
                    raise ConnectionError(
                        f"rank {self._rank}: the front did not read for {SEND_SECONDS:.0f} s"
                    ) from None

    def poll(self, timeout: float) -> list[FrontToRank]:
        """Everything that has come, waiting at most `timeout` seconds for the first; 0 does not wait. ConnectionError
        when the connection with another machine has broken and nothing more comes."""
        if timeout > 0 and not self.inbox.poll(int(timeout * 1000)):
            return []
        messages: list[FrontToRank] = []
        for payload in _drain(self.inbox):
            self._heard = True
            try:
                messages.append(rank_decoder.decode(payload))
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                log.error("rank %d dropped a message of %d bytes: %s", self._rank, len(payload), error)
        if not messages and any(broken.poll(0) for broken in self.breaks):
            raise ConnectionError(f"rank {self._rank}: the connection with the front has broken")
        return messages

    def close(self) -> None:
        """Waits up to a second for the last messages to leave, or up to 30 for a front that was never heard."""
        for broken in self.breaks:
            broken.close(linger=0)
        self.inbox.close(linger=0)
        self._up.close(linger=int(1000 * (LINGER_SECONDS if self._heard else UNHEARD_SECONDS)))
        self._context.term()


class ZmqDoorbell:
    """Rings the other ranks, and hears them. endpoints: those of the ranks at the start; each rank binds its own.

    A ring carries the generation of the sleep that it is to end (engine/rank.py); `heard` forgets older ones. Rings
    are read only by `heard`, so that one which comes early waits in the queue.
    """

    def __init__(self, endpoints: Sequence[str], rank: int) -> None:
        self._context = zmq.Context(io_threads=1)
        self.ear = _socket(self._context, zmq.PULL)
        _toward(self.ear, endpoints[rank]).bind(endpoints[rank])
        self._own = endpoints[rank]
        self._bells: dict[str, zmq.Socket[bytes]] = {}
        self.reach(endpoints)

    def reach(self, endpoints: Sequence[str]) -> None:
        """Ring these from now on, and no others."""
        for endpoint in self._bells.keys() - set(endpoints):
            self._bells.pop(endpoint).close(linger=0)
        for endpoint in endpoints:
            if endpoint != self._own and endpoint not in self._bells:
                bell = _socket(self._context, zmq.PUSH)
                bell.setsockopt(zmq.LINGER, 0)  # a ring for a rank that is gone must not hold up this one's end
                _toward(bell, endpoint).connect(endpoint)
                self._bells[endpoint] = bell

    def ring(self, generation: int) -> None:
        """A full queue means a rank that has not listened for long: its loss shows in the next agreement."""
        payload = generation.to_bytes(8, "little")
        for bell in self._bells.values():
            try:
                bell.send(payload, flags=zmq.NOBLOCK)
            except zmq.Again:
                log.warning("a doorbell is full; its rank seems to hang")

    def heard(self, generation: int) -> bool:
        rings = [int.from_bytes(payload, "little") for payload in _drain(self.ear)]
        return generation in rings

    def close(self) -> None:
        for bell in self._bells.values():
            bell.close(linger=0)
        self.ear.close(linger=0)
        self._context.term()


def sleep_until_called(inbox: RankSocket, bell: ZmqDoorbell, timeout: float) -> None:
    """Block, at no cost, until a message or a ring has come, for at most `timeout` seconds."""
    poller = zmq.Poller()
    poller.register(inbox.inbox, zmq.POLLIN)
    poller.register(bell.ear, zmq.POLLIN)
    for broken in inbox.breaks:
        poller.register(broken, zmq.POLLIN)
    poller.poll(int(timeout * 1000))


def _drain(socket: zmq.Socket[bytes]) -> list[bytes]:
    payloads: list[bytes] = []
    while True:
        try:
            payloads.append(socket.recv(flags=zmq.NOBLOCK))
        except zmq.Again:
            return payloads


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES)
    for option, value in _KEEPALIVE:
        socket.setsockopt(option, value)
    # A name without a file has no permissions: processes of other users are turned away as they connect.
    socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
    return socket


def _toward(socket: zmq.Socket[bytes], endpoint: str) -> zmq.Socket[bytes]:
    """The same socket, made for IPv6 where the address is one: such a socket would map IPv4 addresses to others."""
    if endpoint.startswith("tcp://["):
        socket.setsockopt(zmq.IPV6, 1)
    return socket


def _breaks_of(socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """Becomes readable when the connection breaks."""
    return socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)


def _identity(rank: int) -> bytes:
    return b"rank-%d" % rank


def _up(endpoint: str) -> str:
    """The address of the other direction."""
    if endpoint.startswith("tcp://"):
        host, _, port = endpoint.rpartition(":")
        return f"{host}:{int(port) + 1}"
    return f"{endpoint}-up"
