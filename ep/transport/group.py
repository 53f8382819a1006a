"""The ranks that exchange with each other: what carries bytes between them, and a small gather of integers.

Small messages are gloo's all-to-all. Its point-to-point messages save a thread switch where every rank has a core to
itself, but on shared cores they were measured 10 to 40 times slower (4 ms, a scheduler's time slice, against 0.1 to 0.4
ms). Over a network it is the other way round for large ones: in an all-to-all a rank sends first and asks afterwards,
behind its own data, for what it is to receive, so that a link carries one direction after the other (1 MiB at 533
Mbit/s in both directions: 28 ms; with the receives posted first: 16.5 ms, as fast as the link).
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

import dbo.alive as alive
from ep.protocol import PeerLost, Pending, Ready
from ep.transport.joining import LOOPBACK, connect
from ep.transport.links import Links
from ep.transport.shm_group import ShmGroup

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

LARGE_BYTES = 1 << 18  # of the longest message of an exchange (GlooGroup.all_to_all)
_MAX_TAG = 1 << 30
_NAP_SECONDS = 0.25  # of a wait: then the waiter shows that it lives


class Group(Protocol):
    """Ranks 0 to size - 1; this is one of them. After a loss the survivors make a new group, numbered without gaps in
    the order of their old numbers."""

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

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int]
    ) -> dist.Work: ...

    def send(self, tensors: list[Tensor], to: int, tag: int) -> dist.Work: ...

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work: ...


class GlooGroup:
    """Processes joined by gloo over TCP.

    One thread at a time exchanges; any may close the group. When an exchange fails the group is closed at once: the
    others, who may be waiting for this rank and not for the one that died, then learn of it without waiting for their
    timeout. gloo does not say which rank was lost.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        transport: Transport,
        over_network: bool = False,
        track: int = alive.COMPUTING,
    ) -> None:
        """track: where its waits are shown (dbo/alive.py)."""
        self.rank = rank
        self.track = track
        self.size = size
        self.over_network = over_network  # ranks are on several machines
        # Told before each exchange whether what carries it is to leave the core to the thread that computes.
        self.background: Callable[[bool], None] | None = None
        self.links: Links | None = None  # connections for few tokens (ep/transport/links.py)
        # Where every machine has as many ranks: those of this one; links are then to one rank of each other machine.
        self.machine: ShmGroup | None = None
        self._tag = 0  # of the last exchange with receives posted first
        self._transport: Transport | None = transport
        self._open: set[_Exchange] = set()
        # Threads start when they are first given something to do.
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="waiter")

    def all_to_all(
        self, out: Tensor, rows: Tensor, room: Sequence[int], sent: Sequence[int], large: bool = False
    ) -> Pending[None]:
        """Send rows[: sent[0]] to rank 0, the next sent[1] rows to rank 1 and so on; wait() returns when `out` is
        filled.

        out, rows: contiguous CPU tensors of equal row size and dtype; sent[this rank] and room[this rank] are 0. room:
        for each rank, how many rows of `out` are meant for it, one rank after another. A rank may send fewer: the rest
        of its room is then left as it was (gloo stops at the end of a message). It must not send more. large: a hint,
        equal on all ranks, that messages are long. Every rank of the group calls this equally often and in the same
        order.
        """
        assert sent[self.rank] == room[self.rank] == 0, "what stays here is not sent"
        transport = self._transport  # another thread may close the group meanwhile
        if transport is None:
            raise PeerLost((), f"rank {self.rank} has left its group")
        if self.background is not None:
            self.background(large)
        try:
            if large and self.over_network:
                works, waiter = self._post(transport, out, rows, room, sent), self._waiter
            else:
                waiter = None
                works = [transport.alltoall_base(out, rows, list(room), list(sent))]
        except RuntimeError as error:
            raise self.lost(error) from error
        exchange = _Exchange(self, works, waiter, out, rows)
        self._open.add(exchange)
        return exchange

    def _post(
        self, transport: Transport, out: Tensor, rows: Tensor, room: Sequence[int], sent: Sequence[int]
    ) -> list[dist.Work]:
        """One message for each pair of ranks, every receive before every send."""
        self._tag = tag = self._tag % _MAX_TAG + 1
        coming, going = torch.split(out, list(room)), torch.split(rows, list(sent))
        works = [transport.recv([piece], peer, tag) for peer, piece in enumerate(coming) if piece.shape[0]]
        return works + [transport.send([piece], peer, tag) for peer, piece in enumerate(going) if piece.shape[0]]

    def all_gather_ints(self, values: Sequence[int]) -> Pending[list[list[int]]]:
        mine_N = torch.tensor(values, dtype=torch.int64)
        all_GN = torch.empty(self.size - 1, len(values), dtype=torch.int64)
        ones = [1] * self.size
        ones[self.rank] = 0
        return _Gather(
            self.all_to_all(all_GN, mine_N.expand(self.size - 1, -1).contiguous(), ones, ones),
            all_GN,
            self.rank,
            list(values),
        )

    def close(self) -> None:
        """Leave. With exchanges under way whose peers are alive but silent it may take until their timeout."""
        # Connections close when the process group and every exchange under way are freed.
        for exchange in tuple(self._open):
            exchange.drop()
        self._open.clear()
        self._transport = None
        if self.links is not None:
            self.links.close()
        if self.machine is not None:
            self.machine.close()
        self._waiter.shutdown(wait=False)

    def lost(self, error: RuntimeError) -> PeerLost:
        """Close the group because of an exchange that failed."""
        self.close()
        return PeerLost((), f"rank {self.rank}: {str(error).splitlines()[0]}")

    def forget(self, exchange: _Exchange) -> None:
        """An exchange is over."""
        self._open.discard(exchange)


def _finish(work: dist.Work, track: int) -> None:
    nap = datetime.timedelta(seconds=_NAP_SECONDS)
    since = 0.0
    try:
        while True:
            try:
                work.wait(nap)
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # what it has come to
                    return
                since = since or time.monotonic() - _NAP_SECONDS
                _show(track, since)
    finally:
        if since:
            alive.goes_on(track)


def _show(track: int, since: float) -> None:
    """This rank waits, and lives. gloo does not say for whom."""
    alive.mark()
    alive.waits(track, since, 0)


def _finish_all(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


class _Exchange:
    """Holds its tensors: gloo knows only their addresses. waiter: waits for what cannot be waited for in naps (a
    receive that is broken off takes its connection with it)."""

    __slots__ = ("_group", "_tensors", "_waiter", "_works")

    def __init__(
        self, group: GlooGroup, works: list[dist.Work], waiter: ThreadPoolExecutor | None, *tensors: Tensor
    ) -> None:
        self._group = group
        self._waiter = waiter
        self._works: list[dist.Work] | None = works
        self._tensors = tensors

    def wait(self) -> None:
        works = self._works
        if works is None:
            raise PeerLost((), f"rank {self._group.rank} left its group during an exchange")
        try:
            self._finish(works)
        except RuntimeError as error:
            raise self._group.lost(error) from error
        self._works = None
        self._group.forget(self)

    def drop(self) -> None:
        self._works = None

    def _finish(self, works: Sequence[dist.Work]) -> None:
        """Wait, and show meanwhile that this rank lives. Raises RuntimeError, within gloo's timeout."""
        track = self._group.track
        if self._waiter is None:
            for work in works:
                _finish(work, track)
            return
        done = self._waiter.submit(_finish_all, works)
        since = 0.0
        while not wait_for([done], _NAP_SECONDS).done:
            since = since or time.monotonic() - _NAP_SECONDS
            _show(track, since)
        if since:
            alive.goes_on(track)
        done.result()


class _Gather:
    __slots__ = ("_all_GN", "_exchange", "_mine", "_rank")

    def __init__(self, exchange: Pending[None], all_GN: Tensor, rank: int, mine: list[int]) -> None:
        self._exchange = exchange
        self._all_GN = all_GN
        self._rank = rank
        self._mine = mine

    def wait(self) -> list[list[int]]:
        self._exchange.wait()
        rows: list[list[int]] = self._all_GN.tolist()
        rows.insert(self._rank, self._mine)
        return rows


def join_gloo(
    store: Store,
    rank: int,
    size: int,
    timeout: float,
    name: str,
    epoch: int,
    address: str = LOOPBACK,
    stop: Callable[[], bool] | None = None,
) -> GlooGroup:
    """As ep.transport.joining.connect. All ranks are about to call this with the same store, where `name` is used
    once."""
    what = f"group {name!r} (epoch {epoch})"
    # Exchanges under way at once: one per lane of overlap, and parcels beside them.
    store = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
    mesh = connect(store, rank, size, timeout, what, threads=4, address=address, stop=stop)
    track = alive.AGREEING if name == alive.AGREEMENT else alive.COMPUTING
    return GlooGroup(rank, size, cast(Transport, mesh), over_network=address != LOOPBACK, track=track)


class MailboxWorld:
    """The post office of N ranks inside one process. What one rank posts waits here until another takes it."""

    def __init__(self, num_ranks: int) -> None:
        if num_ranks < 1:
            raise ValueError(f"num_ranks is {num_ranks}; it must be 1 or more")
        self.num_ranks = num_ranks
        self._mail: dict[tuple[Hashable, int, int], object] = {}
        self._gone: set[int] = set()

    def post(self, key: Hashable, sender: int, receiver: int, parcel: object) -> None:
        """Leave a parcel. `key` names the exchange; each is used once."""
        assert (key, sender, receiver) not in self._mail, f"rank {sender} posted {key} to rank {receiver} twice"
        self._mail[key, sender, receiver] = parcel

    def take(self, key: Hashable, receiver: int) -> list[object]:
        """The parcels of every rank to `receiver`. All must have been posted: a rank that waits must have yielded
        first. Raises PeerLost when one is missing whose sender has left."""
        missing = [rank for rank in range(self.num_ranks) if (key, rank, receiver) not in self._mail]
        if not self._gone.isdisjoint(missing):
            raise PeerLost(tuple(self._gone.intersection(missing)), f"rank {receiver} waits for {key}")
        assert not missing, f"rank {receiver} waits for {key}, but rank(s) {missing} have not posted it"
        return [self._mail.pop((key, rank, receiver)) for rank in range(self.num_ranks)]

    def leave(self, rank: int) -> None:
        """This rank posts nothing any more. What it has posted can still be taken."""
        self._gone.add(rank)

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
        self.world.leave(self.rank)


class _MailboxGather:
    __slots__ = ("_key", "_rank", "_world")

    def __init__(self, world: MailboxWorld, key: Hashable, rank: int) -> None:
        self._world = world
        self._key = key
        self._rank = rank

    def wait(self) -> list[list[int]]:
        return [list(values) for values in cast(list[list[int]], self._world.take(self._key, self._rank))]
