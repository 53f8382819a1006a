"""Connections between ranks of several machines that carry few tokens (ep/backends/linked.py), beside those of gloo,
whose threads cost more than such messages take.

Every rank listens at a port of the kernel's choice on its own address and connects to those before it. Whoever connects
says which rank it is, and a number that only ranks of this group have read.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import dbo.alive as alive
from ep.protocol import PeerLost, Pending
from native.links import LinkSockets, can_run

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_HELLO = struct.Struct("<QQ")  # the listener's number, the rank that connects
_LOOK_SECONDS = 0.2  # between two questions whether to stop
_HELLO_SECONDS = 5.0
_SHOWN_SECONDS = 0.25  # a wait that is longer shows that this rank lives
_CANNOT = "none"


class Links:
    """Of one group, which closes them. For one thread; any may close them."""

    def __init__(
        self,
        rank: int,
        members: Sequence[int],
        sockets: dict[int, socket.socket],
        timeout: float,
        lost: Callable[[RuntimeError], PeerLost],
    ) -> None:
        """members: of the group, that exchange over these; sockets: by rank of the group. lost: closes the group,
        because of that."""
        self.members = members
        self.rank, self.size = members.index(rank), len(members)
        self.sockets = LinkSockets([sockets[peer].fileno() if peer in sockets else -1 for peer in members])
        self._lost = lost
        self._open = sockets
        # Not before: until then a descriptor is no other connection's.
        weakref.finalize(self, _close_all, sockets)
        self._timeout = timeout

    def wait(self, arrived: Callable[[], bool], missing: Callable[[], Iterable[int]]) -> None:
        """Return when arrived() says so, which itself waits for some milliseconds. missing: the ranks that are waited
        for. Raises PeerLost, and closes the group, when a connection breaks or the group's timeout has passed."""
        began = time.monotonic()
        shown = False
        try:
            while not arrived():
                lost, waited = self.sockets.lost, time.monotonic() - began
                if lost >= 0:
                    raise self._lost(RuntimeError(f"the connection to rank {self.members[lost]} is broken"))
                if waited > self._timeout:
                    raise self._lost(RuntimeError(f"waited {waited:.1f} s for the others' tokens"))
                if waited > _SHOWN_SECONDS:
                    shown = True
                    alive.mark()
                    alive.waits(alive.COMPUTING, began, alive.mask(self.members[peer] for peer in missing()))
        finally:
            if shown:
                alive.goes_on(alive.COMPUTING)

    def close(self) -> None:
        """The others' exchanges with this rank fail, and its own."""
        for connection in self._open.values():
            with contextlib.suppress(OSError):  # the other end has gone
                connection.shutdown(socket.SHUT_RDWR)


def _close_all(sockets: dict[int, socket.socket]) -> None:
    for connection in sockets.values():
        connection.close()


def open_links(
    store: Store,
    rank: int,
    size: int,
    gather: Callable[[Sequence[int]], Pending[list[list[int]]]],
    address: str,
    timeout: float,
    stop: Callable[[], bool] | None = None,
) -> dict[int, socket.socket] | None:
    """This rank's connections by rank; all ranks call this with the same store. None: some rank has no native kernels,
    so that all do without.

    gather: of integers of all ranks (Group.all_gather_ints); address: of this machine, where the others reach it;
    timeout: seconds; stop: asked now and then, True ends the waiting. Raises PeerLost, on all ranks, when some could
    not connect.
    """
    deadline = time.monotonic() + timeout
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as listener:
        listener.bind((address, 0))
        listener.listen(size)
        number = secrets.randbits(64)
        can = can_run(size)
        store.set(f"link/{rank}", f"{address} {listener.getsockname()[1]} {number}" if can else _CANNOT)
        gather([0]).wait()  # every rank has written
        places = [store.get(f"link/{peer}").decode() for peer in range(size)]
        if _CANNOT in places:
            return None
        sockets: dict[int, socket.socket] = {}
        reason = ""
        try:
            for peer in range(rank):
                at, port, its_number = places[peer].split()
                sockets[peer] = _connected(at, int(port), deadline, stop)
                sockets[peer].sendall(_HELLO.pack(int(its_number), rank))
            _accept(listener, sockets, number, range(rank + 1, size), deadline, stop)
        except OSError as error:
            reason = str(error)
    for connection in sockets.values():
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        went = gather([not reason]).wait()
    except BaseException:
        _close_all(sockets)
        raise
    without = [peer for peer, (connected,) in enumerate(went) if not connected]
    if without:
        _close_all(sockets)
        told = reason or "they said so"
        raise PeerLost((), f"rank {rank}: rank(s) {without} could not connect for few tokens: {told}")
    return sockets


def _connected(
    address: str, port: int, deadline: float, stop: Callable[[], bool] | None
) -> socket.socket:  # an attempt may run into a time-out on a busy machine, or be closed by the network
    while True:
        left = deadline - time.monotonic()
        try:
            return socket.create_connection((address, port), timeout=max(_LOOK_SECONDS, left))
        except OSError:
            if left <= 0 or (stop is not None and stop()):
                raise
            time.sleep(_LOOK_SECONDS)


def _accept(
    listener: socket.socket,
    sockets: dict[int, socket.socket],
    number: int,
    ranks: range,
    deadline: float,
    stop: Callable[[], bool] | None,
) -> None:
    """Until all of these ranks have connected."""
    listener.settimeout(_LOOK_SECONDS)
    while any(peer not in sockets for peer in ranks):
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            if time.monotonic() > deadline or (stop is not None and stop()):
                raise
            continue
        connection.settimeout(_HELLO_SECONDS)
        with contextlib.suppress(OSError):
            hello = connection.recv(_HELLO.size, socket.MSG_WAITALL)
            if len(hello) == _HELLO.size:
                its_number, peer = _HELLO.unpack(hello)
                if its_number == number and peer in ranks:
                    sockets[peer] = connection
                    continue
        connection.close()
