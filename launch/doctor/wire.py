"""What the doctors of a launch say to each other: msgpack over TCP, each wait with a bound."""

from __future__ import annotations

import socket
import time

import msgspec

from configs.engine import Plan
from configs.hosts import family_of
from launch.doctor.findings import Finding

MAX_FRAME = 4 << 20


class Facts(msgspec.Struct, tag="facts", frozen=True, kw_only=True):
    """Of one node. plan: None where none could be made; address: by which it reaches the head; ports: on which it
    listens now, as its ranks will; features: of its CPU."""

    node: int
    versions: dict[str, str]
    plan: Plan | None
    address: str
    ports: list[int]
    features: list[str]
    findings: list[Finding]


class Peer(msgspec.Struct, frozen=True):
    node: int
    address: str
    ports: list[int]


class Look(msgspec.Struct, tag="look", frozen=True):
    """Try the others' ports."""

    peers: list[Peer]


class Send(msgspec.Struct, tag="send", frozen=True):
    """Measure the way to one of them."""

    to: int


class Path(msgspec.Struct, frozen=True):
    """From one node to another. seconds: of a small message and its answer, the least of several; ahead: seconds that
    the other's clock is ahead; rate: bytes per second, 0 where it was not measured."""

    source: int
    target: int
    refused: dict[int, str] = {}
    seconds: float = 0.0
    ahead: float = 0.0
    rate: float = 0.0


class Looked(msgspec.Struct, tag="looked", frozen=True):
    paths: list[Path]


class Verdict(msgspec.Struct, tag="verdict", frozen=True):
    findings: list[Finding]


Message = Facts | Look | Looked | Send | Verdict
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


class Broken(Exception):
    """A connection that does not do what it should; its text says why."""


def connect(address: str, port: int, seconds: float) -> socket.socket:
    """OSError when that cannot be done in time."""
    connection = socket.socket(family_of(address))
    try:
        connection.settimeout(seconds)
        connection.connect((address, port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        connection.close()
        raise
    return connection


def tell(connection: socket.socket, message: Message, seconds: float) -> None:
    payload = _encode(message)
    try:
        connection.settimeout(seconds)
        connection.sendall(len(payload).to_bytes(4, "big") + payload)
    except OSError as error:
        raise Broken(f"the connection broke: {error.strerror or error}") from None


def hear(connection: socket.socket, seconds: float) -> Message:
    deadline = time.monotonic() + seconds
    size = int.from_bytes(take(connection, 4, deadline), "big")
    if size > MAX_FRAME:
        raise Broken("what it says is no message of a doctor (is it a server that runs?)")
    try:
        said: Message = _decode(take(connection, size, deadline))
        return said
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise Broken(f"what it says cannot be understood (is it another version?): {error}") from None


def take(connection: socket.socket, size: int, deadline: float) -> bytes:
    found = bytearray()
    while len(found) < size:
        left = deadline - time.monotonic()
        try:
            if left <= 0:
                raise TimeoutError
            connection.settimeout(left)
            piece = connection.recv(size - len(found))
        except TimeoutError:
            raise Broken("no answer in time") from None
        except OSError as error:
            raise Broken(f"the connection broke: {error.strerror or error}") from None
        if not piece:
            raise Broken("it has closed the connection")
        found += piece
    return bytes(found)
