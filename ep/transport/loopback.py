"""Stores where the ranks of one machine exchange the addresses of a new group: in the memory of rank 0, over the
loopback interface. A file would need room on a disk for every epoch."""

from __future__ import annotations

import datetime
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.distributed as dist

from ep.protocol import PeerLost
from ep.transport.group import Group
from ep.transport.joining import LOOPBACK

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

_CONNECT_SECONDS = 2.0  # a rank that lives answers at once; the store's own client would go on trying


def serve_store(timeout: float) -> TCPStore:
    """Rank 0's, at `port`. timeout: seconds, of every wait for a key."""
    # Left to itself the store would listen on every interface of the machine.
    listener = socket.create_server((LOOPBACK, 0))
    return dist.TCPStore(  # type: ignore[attr-defined]
        LOOPBACK,
        listener.getsockname()[1],
        is_master=True,
        timeout=datetime.timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def join_store(port: int, timeout: float) -> Store:
    """Another rank's. Raises PeerLost naming rank 0 when it has gone again."""
    try:
        socket.create_connection((LOOPBACK, port), _CONNECT_SECONDS).close()
        longest = datetime.timedelta(seconds=timeout)
        return dist.TCPStore(LOOPBACK, port, timeout=longest, wait_for_workers=False)  # type: ignore[attr-defined]
    except (OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise PeerLost((0,), f"the store of rank 0 at port {port} is gone: {reason}") from error


def store_of(group: Group, name: str, timeout: float) -> Callable[[], Store]:
    """A store for the ranks of `group`, made at once. Every rank calls this in the same order. Raises PeerLost."""
    served = serve_store(timeout) if group.rank == 0 else None
    [port] = group.all_gather_ints([0 if served is None else served.port]).wait()[0]
    store = join_store(port, timeout) if served is None else served
    return lambda: dist.PrefixStore(name, store)  # type: ignore[attr-defined]
