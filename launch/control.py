"""What the supervisors of a server's machines say to each other: msgspec messages over one TCP connection.

A frame is its length (4 bytes, big-endian) and that many bytes of msgpack. Nothing here waits: what cannot be sent yet
is kept for the next `flush`. The port belongs to a private network: any machine that reaches it may offer ranks.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterable

import msgspec

from configs.engine import Plan
from configs.hosts import Network

MAX_FRAME = 1 << 20
BEAT_SECONDS = 0.25
LEASE_SECONDS = 2.0  # without word from the head for so long, a machine ends its ranks itself ...
SILENT_SECONDS = 3.0  # ... so that they have ended for certain when the head takes it for lost
STALL_SECONDS = 1.0  # when this process itself was not run for so long, the other gets its time anew


class Hello(msgspec.Struct, tag="hello", frozen=True, kw_only=True):
    """First word of a machine. versions: of what must be equal everywhere."""

    versions: dict[str, str]
    plan: Plan
    first: int
    local: int


class Started(msgspec.Struct, tag="started", frozen=True):
    rank: int
    process: int


class Lost(msgspec.Struct, tag="lost", frozen=True):
    """front.messages.RankLost; age: seconds since its last sign of life, as machines have clocks of their own."""

    rank: int
    reason: str
    age: float
    process: int
    intact: bool = True


class Leaving(msgspec.Struct, tag="leaving", frozen=True):
    """This machine's ranks have ended, on purpose."""

    reason: str


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """again: it may be well later."""

    error: str
    again: bool = False


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """Start the ranks. join: the others are at work already."""

    network: Network
    join: bool


class Restarts(msgspec.Struct, tag="restarts", frozen=True):
    """Whether a rank that ends is to be started again."""

    on: bool


class Fence(msgspec.Struct, tag="fence", frozen=True):
    """Kill this process of that rank, unless it has ended. process: as Started told it."""

    rank: int
    process: int


class End(msgspec.Struct, tag="end", frozen=True):
    """The server ends; the head has told the ranks."""

    code: int


class Beat(msgspec.Struct, tag="beat", frozen=True):
    pass


class Signs(msgspec.Struct, tag="signs", frozen=True):
    """The signs of life of this machine's ranks (engine/process/heartbeat.py). now: by their clock."""

    now: float
    signs: dict[int, bytes]


Message = Hello | Started | Lost | Leaving | Refused | Welcome | Restarts | Fence | End | Beat | Signs

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Message)


def descriptors(connections: Iterable[ControlConnection]) -> list[int]:
    """Those that become readable when something may have come."""
    return [link.connection.fileno() for link in connections if not link.closed]


class ControlConnection:
    """One end of a connection. `receive` and `send` never wait; look at `closed` after either."""

    def __init__(self, connection: socket.socket, clock: Callable[[], float] = time.monotonic) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.address = str(connection.getsockname()[0])
        self.peer = str(connection.getpeername()[0])
        self.closed = ""  # why
        self.connection = connection
        self._clock = clock
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._heard = self._looked = clock()
        self._beaten = 0.0

    @property
    def silent(self) -> float:
        """Seconds since the other side was last heard."""
        return self._clock() - self._heard

    def send(self, message: Message) -> None:
        payload = _encode(message)
        self._outgoing += len(payload).to_bytes(4, "big") + payload
        self.flush()

    def flush(self) -> None:
        try:
            while self._outgoing and not self.closed:
                del self._outgoing[: self.connection.send(self._outgoing)]
        except BlockingIOError:
            if len(self._outgoing) > MAX_FRAME:
                self.close("it does not read")
        except OSError as error:
            self.close(error.strerror or str(error))

    def receive(self) -> list[Message]:
        """All that has come whole, and a beat in the other direction when it is time. What came before the end of the
        connection is given out too."""
        now = self._clock()
        if now - self._looked > STALL_SECONDS:
            self._heard = now
        self._looked = now
        if now - self._beaten > BEAT_SECONDS and not self.closed:
            self._beaten = now
            self.send(Beat())
        self.flush()
        try:
            while not self.closed:
                piece = self.connection.recv(1 << 16)
                if not piece:
                    self.close("it has closed the connection")
                self._incoming += piece
                self._heard = now
        except BlockingIOError:
            pass
        except OSError as error:
            self.close(error.strerror or str(error))
        return [message for message in self._frames() if not isinstance(message, Beat)]

    def _frames(self) -> list[Message]:
        messages: list[Message] = []
        while len(self._incoming) >= 4:
            size = int.from_bytes(self._incoming[:4], "big")
            if size > MAX_FRAME:
                self.close("what it says is no message of a Moesaic supervisor")
                break
            if len(self._incoming) < 4 + size:
                break
            payload = bytes(self._incoming[4 : 4 + size])
            del self._incoming[: 4 + size]
            try:
                messages.append(_decoder.decode(payload))
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                self.close(f"what it says cannot be understood (is it another version?): {error}")
                break
        return messages

    def close(self, reason: str = "closed here") -> None:
        if not self.closed:
            self.closed = reason
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
            self.connection.close()
