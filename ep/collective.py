"""Expert parallelism of processes joined by a GlooGroup.

Legend: T tokens of this rank, D hidden size, K experts per token, G ranks, S slots of a rank, N rows arrived from all ranks (one
per token and rank), R rows for the local experts (one per token and local expert), M rows sent to all ranks, B words
(8 bytes) of a row.

A token travels once to each rank that has some of its experts: its hidden state, the slots of all its K experts and their
weights, in one row. The rank that computes weights and sums what its experts made of a token, and sends one row back; the sender
adds up the ranks' rows in float32.

One message carries a rank's rows, led by a row that says how many follow. The receiver posts a fixed room before it
knows that number. Only what does not fit there takes a second message.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ep.group import GlooGroup, Message
from ep.protocol import Arrived, Routing
from moe_kernels import Bags, Layout, permute_some, unpermute

_ROOM_BYTES = 1 << 18  # of a first message, per peer and lane
_WORD = 8


@dataclass(frozen=True, slots=True)
class _Ticket:
    bags: Bags  # from the experts' rows to the N rows that arrived
    arrived: list[int]  # rows that came from each rank
    sent: list[int]  # rows in the message to each rank, the leading one included
    back: Bags  # from the rows sent, leading ones included, to the T tokens


class CollectiveAllToAll:
    """One lane. Every rank of the group makes its lanes in the same order."""

    layout = Layout.RAGGED

    def __init__(self, group: GlooGroup, num_slots: int, hidden_size: int, dtype: torch.dtype) -> None:
        self.group = group
        self.num_slots = num_slots
        self.hidden_size = hidden_size
        self.dtype = dtype
        self.tag = group.new_tag()
        self.rest_tag = group.new_tag()
        self.back_tag = group.new_tag()
        self._rooms: dict[int, Tensor] = {}

    def dispatch(self, x_TD: Tensor, routing: Routing) -> _Dispatch:
        group, size = self.group, self.group.size
        rooms = self.rooms(routing.slot_TK.shape[1])
        heads = [(peer, group.receive(rooms[peer], peer, self.tag)) for peer in group.peers]
        # The leading row of the message to rank g is row g of the table, so that one gather builds every message.
        goes_XG = torch.zeros(size + x_TD.shape[0], size, dtype=torch.bool)
        goes_XG[:size].fill_diagonal_(True)
        goes_XG[size:].scatter_(1, routing.slot_TK.div(self.num_slots, rounding_mode="floor"), True)
        index_M = goes_XG.t().nonzero()[:, 1]
        counts_G = goes_XG.sum(0)
        sent: list[int] = counts_G.tolist()
        table_XB = self._table(x_TD, routing)
        table_XB[:size, 0] = counts_G
        outgoing = torch.split(table_XB.index_select(0, index_M), sent)
        messages: list[Message] = []
        for peer in group.peers:
            if sent[peer] <= rooms.shape[1]:
                messages.append(group.send(outgoing[peer], peer, self.tag))
            else:
                messages.append(group.send(outgoing[peer][:1], peer, self.tag))
                messages.append(group.send(outgoing[peer][1:], peer, self.rest_tag))
        # Leading rows have the lowest numbers: what remains is, token by token, where its rows lie in the messages.
        row_M = index_M.argsort(stable=True)[size:]
        copies_T = goes_XG[size:].sum(1)
        back = Bags(row_M, torch.ones(row_M.shape[0]), copies_T.cumsum(0).sub_(copies_T))
        return _Dispatch(self, heads, messages, rooms, outgoing[group.rank][1:], sent, back)

    def combine(self, y: Tensor, ticket: object, out_TD: Tensor) -> _Combine:
        assert isinstance(ticket, _Ticket)
        group = self.group
        sum_ND = unpermute(y, ticket.bags, y.new_empty(sum(ticket.arrived), self.hidden_size))
        leaving = torch.split(sum_ND, ticket.arrived)
        back_MD = y.new_empty(sum(ticket.sent), self.hidden_size)
        coming = [rows[1:] for rows in torch.split(back_MD, ticket.sent)]
        messages: list[Message] = []
        for peer in group.peers:
            if ticket.sent[peer] > 1:
                messages.append(group.receive(coming[peer], peer, self.back_tag))
        for peer in group.peers:
            if ticket.arrived[peer]:
                messages.append(group.send(leaving[peer], peer, self.back_tag))
        coming[group.rank].copy_(leaving[group.rank])
        return _Combine(messages, back_MD, ticket.back, out_TD)

    def close(self) -> None:
        """Nothing is held; the group is closed by whoever opened it."""

    def rooms(self, top_k: int) -> Tensor:
        """Room for one message of each rank, int64 [G, rows, B]."""
        if top_k not in self._rooms:
            words = -(-(self.hidden_size * self.dtype.itemsize) // _WORD) + top_k
            rows = max(2, _ROOM_BYTES // (words * _WORD))
            self._rooms[top_k] = torch.empty(self.group.size, rows, words, dtype=torch.int64)
        return self._rooms[top_k]

    def fields(self, rows_NB: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of rows: x [N, D], slot int32 [N, K], weight float32 [N, K]. K words hold both ids and weights."""
        first = -(-(self.hidden_size * self.dtype.itemsize) // _WORD)
        top_k = rows_NB.shape[1] - first
        x_ND = rows_NB.view(self.dtype)[:, : self.hidden_size]
        slot_NK = rows_NB.view(torch.int32)[:, 2 * first : 2 * first + top_k]
        return x_ND, slot_NK, rows_NB.view(torch.float32)[:, 2 * first + top_k :]

    def _table(self, x_TD: Tensor, routing: Routing) -> Tensor:
        """G unwritten rows, then one per token: int64 [G + T, B]."""
        size = self.group.size
        words = self.rooms(routing.slot_TK.shape[1]).shape[2]
        table_XB = torch.empty(size + x_TD.shape[0], words, dtype=torch.int64)
        for field, value in zip(self.fields(table_XB[size:]), (x_TD, routing.slot_TK, routing.weight_TK), strict=True):
            field.copy_(value)
        return table_XB


@dataclass(frozen=True, slots=True)
class _Dispatch:
    lane: CollectiveAllToAll
    heads: list[tuple[int, Message]]
    messages: list[Message]
    rooms: Tensor
    own_NB: Tensor
    sent: list[int]
    back: Bags

    def wait(self) -> Arrived:
        lane, group = self.lane, self.lane.group
        pieces = [self.own_NB] * group.size
        rest: list[Message] = []
        for peer, head in self.heads:
            head.wait()
            count = int(self.rooms[peer, 0, 0])
            if count <= self.rooms.shape[1]:
                pieces[peer] = self.rooms[peer, 1:count]
            else:
                pieces[peer] = self.rooms.new_empty(count - 1, self.rooms.shape[2])
                rest.append(group.receive(pieces[peer], peer, lane.rest_tag))
        for message in (*rest, *self.messages):
            message.wait()
        x_ND, slot_NK, weight_NK = lane.fields(torch.cat(pieces))
        batch, bags = permute_some(x_ND, slot_NK, weight_NK, group.rank * lane.num_slots, lane.num_slots)
        arrived = [piece.shape[0] for piece in pieces]
        return Arrived(batch, _Ticket(bags, arrived, self.sent, self.back))


@dataclass(frozen=True, slots=True)
class _Combine:
    messages: list[Message]
    back_MD: Tensor
    back: Bags
    out_TD: Tensor

    def wait(self) -> Tensor:
        for message in self.messages:
            message.wait()
        return unpermute(self.back_MD, self.back, self.out_TD)
