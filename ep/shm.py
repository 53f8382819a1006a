"""Expert parallelism by put and signal on a symmetric heap (ep/heap.py).

Legend: T tokens of this rank, D hidden size, K experts per token, G ranks, S slots of a rank, N rows that arrived from all ranks
(own ones included), R rows for the local experts (one per token and local expert), P those pairs in the order of tokens.

A rank puts its tokens, with the slots and weights of all their experts, into a room that every other rank keeps for it, then
signals how many they are. It puts the same into its own room, so that all that arrived lies in one piece of memory. The rank
that computes weights and sums what its experts made of a token and puts one row back; the sender adds up the ranks' rows in
float32.

A room is not written before its reader is done: a rank dispatches again on a lane only when it has everybody's results of
the time before, and they put those only after they had read what it sent; and it puts results only when it has the tokens
of that time, which were sent after the results of the time before had been read. So one room per sender and direction does.
What is longer than a room goes in chunks, each when the reader says that the room is free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ep.heap import Signals, SymmetricHeap
from ep.protocol import Arrived, Routing
from moe_kernels import Bags, ExpertBatch, Layout, sum_rows

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Fields = tuple[Tensor, Ints, Floats]  # x [n, D], slot [n, K], weight [n, K]

_ROOM_ROWS = 2048  # a rank's tokens of one step, usually
_ROOM_BYTES = 1 << 25  # and no more than this; a multiple of 64 rows
_TOP_K = 16  # what a room of that many rows has place for; with more choices it holds fewer rows
_SLOT_BYTES, _WEIGHT_BYTES = 8, 4
_SMALL_BYTES = 1 << 16  # copied without leaving the interpreter
_NUM_VIEWS = 1024  # kept ready per room
_IDLE, _SENT, _ARRIVED, _RETURNED = range(4)


@dataclass(frozen=True, slots=True)
class _Ticket:
    bags: Bags  # from the experts' rows to the N rows that arrived
    counts: list[int]  # of those from each rank
    sent: _Sent


@dataclass(frozen=True, slots=True)
class _Sent:
    """What a dispatch sends. token: for each rank the tokens that go to it; None: all go to every rank."""

    x_TD: Tensor
    slot_TK: Ints
    weight_TK: Floats
    token: list[Ints] | None
    counts: list[int]  # rows to each rank

    def rows(self, peer: int, start: int, stop: int) -> Fields:
        if self.token is None:
            return self.x_TD[start:stop], self.slot_TK[start:stop], self.weight_TK[start:stop]
        token = self.token[peer][start:stop]
        return self.x_TD.index_select(0, torch.from_numpy(token)), self.slot_TK[token], self.weight_TK[token]


class ShmAllToAll:
    """One lane. Every rank of the heap makes its lanes, and uses them, in the same order.

    A lane's next dispatch is made after the last combine has been waited for; lanes are independent of each other.
    """

    def __init__(
        self,
        heap: SymmetricHeap,
        signals: Signals,
        num_slots: int,
        hidden_size: int,
        dtype: torch.dtype,
        layout: Layout = Layout.RAGGED,
        room_rows: int | None = None,
    ) -> None:
        """num_slots: of each rank, less than 32768; room_rows: rows of a room (a multiple of 64); None: as many as a large step has."""
        assert num_slots < 1 << 15, "slots are sorted as 16-bit numbers"
        self.layout = layout
        self._rank = heap.rank
        self._size = heap.size
        self._peers = [peer for peer in range(heap.size) if peer != heap.rank]
        self._num_slots = num_slots
        self._signals = signals
        row_bytes = hidden_size * dtype.itemsize
        self._row_bytes = row_bytes
        if room_rows is None:
            fields = _TOP_K * (_SLOT_BYTES + _WEIGHT_BYTES)  # beside a row
            room_rows = max(
                64, min(_ROOM_ROWS * -(-(row_bytes + fields) // row_bytes), _ROOM_BYTES // row_bytes) // 64 * 64
            )
        self._room_rows = room_rows
        room_bytes = room_rows * row_bytes
        here, there = heap.reserve(heap.size * room_bytes), heap.reserve(heap.size * room_bytes)
        own, at = heap.rank, heap.rank * room_bytes

        # Rooms to read from, by sender, and to write to, by receiver.
        def room(rank: int, offset: int) -> _Room:
            return _Room(heap.window(rank, offset, room_bytes), hidden_size, dtype)

        self._arriving = [room(own, here + peer * room_bytes) for peer in range(heap.size)]
        self._leaving = [room(peer, here + at) for peer in range(heap.size)]
        self._coming = [room(own, there + peer * room_bytes) for peer in range(heap.size)]
        self._going = [room(peer, there + at) for peer in range(heap.size)]
        self._all_ND = heap.window(own, here, heap.size * room_bytes).view(dtype).view(-1, hidden_size)
        self._chunks = _Chunks(signals, self._peers, heap.size)
        self._dispatch_word, self._combine_word = signals.reserve(), signals.reserve()
        self._number = 0
        self._stage = _IDLE
        self._places: dict[tuple[int, ...], Ints] = {}

    def capacity(self, top_k: int) -> int:
        """Rows that a room holds."""
        return (self._room_rows * self._row_bytes - 8) // (self._row_bytes + top_k * (_SLOT_BYTES + _WEIGHT_BYTES))

    def dispatch(self, x_TD: Tensor, routing: Routing) -> _Dispatch:
        """x_TD and the routing must not change until it has been waited for."""
        assert self._stage == _IDLE, "the lane's last exchange is not over"
        self._stage = _SENT
        self._number += 1
        slot_TK: Ints = routing.slot_TK.numpy()
        num_tokens, top_k = slot_TK.shape
        token = self._choose(num_tokens, slot_TK)
        counts = [num_tokens] * self._size if token is None else [rows.shape[0] for rows in token]
        sent = _Sent(x_TD, slot_TK, routing.weight_TK.numpy(), token, counts)
        capacity = self.capacity(top_k)
        if num_tokens <= capacity:
            self._arriving[self._rank].fill((x_TD, sent.slot_TK, sent.weight_TK))
        for peer in self._peers:
            if token is None and num_tokens <= capacity:
                self._leaving[peer].copy(self._arriving[self._rank], num_tokens, top_k)
            else:
                self._leaving[peer].fill(sent.rows(peer, 0, min(counts[peer], capacity)))
            self._signals.send(peer, self._dispatch_word, self._number, counts[peer])
        return _Dispatch(self, sent)

    def arrive(self, sent: _Sent) -> Arrived:
        """The second half of a dispatch."""
        assert self._stage == _SENT
        self._stage = _ARRIVED
        counts = self._signals.wait(self._dispatch_word, self._peers, self._number)
        counts.insert(self._rank, sent.x_TD.shape[0])
        top_k = sent.slot_TK.shape[1]
        capacity = self.capacity(top_k)
        if max(counts) <= capacity:
            fields = [room.views(count, top_k) for room, count in zip(self._arriving, counts, strict=True)]
            x_ND, place_N = self._all_ND, self._places_of(counts)
        else:
            fields = self._receive_chunks(sent, counts, capacity)
            x_ND, place_N = torch.cat([field[0] for field in fields]), np.arange(sum(counts))
        slot_NK = np.concatenate([field[1] for field in fields])
        weight_NK = np.concatenate([field[2] for field in fields])
        key_N = slot_NK.ravel() - self._rank * self._num_slots
        pair_P = np.flatnonzero(key_N.view(np.uint64) < self._num_slots)  # as unsigned, what is below is above too
        key_P: npt.NDArray[np.int16] = key_N[pair_P].astype(np.int16)  # short keys sort in one pass
        order_R = key_P.argsort(kind="stable")
        rows_S = np.bincount(key_P, minlength=self._num_slots)
        x_RD = x_ND.index_select(0, torch.from_numpy(place_N[pair_P[order_R] // top_k]))
        row_R, x = self._lay_out(x_RD, key_P[order_R], rows_S)
        row_P = np.empty_like(order_R)
        row_P[order_R] = row_R
        starts_N = np.searchsorted(pair_P, np.arange(0, slot_NK.size, top_k))
        bags = Bags(torch.from_numpy(row_P), torch.from_numpy(weight_NK.ravel()[pair_P]), torch.from_numpy(starts_N))
        batch = ExpertBatch(self.layout, x, torch.from_numpy(rows_S.astype(np.int32)))
        return Arrived(batch, _Ticket(bags, counts, sent))

    def combine(self, y: Tensor, ticket: object, out_TD: Tensor) -> _Combine:
        assert isinstance(ticket, _Ticket) and self._stage == _ARRIVED
        self._stage = _RETURNED
        sum_ND = sum_rows(y.view(-1, y.shape[-1]), ticket.bags)
        sums = list(torch.split(sum_ND, ticket.counts))
        capacity = self.capacity(ticket.sent.slot_TK.shape[1])
        for peer in self._peers:
            part = sums[peer] if ticket.counts[peer] <= capacity else sums[peer][:capacity]
            self._going[peer].rows(part.shape[0]).copy_(part)
            self._signals.send(peer, self._combine_word, self._number)
        return _Combine(self, sums, ticket, out_TD)

    def gather(self, sums: list[Tensor], ticket: _Ticket, out_TD: Tensor) -> Tensor:
        """The second half of a combine."""
        assert self._stage == _RETURNED
        self._signals.wait(self._combine_word, self._peers, self._number)
        sent, sum_TD = ticket.sent, sums[self._rank]
        capacity = self.capacity(sent.slot_TK.shape[1])

        def take(peer: int, start: int, stop: int) -> None:
            back = self._coming[peer].rows(stop - start)
            if sent.token is None:
                sum_TD[start:stop].add_(back)
            else:
                sum_TD.index_add_(0, torch.from_numpy(sent.token[peer][start:stop]), back.float())

        def put(peer: int, start: int, stop: int) -> None:
            self._going[peer].rows(stop - start).copy_(sums[peer][start:stop])

        first = self._chunks.pass_on(sent.counts, ticket.counts, capacity, take, put)
        for peer in self._peers:
            take(peer, first[peer], sent.counts[peer])
        self._stage = _IDLE
        return out_TD.copy_(sum_TD)

    def close(self) -> None:
        """Nothing is held; the group is closed by whoever opened it."""

    def _choose(self, num_tokens: int, slot_TK: Ints) -> list[Ints] | None:
        """For each rank the tokens that go there; None: all, which costs nothing to find out.

        Nearly every token has an expert on every one of a few ranks. The others travel for nothing, and their sums are
        zero; they are picked out only where that saves a fifth of much.
        """
        saved = (1 - 1 / self._size) ** slot_TK.shape[1]
        if saved < 0.2 or num_tokens * self._row_bytes < _SMALL_BYTES:
            return None
        goes_TG = np.zeros((num_tokens, self._size), dtype=np.bool_)
        goes_TG[np.arange(num_tokens)[:, None], slot_TK // self._num_slots] = True
        return [np.flatnonzero(goes_TG[:, rank]) for rank in range(self._size)]

    def _lay_out(self, x_RD: Tensor, slot_R: npt.NDArray[np.int16], rows_S: Ints) -> tuple[Ints, Tensor]:
        """Where each row lies among the experts' rows (flat), and those rows in this lane's layout."""
        row_R = np.arange(slot_R.shape[0])
        if self.layout is Layout.RAGGED:
            return row_R, x_RD
        num_rows = int(rows_S.max())
        start_S: Ints = np.cumsum(rows_S, dtype=np.int64) - rows_S
        row_R += (np.arange(self._num_slots) * num_rows - start_S)[slot_R]
        # NaN shows at once whoever reads past a slot's rows.
        x = x_RD.new_full((self._num_slots * num_rows, x_RD.shape[1]), float("nan"))
        x[torch.from_numpy(row_R)] = x_RD
        return row_R, x.view(self._num_slots, num_rows, x_RD.shape[1])

    def _places_of(self, counts: list[int]) -> Ints:
        """Where in memory the N rows lie, in rows."""
        key = tuple(counts)
        if key not in self._places:
            if len(self._places) >= _NUM_VIEWS:
                self._places.clear()
            rooms = [np.arange(count) + rank * self._room_rows for rank, count in enumerate(counts)]
            self._places[key] = np.concatenate(rooms)
        return self._places[key]

    def _receive_chunks(self, sent: _Sent, counts: list[int], capacity: int) -> list[Fields]:
        top_k = sent.slot_TK.shape[1]
        pieces: list[list[Fields]] = [[] for _ in counts]

        def take(peer: int, start: int, stop: int) -> None:
            x, slot, weight = self._arriving[peer].views(stop - start, top_k)
            pieces[peer].append((x.clone(), slot.copy(), weight.copy()))

        def put(peer: int, start: int, stop: int) -> None:
            self._leaving[peer].fill(sent.rows(peer, start, stop))

        first = self._chunks.pass_on(counts, sent.counts, capacity, take, put)
        for peer in self._peers:
            pieces[peer].append(self._arriving[peer].views(counts[peer] - first[peer], top_k))
        pieces[self._rank].append((sent.x_TD, sent.slot_TK, sent.weight_TK))
        return [
            (
                torch.cat([piece[0] for piece in of_rank]),
                np.concatenate([piece[1] for piece in of_rank]),
                np.concatenate([piece[2] for piece in of_rank]),
            )
            for of_rank in pieces
        ]


class _Room:
    """Memory for rows of one sender: the hidden states, then the slots, then the weights."""

    def __init__(self, window: Tensor, hidden_size: int, dtype: torch.dtype) -> None:
        self._bytes = window
        self._memory: npt.NDArray[np.uint8] = window.numpy()
        self._dtype = dtype
        self._hidden_size = hidden_size
        self._row_bytes = hidden_size * dtype.itemsize
        self._views: dict[tuple[int, int], Fields] = {}
        self._rows: dict[int, Tensor] = {}

    def views(self, count: int, top_k: int) -> Fields:
        """The fields of `count` rows."""
        ready = self._views.get((count, top_k))
        if ready is None:
            slots, weights, end = self._sections(count, top_k)
            ready = (
                self.rows(count),
                self._memory[slots:weights].view(np.int64).reshape(count, top_k),
                self._memory[weights:end].view(np.float32).reshape(count, top_k),
            )
            if len(self._views) >= _NUM_VIEWS:
                self._views.clear()
            self._views[count, top_k] = ready
        return ready

    def rows(self, count: int) -> Tensor:
        """The hidden states of `count` rows."""
        ready = self._rows.get(count)
        if ready is None:
            ready = self._bytes[: count * self._row_bytes].view(self._dtype).view(count, self._hidden_size)
            if len(self._rows) >= _NUM_VIEWS:
                self._rows.clear()
            self._rows[count] = ready
        return ready

    def fill(self, fields: Fields) -> None:
        x, slot, weight = self.views(*fields[1].shape)
        x.copy_(fields[0])
        slot[:] = fields[1]
        weight[:] = fields[2]

    def copy(self, other: _Room, count: int, top_k: int) -> None:
        """The same `count` rows as another room has."""
        end = self._sections(count, top_k)[2]
        if end <= _SMALL_BYTES:
            self._memory[:end] = other._memory[:end]
        else:
            self._bytes[:end].copy_(other._bytes[:end])

    def _sections(self, count: int, top_k: int) -> tuple[int, int, int]:
        """Where the slots begin, where the weights begin, and where they end."""
        slots = -(-count * self._row_bytes // _SLOT_BYTES) * _SLOT_BYTES
        weights = slots + count * top_k * _SLOT_BYTES
        return slots, weights, weights + count * top_k * _WEIGHT_BYTES


class _Chunks:
    """What is longer than a room, after its first chunk."""

    def __init__(self, signals: Signals, peers: Sequence[int], size: int) -> None:
        self._signals = signals
        self._peers = peers
        self._full_word, self._free_word = signals.reserve(), signals.reserve()
        # Chunks so far: put at each rank, and taken from each rank.
        self._put = [0] * size
        self._taken = [0] * size

    def pass_on(
        self,
        coming: Sequence[int],
        going: Sequence[int],
        capacity: int,
        take: Callable[[int, int, int], None],
        put: Callable[[int, int, int], None],
    ) -> list[int]:
        """Take every chunk but the last from each peer, and put every chunk but the first at each peer.

        coming, going: rows from and to each rank; take, put: called with rank, first row, row past the last.
        Returns for each rank the first row of its last chunk, which is still in its room.
        """
        start = 0
        while True:
            stop = start + capacity
            senders = [peer for peer in self._peers if coming[peer] > stop]
            receivers = [peer for peer in self._peers if going[peer] > stop]
            if not senders and not receivers:
                return [max(0, count - 1) // capacity * capacity for count in coming]
            for peer in senders:
                take(peer, start, stop)
                self._taken[peer] += 1
                self._signals.send(peer, self._free_word, self._taken[peer])
            for peer in receivers:
                self._put[peer] += 1
                self._signals.wait(self._free_word, [peer], self._put[peer])
                put(peer, stop, min(stop + capacity, going[peer]))
                self._signals.send(peer, self._full_word, self._put[peer])
            for peer in senders:
                self._signals.wait(self._full_word, [peer], self._taken[peer])
            start = stop


@dataclass(frozen=True, slots=True)
class _Dispatch:
    lane: ShmAllToAll
    sent: _Sent

    def wait(self) -> Arrived:
        return self.lane.arrive(self.sent)


@dataclass(frozen=True, slots=True)
class _Combine:
    lane: ShmAllToAll
    sums: list[Tensor]
    ticket: _Ticket
    out_TD: Tensor

    def wait(self) -> Tensor:
        return self.lane.gather(self.sums, self.ticket, self.out_TD)
