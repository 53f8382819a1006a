"""The ranks that exchange with each other: what carries bytes between them, and a small gather of integers.

Point-to-point messages, not collectives: a gloo collective goes through a worker thread on either side, which costs
more than the message itself; and a receiver may post more room than is sent, so sizes need no exchange of their own.
"""

from __future__ import annotations

import datetime
import itertools
import socket
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore, PrefixStore, ProcessGroupGloo, Store, TCPStore  # type: ignore[attr-defined]

from ep.protocol import PeerLost, Pending, Ready


class Group(Protocol):
    """Ranks 0 to size - 1; this is one of them."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_gather_ints(self, values: Sequence[int]) -> Pending[list[list[int]]]:
        """Every rank brings equally many int64 values; wait() gives those of every rank, by rank.

        Every rank calls this equally often and in the same order. Raises PeerLost (at once, or out of wait()).
        """
        ...

    def close(self) -> None:
        """Leave: exchanges of the others that need this rank fail. Calling it again does nothing."""
        ...


class LocalGroup:
    """One rank alone."""

    rank = 0
    size = 1

    def all_gather_ints(self, values: Sequence[int]) -> Ready[list[list[int]]]:
        return Ready([list(values)])

    def close(self) -> None:
        """Nothing is held."""


class Transport(Protocol):
    """The part of ProcessGroupGloo that is used (torch's stubs leave it out)."""

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work: ...

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work: ...


class Message(Pending[None], Protocol):
    """A send or a receive under way. wait() returns when its tensor may be used again, or raises PeerLost."""


class GlooGroup:
    """Processes joined by gloo over TCP.

    When an exchange fails the group is closed at once: the others, who may be waiting for this rank and not for the one
    that died, then learn of it without waiting for their timeout. So a rank that PeerLost names has closed its connection;
    it may have died, or have given up the group because of another.
    """

    def __init__(self, rank: int, size: int, transport: Transport, timeout: float) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self._transport: Transport | None = transport
        self._open: set[_Work] = set()
        self._tags = itertools.count()
        self._gather_tag = self.new_tag()
        self.peers = tuple(peer for peer in range(size) if peer != rank)

    def new_tag(self) -> int:
        """A number that keeps one stream of messages apart. Ranks must ask for theirs in the same order."""
        return next(self._tags)

    def send(self, tensor: Tensor, peer: int, tag: int) -> Message:
        """Send a contiguous CPU tensor. Messages of one tag arrive in the order sent."""
        return self._start(self._live(peer).send, tensor, peer, tag)

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Message:
        """Receive into a contiguous CPU tensor; a message may be shorter than it, its rest is then left as it was."""
        return self._start(self._live(peer).recv, tensor, peer, tag)

    def all_gather_ints(self, values: Sequence[int]) -> Pending[list[list[int]]]:
        mine = torch.tensor(values, dtype=torch.int64)
        all_GN = torch.empty(self.size, len(values), dtype=torch.int64)
        all_GN[self.rank] = mine
        messages = [self.receive(all_GN[peer], peer, self._gather_tag) for peer in self.peers]
        messages += [self.send(mine, peer, self._gather_tag) for peer in self.peers]
        return _Gather(all_GN, messages)

    def close(self) -> None:
        # Connections close when the process group and every message under way are freed.
        for message in self._open:
            message.drop()
        self._open.clear()
        self._transport = None

    def lost(self, peer: int, error: RuntimeError) -> PeerLost:
        """Close the group because of what happened in an exchange with `peer`."""
        self.close()
        reason = str(error).splitlines()[0]
        return PeerLost((peer,), f"rank {self.rank} could not exchange with rank {peer}: {reason}")

    def forget(self, message: _Work) -> None:
        """A message is over."""
        self._open.discard(message)

    def _start(
        self, start: Callable[[list[Tensor], int, int], dist.Work], tensor: Tensor, peer: int, tag: int
    ) -> _Work:
        try:
            work = _Work(self, peer, start([tensor], peer, tag), tensor)
        except RuntimeError as error:
            raise self.lost(peer, error) from error
        self._open.add(work)
        return work

    def _live(self, peer: int) -> Transport:
        if self._transport is None:
            raise PeerLost((), f"rank {self.rank} has left its group and cannot exchange with rank {peer}")
        return self._transport


class _Work:
    """One message of a GlooGroup. Holds its tensor: gloo knows only the address."""

    __slots__ = ("__weakref__", "_group", "_peer", "_tensor", "_work")

    def __init__(self, group: GlooGroup, peer: int, work: dist.Work, tensor: Tensor) -> None:
        self._group = group
        self._peer = peer
        self._work: dist.Work | None = work
        self._tensor = tensor

    def wait(self) -> None:
        if self._work is None:
            raise PeerLost((), f"rank {self._group.rank} left its group while it exchanged with rank {self._peer}")
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._group.lost(self._peer, error) from error
        self.drop()
        self._group.forget(self)

    def drop(self) -> None:
        self._work = None


class _Gather:
    __slots__ = ("_all_GN", "_messages")

    def __init__(self, all_GN: Tensor, messages: list[Message]) -> None:
        self._all_GN = all_GN
        self._messages = messages

    def wait(self) -> list[list[int]]:
        for message in self._messages:
            message.wait()
        rows: list[list[int]] = self._all_GN.tolist()
        return rows


def gloo_group(store: str, rank: int, size: int, timeout: float, name: str, epoch: int = 0) -> GlooGroup | LocalGroup:
    """Join `size` processes by gloo over the loopback interface; size 1 needs nobody and gives a LocalGroup.

    store: where they meet: the path of a file that does not exist yet (all on one machine), or "host:port", which rank 0
    serves. name and epoch: keep groups that meet in one store apart. timeout: seconds, the bound of every wait of the group,
    this one included. Uses neither environment variables nor the default process group.
    Raises ValueError for numbers out of range and PeerLost naming the ranks that did not come.
    """
    if size < 1 or not 0 <= rank < size:
        raise ValueError(f"rank is {rank} of {size}; it must be 0 to size - 1")
    if timeout <= 0:
        raise ValueError(f"timeout is {timeout}; it must be more than 0 seconds")
    if size == 1:
        return LocalGroup()
    bound = datetime.timedelta(seconds=timeout)
    try:
        meeting = PrefixStore(f"{name}/{epoch}", _open_store(store, rank, bound))
        _await_all(meeting, rank, size, timeout)
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = bound
        # Messages are carried by gloo's own loop; worker threads serve collectives, which are not used here.
        options._threads = 1
        process_group = ProcessGroupGloo(meeting, rank, size, options)
    except PeerLost:
        raise
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise PeerLost((), f"rank {rank} could not join group {name!r} (epoch {epoch}): {reason}") from error
    return GlooGroup(rank, size, cast(Transport, process_group), timeout)


def _open_store(store: str, rank: int, bound: datetime.timedelta) -> Store:
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


def _await_all(store: Store, rank: int, size: int, timeout: float) -> None:
    """Return when every rank has signed in. Raises PeerLost naming those that have not within `timeout` seconds."""
    store.set(f"here/{rank}", "")
    deadline = time.monotonic() + timeout
    for peer in range(size):
        left = datetime.timedelta(seconds=max(0.001, deadline - time.monotonic()))
        try:
            store.wait([f"here/{peer}"], left)
        except RuntimeError as error:
            absent = tuple(p for p in range(peer, size) if not store.check([f"here/{p}"]))
            raise PeerLost(absent, f"rank {rank} waited {timeout:g} s for them to start") from error


class MailboxWorld:
    """The post office of N ranks inside one process. What one rank posts waits here until another takes it."""

    def __init__(self, num_ranks: int) -> None:
        if num_ranks < 1:
            raise ValueError(f"num_ranks is {num_ranks}; it must be 1 or more")
        self.num_ranks = num_ranks
        self._mail: dict[tuple[Hashable, int, int], object] = {}

    def post(self, key: Hashable, sender: int, receiver: int, parcel: object) -> None:
        """Leave a parcel. `key` names the exchange; each is used once."""
        assert (key, sender, receiver) not in self._mail, f"rank {sender} posted {key} to rank {receiver} twice"
        self._mail[key, sender, receiver] = parcel

    def take(self, key: Hashable, receiver: int) -> list[object]:
        """The parcels of every rank to `receiver`. All must have been posted: whoever waits must have yielded first."""
        missing = [rank for rank in range(self.num_ranks) if (key, rank, receiver) not in self._mail]
        assert not missing, f"rank {receiver} waits for {key}, but rank(s) {missing} have not posted it"
        return [self._mail.pop((key, rank, receiver)) for rank in range(self.num_ranks)]

    @property
    def num_waiting(self) -> int:
        """Parcels posted and not yet taken."""
        return len(self._mail)


class MailboxGroup:
    """One rank of a MailboxWorld."""

    def __init__(self, world: MailboxWorld, rank: int) -> None:
        if not 0 <= rank < world.num_ranks:
            raise ValueError(f"rank is {rank}; it must be 0 to {world.num_ranks - 1}")
        self.world = world
        self.rank = rank
        self.size = world.num_ranks
        self._num_gathers = 0

    def all_gather_ints(self, values: Sequence[int]) -> Pending[list[list[int]]]:
        key = ("gather", self._num_gathers)
        self._num_gathers += 1
        for peer in range(self.size):
            self.world.post(key, self.rank, peer, list(values))
        return _MailboxGather(self.world, key, self.rank)

    def close(self) -> None:
        """Nothing is held."""


class _MailboxGather:
    __slots__ = ("_key", "_rank", "_world")

    def __init__(self, world: MailboxWorld, key: Hashable, rank: int) -> None:
        self._world = world
        self._key = key
        self._rank = rank

    def wait(self) -> list[list[int]]:
        return [list(values) for values in cast(list[list[int]], self._world.take(self._key, self._rank))]
