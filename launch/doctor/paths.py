"""From one machine to another: ports that listen, connections to them, and what a connection can carry.

A connection to such a port begins with one byte: "p" asks for the time of the other's clock, again and again; "d" sends
data until it is shut, and the answer is how much has arrived.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from configs.hosts import family_of
from launch.doctor.wire import Broken, Path, Peer, connect, take

CONNECT_SECONDS = 2.0
ANSWER_SECONDS = 6.0
PINGS = 12
SEND_SECONDS = 0.4
PIECE = 64 << 10
BUFFER = 256 << 10  # of the kernel: what lies there is waited for when time is up
MOST_BYTES = 256 << 20
_TIME = struct.Struct("d")


class Listeners:
    """Listens on ports as ranks and front will, in threads. taken: port -> why it could not."""

    def __init__(self, address: str, ports: Sequence[int], clock: Callable[[], float]) -> None:
        self.taken: dict[int, str] = {}
        self.ports: list[int] = []
        self._sockets: list[socket.socket] = []
        self._clock = clock
        for port in ports:
            try:
                listener = socket.create_server((address, port), family=family_of(address), backlog=64)
            except OSError as error:
                self.taken[port] = error.strerror or str(error)
                continue
            self._sockets.append(listener)
            self.ports.append(port)
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, Broken):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            kind = take(connection, 1, time.monotonic() + ANSWER_SECONDS)
            while kind == b"p":
                connection.sendall(_TIME.pack(self._clock()))
                kind = take(connection, 1, time.monotonic() + ANSWER_SECONDS)
            if kind == b"d":
                count, buffer = 0, bytearray(4 * PIECE)
                connection.settimeout(ANSWER_SECONDS)
                while got := connection.recv_into(buffer):
                    count += got
                connection.sendall(_TIME.pack(count))

    def close(self) -> None:
        for listener in self._sockets:
            listener.close()


def look(source: int, peers: Sequence[Peer], clock: Callable[[], float]) -> list[Path]:
    """Connections to every port of the others, and how far away they are. Bounded by CONNECT_SECONDS and ANSWER_SECONDS
    together, however many there are."""
    others = [peer for peer in peers if peer.node != source]
    jobs = [(peer, port) for peer in others for port in peer.ports]
    if not jobs:
        return []
    with ThreadPoolExecutor(min(64, len(jobs))) as pool:
        refused = dict(zip(jobs_keys(jobs), pool.map(lambda job: _try(*job), jobs), strict=True))
        paths = pool.map(lambda peer: _ping(source, peer, refused, clock), others)
        return list(paths)


def jobs_keys(jobs: Sequence[tuple[Peer, int]]) -> list[tuple[int, int]]:
    return [(peer.node, port) for peer, port in jobs]


def _try(peer: Peer, port: int) -> str:
    """Why it cannot be reached; "": it can."""
    try:
        connect(peer.address, port, CONNECT_SECONDS).close()
    except TimeoutError:
        return f"no answer within {CONNECT_SECONDS:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _ping(source: int, peer: Peer, tried: dict[tuple[int, int], str], clock: Callable[[], float]) -> Path:
    refused = {port: tried[peer.node, port] for port in peer.ports if tried[peer.node, port]}
    open_ports = [port for port in peer.ports if port not in refused]
    least, ahead = float("inf"), 0.0
    if not open_ports:
        return Path(source, peer.node, refused)
    try:
        with connect(peer.address, open_ports[-1], CONNECT_SECONDS) as connection:
            for _ in range(PINGS):
                began, at = time.perf_counter(), clock()
                connection.sendall(b"p")
                [theirs] = _TIME.unpack(take(connection, _TIME.size, time.monotonic() + ANSWER_SECONDS))
                seconds = time.perf_counter() - began
                if seconds < least:
                    least, ahead = seconds, theirs - at - seconds / 2
    except (OSError, Broken) as error:
        refused[open_ports[-1]] = str(error)
    return Path(source, peer.node, refused, 0.0 if least == float("inf") else least, ahead)


def send(source: int, peer: Peer, port: int) -> Path:
    """Bytes per second of one connection."""
    piece, count = bytes(PIECE), 0
    try:
        with connect(peer.address, port, CONNECT_SECONDS) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
            began = time.perf_counter()
            connection.settimeout(ANSWER_SECONDS)
            connection.sendall(b"d")
            while time.perf_counter() - began < SEND_SECONDS and count < MOST_BYTES:
                count += connection.send(piece)
            connection.shutdown(socket.SHUT_WR)
            [arrived] = _TIME.unpack(take(connection, _TIME.size, time.monotonic() + ANSWER_SECONDS))
            return Path(source, peer.node, rate=arrived / (time.perf_counter() - began))
    except (OSError, Broken) as error:
        return Path(source, peer.node, {port: f"{count} bytes were sent, then: {error}"})
