"""gloo's connections fail at the first try and hold at the next, through a TCPStore and sockets that are real."""

from __future__ import annotations

import contextlib
import datetime
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from rank_threads import together
from torch.distributed import TCPStore

from ep.protocol import PeerLost
from ep.transport.group import GlooGroup, join_gloo
from ep.transport.joining import LOOPBACK, TRIES

TIMEOUT = 20.0  # seconds
BOUND = datetime.timedelta(seconds=TIMEOUT)
TRY = "world/try-{}"


@pytest.fixture
def store() -> TCPStore:
    return TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)


def client(port: int) -> TCPStore:
    return TCPStore(LOOPBACK, port, timeout=BOUND, wait_for_workers=False)


def join(port: int, rank: int, size: int, address: str, stop: Callable[[], bool] | None = None) -> GlooGroup:
    return join_gloo(client(port), rank, size, TIMEOUT, "world", 0, address, stop)


@pytest.fixture
def closing() -> Iterator[int]:
    """The port of 127.0.0.1 where every connection is accepted and closed at once."""
    with socket.create_server((LOOPBACK, 0)) as listener:

        def close_all() -> None:
            with contextlib.suppress(OSError):  # the listener is shut down
                while True:
                    listener.accept()[0].close()

        thread = threading.Thread(target=close_all)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(TIMEOUT)
        assert not thread.is_alive()


def written_by_a_rank(store: TCPStore, port: int) -> bytes:
    """What gloo writes into the store for a rank 1 whose socket is at `port` of 127.0.0.1."""

    def act(rank: int) -> GlooGroup:
        return join_gloo(client(store.port), rank, 2, TIMEOUT, "elsewhere", 0)

    together(2, act)
    written: bytes = store.get("elsewhere/try-0/0/1")
    place = written.index(socket.inet_aton(LOOPBACK))  # in a sockaddr_in the port stands before it
    return written[: place - 2] + port.to_bytes(2, "big") + written[place:]


def test_a_connection_that_is_closed_while_the_ranks_join(store: TCPStore, closing: int) -> None:
    """Rank 0 connects to what is not the rank it wants; rank 1 then finds rank 0's first address deserted."""
    store.set(f"{TRY.format(0)}/0/1", written_by_a_rank(store, closing))

    def act(rank: int) -> GlooGroup:
        if rank == 1:
            store.wait([f"{TRY.format(0)}/went/0"], BOUND)
        # gloo's rank with the higher address connects; the other listens.
        return join(store.port, rank, 2, ("127.0.0.2", "127.0.0.3")[rank])

    groups = together(2, act)
    for group in groups:
        assert isinstance(group, GlooGroup), group
    pending = [group.all_gather_ints([10 + group.rank]) for group in groups if isinstance(group, GlooGroup)]
    assert [p.wait() for p in pending] == [[[10], [11]]] * 2
    assert store.get(f"{TRY.format(0)}/went/0") != b"127.0.0.2 ", "the first try went wrong"
    assert store.get(f"{TRY.format(1)}/went/0") == b"127.0.0.2 ", "the second try went well"


def test_the_tries_are_bounded_and_the_error_names_the_addresses(store: TCPStore, closing: int) -> None:
    address = written_by_a_rank(store, closing)
    for number in range(len(TRIES)):
        store.set(f"{TRY.format(number)}/0/1", address)
        store.set(f"{TRY.format(number)}/went/1", "127.0.0.9 No route to host")
    with pytest.raises(PeerLost, match="in 4 tries") as lost:
        join(store.port, 0, 2, "127.0.0.2")
    story = str(lost.value)
    assert "group 'world' (epoch 0)" in story and "rank 1 at 127.0.0.9: No route to host" in story
    assert "rank 0 at 127.0.0.2: " in story and "rank 0 at 127.0.0.2: ok" not in story


def test_a_rank_that_ends_while_the_ranks_join_is_not_waited_for(store: TCPStore) -> None:
    """gloo gives the try up after seconds; no rank waits for another one."""
    began = time.monotonic()
    with pytest.raises(PeerLost, match="rank 0 was told not to wait for them in try 1 to join group 'world'") as lost:
        join(store.port, 0, 2, LOOPBACK, stop=lambda: True)
    assert lost.value.ranks == (1,) and time.monotonic() - began < TIMEOUT
