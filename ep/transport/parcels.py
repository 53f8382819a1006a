"""Bytes from any rank to any rank, in lockstep: what carries loads, placements and experts' weights beside the tokens.

Legend: G ranks of the group.

One exchange at a time: it is begun before a step's forward pass and waited for after it, so that a transport which
works by itself (gloo, NCCL) hides the flight behind the pass. A rank knows how much everybody sends to everybody, so
nothing but the bytes travels. What a rank sends to itself does not go this way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ep.protocol import Pending, Ready
from ep.transport.group import LARGE_BYTES, GlooGroup, MailboxWorld
from ep.transport.heap import Signals, SymmetricHeap

Ints = npt.NDArray[np.int64]


class Parcels(Protocol):
    """Every rank calls `send` equally often, with equal sizes, and waits and releases before it sends again."""

    def send(self, sizes_GG: Ints, parcels: Mapping[int, Sequence[Tensor]]) -> Pending[list[Tensor]]:
        """sizes_GG: bytes from each rank (row) to each rank (column), 0 on the diagonal.

        parcels: for each peer contiguous uint8 tensors [n], one after another; not to be changed before the wait.
        wait() gives what each rank has sent, uint8 [sizes_GG[rank, this rank]], valid until `release`. Raises PeerLost.
        """
        ...

    def release(self) -> None:
        """What has arrived has been read."""
        ...


class LocalParcels:
    """One rank alone."""

    def send(self, sizes_GG: Ints, parcels: Mapping[int, Sequence[Tensor]]) -> Ready[list[Tensor]]:
        assert not parcels, "there is no rank to send to"
        return Ready([torch.empty(0, dtype=torch.uint8)])

    def release(self) -> None:
        """Nothing is held."""


class MailboxParcels:
    """Ranks inside one thread; a rank that waits has yielded since it sent."""

    def __init__(self, world: MailboxWorld, rank: int) -> None:
        self._world = world
        self._rank = rank
        self._number = 0

    def send(self, sizes_GG: Ints, parcels: Mapping[int, Sequence[Tensor]]) -> Pending[list[Tensor]]:
        key = ("parcels", self._number)
        self._number += 1
        for peer in range(self._world.num_ranks):
            pieces = parcels.get(peer, ())
            # Counts lie on the host, and weights may lie on a device.
            whole = torch.cat([piece.cpu() for piece in pieces]) if pieces else torch.empty(0, dtype=torch.uint8)
            assert whole.numel() == sizes_GG[self._rank, peer], f"{whole.numel()} bytes for rank {peer}"
            self._world.post(key, self._rank, peer, whole)
        return _Mail(self._world, key, self._rank)

    def release(self) -> None:
        """Nothing is held."""


class _Mail:
    def __init__(self, world: MailboxWorld, key: tuple[str, int], rank: int) -> None:
        self._world, self._key, self._rank = world, key, rank

    def wait(self) -> list[Tensor]:
        return cast(list[Tensor], self._world.take(self._key, self._rank))


class CollectiveParcels:
    """One all-to-all per exchange; any group that has GlooGroup's `all_to_all` serves."""

    def __init__(self, group: GlooGroup) -> None:
        self._group = group

    def send(self, sizes_GG: Ints, parcels: Mapping[int, Sequence[Tensor]]) -> Pending[list[Tensor]]:
        rank, size = self._group.rank, self._group.size
        pieces = [piece.cpu() for peer in range(size) for piece in parcels.get(peer, ())]  # gloo carries the host's
        rows = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)
        going: list[int] = sizes_GG[rank].tolist()
        coming: list[int] = sizes_GG[:, rank].tolist()
        assert rows.numel() == sum(going), f"{rows.numel()} bytes given, {sum(going)} announced"
        out = torch.empty(sum(coming), dtype=torch.uint8)
        large = int(sizes_GG.max()) >= LARGE_BYTES
        return _Collected(self._group.all_to_all(out, rows, coming, going, large), out, coming)

    def release(self) -> None:
        """Nothing is held."""


class _Collected:
    def __init__(self, exchange: Pending[None], out: Tensor, coming: list[int]) -> None:
        self._exchange, self._out, self._coming = exchange, out, coming

    def wait(self) -> list[Tensor]:
        self._exchange.wait()
        return list(torch.split(self._out, self._coming))


class ShmParcels:
    """Every rank keeps one room, where those that send to it put their parcels one after another.

    A room is not written before its owner has released what was put there last: the sender waits for its word
    about the time before, which came long ago.
    """

    def __init__(self, heap: SymmetricHeap, signals: Signals, room_bytes: int) -> None:
        """room_bytes: what one rank receives at most per exchange, equal on all ranks."""
        self._rank = heap.rank
        self._size = heap.size
        self._signals = signals
        offset = heap.reserve(room_bytes)
        self._rooms = [heap.window(rank, offset, room_bytes) for rank in range(heap.size)]
        self._put_word, self._free_word = signals.reserve(), signals.reserve()
        self._number = 0
        self._filled = [0] * heap.size  # the number of the exchange in which something was put there last
        self._holds = False  # something lies here

    def send(self, sizes_GG: Ints, parcels: Mapping[int, Sequence[Tensor]]) -> Pending[list[Tensor]]:
        self._number += 1
        for peer, pieces in parcels.items():
            at = int(sizes_GG[: self._rank, peer].sum())
            end = at + int(sizes_GG[self._rank, peer])
            assert end <= self._rooms[peer].numel(), f"the room of rank {peer} is too small"
            if at == end:
                continue
            if self._filled[peer]:
                self._signals.wait(self._free_word, [peer], self._filled[peer])
            for piece in pieces:
                self._rooms[peer][at : at + piece.numel()].copy_(piece)
                at += piece.numel()
            assert at == end, f"{end - at} bytes too few for rank {peer}"
            self._signals.send(peer, self._put_word, self._number)
        for peer in np.flatnonzero(sizes_GG.any(0)).tolist():
            self._filled[peer] = self._number
        return _Put(self, sizes_GG[:, self._rank])

    def arrive(self, sizes_G: Ints) -> list[Tensor]:
        """The second half of `send`."""
        senders = [peer for peer in range(self._size) if sizes_G[peer]]
        self._holds = bool(senders)
        self._signals.wait(self._put_word, senders, self._number)
        return list(torch.split(self._rooms[self._rank][: int(sizes_G.sum())], sizes_G.tolist()))

    def release(self) -> None:
        if self._holds:  # the next senders may be others than the last
            for peer in range(self._size):
                if peer != self._rank:
                    self._signals.send(peer, self._free_word, self._number)
        self._holds = False


class _Put:
    def __init__(self, parcels: ShmParcels, sizes_G: Ints) -> None:
        self._parcels, self._sizes_G = parcels, sizes_G

    def wait(self) -> list[Tensor]:
        return self._parcels.arrive(self._sizes_G)
