"""Expert parallelism by put and signal on a symmetric heap (ep/transport/heap.py).

Legend: T tokens of this rank, D hidden size, K experts per token, G ranks, S slots of a rank, N rows that arrived from
all ranks (own ones included), W width of a row on its way, P choices of local experts in the order of tokens; for
padded slots: R rows for the local experts.

A rank puts its tokens, with the slots and weights of all their experts, into a staging buffer that every other rank
keeps for it, then signals how many they are. The experts take what has arrived as tokens, and sort for themselves
(TokenBatch); a row for each choice goes back, and the sender weights and adds them up in the order of a token's choices
(sum_choices). So the bits of a sum do not depend on which rank serves the token, nor on which ranks have its experts.
Only padded slots are sorted here.

A staging buffer is not written before its reader is done: a rank dispatches again on a lane only when it has
everybody's results of the time before, and they put those only after they had read what it sent; and it puts results
only when it has the tokens of that time, which were sent after the results of the time before had been read. So one
staging buffer per sender and direction does. What is longer than a staging buffer goes in chunks, each when the reader
says that the staging buffer is free.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Struct
from torch import Tensor

import dbo.alive as alive
from ep.protocol import Arrived, Later, Routing
from ep.recorder import Kind
from ep.rows import make_rows, padding
from ep.transport.heap import Signals, SymmetricHeap
from ep.transport.shm_heap import ShmSignals
from ep.transport.shm_staging import (
    SLOT_BYTES,
    SMALL_BYTES,
    WEIGHT_BYTES,
    Array,
    Chunks,
    Fields,
    HostOps,
    Ints,
    RowOps,
    StagingBuffer,
)
from moe_kernels import ExpertBatch, Layout, TokenBatch, TokenMemory, sum_choices
from native.exchange import LATE_COMBINE, TOO_MANY, FewTokens, PeerMemory, can_run
from native.tape import Late

_ROOM_ROWS = 2048  # a rank's tokens of one step, usually
_ROOM_BYTES = 1 << 25  # and no more than this; a multiple of 64 rows
_TOP_K = 16  # what a staging buffer of that many rows has place for; with more choices it holds fewer rows
_FEW, _FEW_BYTES = 128, 1 << 19  # tokens of a rank whose exchange is a native call for each stage
_IDLE, _SENT, _ARRIVED, _RETURNED = range(4)


class _Ticket(Struct, frozen=True):
    row_P: Tensor | None  # where the choices' rows are among the experts'; None: they lie in order
    rows: list[int]  # choices of the tokens from each rank
    sent: _Sent


class _Sent(Struct, frozen=True):
    """What a dispatch sends. token: for each rank the tokens that go to it; None: all go to every rank."""

    ops: RowOps
    x_TW: Tensor
    slot_TK: Array
    weight_TK: Array
    token: list[Array] | None
    counts: list[int]  # rows to each rank

    def rows(self, peer: int, start: int, stop: int) -> Fields:
        if self.token is None:
            return self.x_TW[start:stop], self.slot_TK[start:stop], self.weight_TK[start:stop]
        token = self.token[peer][start:stop]
        return self.x_TW.index_select(0, self.ops.tensor(token)), self.slot_TK[token], self.weight_TK[token]


class _Numbers:
    """What FewTokens counts, where there are none."""

    number = 0


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
        rows: str = "plain",
        ops: RowOps | None = None,
    ) -> None:
        """num_slots: of each rank, less than 32768; dtype: of what experts give back; room_rows: rows of a staging
        buffer (a multiple of 64); None: as many as a large step has; rows: how they travel to the experts (ep/rows.py).
        ops: of a heap that is not in the host's memory, RAGGED only."""
        assert num_slots < 1 << 15, "slots are sorted as 16-bit numbers"
        assert ops is None or layout is Layout.RAGGED
        self.layout = layout
        self._ops = ops = ops or HostOps()
        self._rank = heap.rank
        self._size = heap.size
        self._peers = [peer for peer in range(heap.size) if peer != heap.rank]
        self._num_slots = num_slots
        self._signals = signals
        self._rows = make_rows(rows, hidden_size, dtype)
        row_bytes, back_bytes = self._rows.width * self._rows.dtype.itemsize, hidden_size * dtype.itemsize
        self._row_bytes = row_bytes
        self._back_rows = room_rows or max(64, min(_ROOM_ROWS * _TOP_K, _ROOM_BYTES // back_bytes) // 64 * 64)
        if room_rows is None:
            fields = _TOP_K * (SLOT_BYTES + WEIGHT_BYTES)  # beside a row
            room_rows = max(
                64, min(_ROOM_ROWS * -(-(row_bytes + fields) // row_bytes), _ROOM_BYTES // row_bytes) // 64 * 64
            )
        self._room_rows = room_rows
        here_bytes, there_bytes = room_rows * row_bytes, self._back_rows * back_bytes
        here, there = heap.reserve(heap.size * here_bytes), heap.reserve(heap.size * there_bytes)

        # By sender or receiver: staging buffers that lie at `of`, for what `sender` puts there.
        def to_experts(of: int, sender: int) -> StagingBuffer:
            window = heap.window(of, here + sender * here_bytes, here_bytes)
            return ops.buffer(window, self._rows.width, self._rows.dtype)

        def back(of: int, sender: int) -> StagingBuffer:
            return ops.buffer(heap.window(of, there + sender * there_bytes, there_bytes), hidden_size, dtype)

        own, ranks = heap.rank, range(heap.size)
        self._arriving = [to_experts(own, peer) for peer in ranks]
        self._leaving = [to_experts(peer, own) for peer in ranks]
        self._coming = [back(own, peer) for peer in ranks]
        self._going = [back(peer, own) for peer in ranks]
        self._chunks = Chunks(signals, self._peers, heap.size)
        self._dispatch_word, self._combine_word = signals.reserve(), signals.reserve()
        self._own_rows = torch.empty(0, hidden_size, dtype=dtype)  # results on this rank; grows
        self._stage = _IDLE
        self._few = self._native(hidden_size, dtype) if rows == "plain" and isinstance(ops, HostOps) else None
        self._numbers: FewTokens | _Numbers = self._few or _Numbers()

    def _native(self, hidden_size: int, dtype: torch.dtype) -> FewTokens | None:
        """None: exchanges of few tokens go as all others do."""
        signals, own = self._signals, self._rank
        most = min(_FEW, _FEW_BYTES // self._row_bytes, self._back_rows // _TOP_K, self.capacity(_TOP_K))
        runs = self.layout is Layout.RAGGED and isinstance(signals, ShmSignals) and can_run(dtype, self._size)
        if not runs or most < 1:
            return None
        assert isinstance(signals, ShmSignals)
        peers = [
            PeerMemory(
                self._leaving[peer].address,
                self._going[peer].address,
                self._arriving[peer].address,
                self._coming[peer].address,
                signals.address(peer, self._dispatch_word, own),
                signals.address(peer, self._combine_word, own),
                signals.address(own, self._dispatch_word, peer),
                signals.address(own, self._combine_word, peer),
                signals.asleep_address(peer),
            )
            for peer in range(self._size)
        ]
        return FewTokens(own, self._num_slots, hidden_size, dtype, peers, most, _TOP_K)

    @property
    def recorded_tokens(self) -> int:
        """Up to so many tokens of a rank exchanges can be recorded on a tape; 0: none can."""
        return 0 if self._few is None else self._few.most

    @property
    def key(self) -> int:
        """What a tape says that stops in an exchange of this lane."""
        assert self._few is not None
        return self._few.key

    def wait_late(self, late: Late) -> None:
        """Until an exchange on a tape can go on. PeerLost."""
        if late.reason == TOO_MANY:
            raise RuntimeError("a rank has sent more tokens than the ranks had agreed on")
        combine = late.reason == LATE_COMBINE
        alive.at(int(Kind.COMBINE if combine else Kind.DISPATCH), late.mark)
        word = self._combine_word if combine else self._dispatch_word
        self._signals.wait(word, self._peers, self._numbers.number)

    def capacity(self, top_k: int) -> int:
        """Rows that a staging buffer holds."""
        return (self._room_rows * self._row_bytes - 8) // (self._row_bytes + top_k * (SLOT_BYTES + WEIGHT_BYTES))

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Later[Arrived]:
        """x_TD and the routing must not change until it has been waited for."""
        assert self._stage == _IDLE, "the lane's last exchange is not over"
        self._stage = _SENT
        few = self._few
        if few is not None and x_TD.shape[0] <= few.most and routing.slot_TK.shape[1] <= few.top_k:
            x_TD = x_TD.contiguous()
            routing = Routing(routing.slot_TK.contiguous(), routing.weight_TK.contiguous())
            few.put(x_TD, routing.slot_TK, routing.weight_TK)
            return Later(self._arrive_few, few, x_TD, routing)
        self._numbers.number += 1
        return Later(self.arrive, self._send(x_TD, routing))

    def _send(self, x_TD: Tensor, routing: Routing) -> _Sent:
        sent = self._sent(x_TD, routing)
        num_tokens, top_k = sent.slot_TK.shape
        capacity = self.capacity(top_k)
        first = self._peers[0] if self._peers else -1
        alike = sent.token is None and num_tokens <= capacity and self._ops.reads_peers
        for peer in self._peers:
            if peer != first and alike:
                self._leaving[peer].copy(self._leaving[first], num_tokens, top_k)
            else:
                self._leaving[peer].fill(sent.rows(peer, 0, min(sent.counts[peer], capacity)))
            self._signals.send(peer, self._dispatch_word, self._numbers.number, sent.counts[peer])
        return sent

    def _sent(self, x_TD: Tensor, routing: Routing) -> _Sent:
        ops = self._ops
        slot_TK = ops.array(routing.slot_TK)
        num_tokens = slot_TK.shape[0]
        token = self._choose(num_tokens, slot_TK)
        counts = [num_tokens] * self._size if token is None else [rows.shape[0] for rows in token]
        x_TW = self._rows.pack(x_TD)
        return _Sent(ops, x_TW, slot_TK, ops.array(routing.weight_TK), token, counts)

    def arrive(self, sent: _Sent) -> Arrived:
        """The second half of a dispatch."""
        assert self._stage == _SENT
        self._stage = _ARRIVED
        counts = self._signals.wait(self._dispatch_word, self._peers, self._numbers.number)
        counts.insert(self._rank, sent.x_TW.shape[0])
        return self._arrived(sent, counts)

    def _arrived(self, sent: _Sent, counts: list[int]) -> Arrived:
        top_k = sent.slot_TK.shape[1]
        capacity = self.capacity(top_k)
        if max(counts) <= capacity:
            fields = [buffer.views(count, top_k) for buffer, count in zip(self._arriving, counts, strict=True)]
            fields[self._rank] = sent.x_TW, sent.slot_TK, sent.weight_TK
        else:
            fields = self._receive_chunks(sent, counts, capacity)
        x_NW = torch.cat([field[0] for field in fields])
        slot_NK = self._ops.join([field[1] for field in fields])
        weight_NK = self._ops.join([field[2] for field in fields])
        rows = self._ops.count_here(slot_NK, self._rank * self._num_slots, self._num_slots, counts)
        if self.layout is Layout.PADDED:
            batch, row_P = self._pad(x_NW, slot_NK)
            return Arrived(batch, _Ticket(row_P, rows, sent))
        tokens = TokenBatch(
            self._rows.tokens(x_NW),
            self._ops.tensor(slot_NK),
            self._ops.tensor(weight_NK),
            self._rank * self._num_slots,
            torch.float32,
            self._rows_for(sum(rows), x_NW.device),
        )
        return Arrived(tokens, _Ticket(None, rows, sent))

    def _arrive_few(self, few: FewTokens, x_TD: Tensor, routing: Routing) -> Arrived:
        """`arrive`, with all ranks' tokens where they are few."""
        assert self._stage == _SENT
        counts = few.dispatched()
        if counts is None:
            counts = self._signals.wait(self._dispatch_word, self._peers, few.number)
            counts.insert(self._rank, x_TD.shape[0])
            few.note(counts)
        self._stage = _ARRIVED
        if max(counts) > few.most:
            return self._arrived(self._sent(x_TD, routing), counts)
        x_ND, slot_NK, weight_NK, y_PD = few.join(x_TD, routing.slot_TK, routing.weight_TK, sum(counts))
        first = self._rank * self._num_slots
        batch = TokenBatch(x_ND, slot_NK, weight_NK, first, torch.float32, y_PD, TokenMemory(*few.memory))
        return Arrived(batch, routing)

    def combine(self, y: Tensor, ticket: object, out_TD: Tensor) -> Later[Tensor]:
        assert isinstance(ticket, _Ticket | Routing) and self._stage == _ARRIVED
        self._stage = _RETURNED
        if isinstance(ticket, Routing):
            assert self._few is not None and y.is_contiguous() and out_TD.is_contiguous()
            self._few.give_back(y, ticket.slot_TK.shape[1])
            return Later(self._gather_few, self._few, y, ticket, out_TD)
        y_PD = y if ticket.row_P is None else y.view(-1, y.shape[-1]).index_select(0, ticket.row_P)
        parts = list(torch.split(y_PD, ticket.rows))
        for peer in self._peers:
            part = parts[peer][: self._back_rows]
            self._going[peer].rows(part.shape[0]).copy_(part)
            self._signals.send(peer, self._combine_word, self._numbers.number)
        return Later(self.gather, parts, ticket, out_TD)

    def gather(self, parts: list[Tensor], ticket: _Ticket, out_TD: Tensor) -> Tensor:
        """The second half of a combine."""
        assert self._stage == _RETURNED
        self._signals.wait(self._combine_word, self._peers, self._numbers.number)
        sent, ops = ticket.sent, self._ops
        coming = ops.count(sent.slot_TK, self._num_slots, self._size)
        # What fits its staging buffer is read there; chunks are joined.
        back = [self._coming[peer].rows(min(count, self._back_rows)) for peer, count in enumerate(coming)]
        back[self._rank] = parts[self._rank]
        for peer in self._peers:
            if coming[peer] > self._back_rows:
                back[peer] = parts[self._rank].new_empty(coming[peer], out_TD.shape[1])

        def take(peer: int, start: int, stop: int) -> None:
            back[peer][start:stop] = self._coming[peer].rows(stop - start)

        def put(peer: int, start: int, stop: int) -> None:
            self._going[peer].rows(stop - start).copy_(parts[peer][start:stop])

        last = self._chunks.pass_on(coming, ticket.rows, self._back_rows, take, put)
        for peer in self._peers:
            if last[peer]:
                take(peer, last[peer], coming[peer])
        sum_choices(back, ops.tensor(sent.slot_TK), ops.tensor(sent.weight_TK), self._num_slots, out_TD)
        self._stage = _IDLE
        return out_TD

    def _gather_few(self, few: FewTokens, y_PD: Tensor, routing: Routing, out_TD: Tensor) -> Tensor:
        assert self._stage == _RETURNED
        if not few.returned():
            self._signals.wait(self._combine_word, self._peers, few.number)
        few.sum(routing.slot_TK, routing.weight_TK, y_PD, out_TD)
        self._stage = _IDLE
        return out_TD

    def close(self) -> None:
        """Nothing is held; the group is closed by its owner."""

    def _rows_for(self, count: int, device: torch.device) -> Tensor:
        """Where so many results may be put until the next dispatch."""
        if self._own_rows.shape[0] < count:
            self._own_rows = torch.empty(
                count * 5 // 4, self._own_rows.shape[1], dtype=self._own_rows.dtype, device=device
            )
        return self._own_rows[:count]

    def _choose(self, num_tokens: int, slot_TK: Array) -> list[Array] | None:
        """For each rank the tokens that go there; None: all, which costs nothing to find out.

        Nearly every token has an expert on every one of a few ranks. The others travel for nothing; they are picked out
        only where that saves a fifth of much.
        """
        saved = (1 - 1 / self._size) ** slot_TK.shape[1]
        if saved < 0.2 or num_tokens * self._row_bytes < SMALL_BYTES:
            return None
        return self._ops.choose(slot_TK, self._num_slots, self._size)

    def _pad(self, x_NW: Tensor, slot_NK: Ints) -> tuple[ExpertBatch, Tensor]:
        """The rows of the local experts, sorted into padded slots, and where each choice's row is among them, int64
        [P]."""
        top_k = slot_NK.shape[1]
        key_N = slot_NK.ravel() - self._rank * self._num_slots
        pair_P = np.flatnonzero(key_N.view(np.uint64) < self._num_slots)  # as unsigned, what is below is above too
        key_P: npt.NDArray[np.int16] = key_N[pair_P].astype(np.int16)  # short keys sort in one pass
        order_R = key_P.argsort(kind="stable")
        rows_S = np.bincount(key_P, minlength=self._num_slots)
        num_rows = int(rows_S.max())
        start_S: Ints = np.cumsum(rows_S, dtype=np.int64) - rows_S
        row_R = np.arange(order_R.shape[0]) + (np.arange(self._num_slots) * num_rows - start_S)[key_P[order_R]]
        x = x_NW.new_full((self._num_slots * num_rows, x_NW.shape[1]), padding(x_NW.dtype))
        x[torch.from_numpy(row_R)] = x_NW.index_select(0, torch.from_numpy(pair_P[order_R] // top_k))
        row_P = np.empty_like(order_R)
        row_P[order_R] = row_R
        rows = x.view(self._num_slots, num_rows, x_NW.shape[1])
        return self._rows.batch(Layout.PADDED, rows, torch.from_numpy(rows_S.astype(np.int32))), torch.from_numpy(row_P)

    def _receive_chunks(self, sent: _Sent, counts: list[int], capacity: int) -> list[Fields]:
        top_k = sent.slot_TK.shape[1]
        pieces: list[list[Fields]] = [[] for _ in counts]

        def take(peer: int, start: int, stop: int) -> None:
            x, slot, weight = self._arriving[peer].views(stop - start, top_k)
            pieces[peer].append((x.clone(), self._ops.join([slot]), self._ops.join([weight])))

        def put(peer: int, start: int, stop: int) -> None:
            self._leaving[peer].fill(sent.rows(peer, start, stop))

        first = self._chunks.pass_on(counts, sent.counts, capacity, take, put)
        for peer in self._peers:
            pieces[peer].append(self._arriving[peer].views(counts[peer] - first[peer], top_k))
        pieces[self._rank].append((sent.x_TW, sent.slot_TK, sent.weight_TK))
        return [
            (
                torch.cat([piece[0] for piece in of_rank]),
                self._ops.join([piece[1] for piece in of_rank]),
                self._ops.join([piece[2] for piece in of_rank]),
            )
            for of_rank in pieces
        ]
