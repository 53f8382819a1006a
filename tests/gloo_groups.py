"""Processes, or threads of one, joined by gloo over the loopback interface, without all that surrounds it in the engine."""

from __future__ import annotations

import datetime
import socket
from collections.abc import Callable

from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]

from ep.transport.group import GlooGroup, LocalGroup, join_gloo
from ep.transport.joining import rendezvous


def gloo_group(
    store: str,
    rank: int,
    size: int,
    timeout: float,
    name: str,
    epoch: int = 0,
    stop: Callable[[], bool] | None = None,
) -> GlooGroup | LocalGroup:
    """Join `size` processes of one machine by gloo over the loopback interface; size 1 needs nobody and gives a
    LocalGroup.

    store: where they meet: the path of a file that does not exist yet (all on one machine), or "host:port", which rank
    0 serves. name and epoch: keep groups that meet in one store apart. timeout: seconds, the bound of every wait of the
    group, joining included. stop: asked while others have not come yet; True ends that. Uses neither environment
    variables nor the default process group. Raises ValueError for numbers out of range and PeerLost naming the ranks
    that did not come.
    """
    if size < 1 or not 0 <= rank < size:
        raise ValueError(f"rank is {rank} of {size}; it must be 0 to size - 1")
    if timeout <= 0:
        raise ValueError(f"timeout is {timeout}; it must be more than 0 seconds")
    if size == 1:
        return LocalGroup()
    meeting = rendezvous(lambda: _open_store(store, rank, timeout), f"{name}/{epoch}", rank, size, timeout, stop)
    return join_gloo(meeting, rank, size, timeout, name, epoch, stop=stop)


def _open_store(store: str, rank: int, timeout: float) -> Store:
    bound = datetime.timedelta(seconds=timeout)
    host, colon, port = store.rpartition(":")
    if colon and port.isdigit():
        if rank > 0:
            return TCPStore(host, int(port), timeout=bound, wait_for_workers=False)
        # Left to itself the store would listen on every interface of the machine.
        listener = socket.create_server((host, int(port)))
        return TCPStore(
            host,
            int(port),
            is_master=True,
            timeout=bound,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    opened = FileStore(store)
    opened.set_timeout(bound)
    return opened
