"""Expert parallelism of processes joined by a GlooGroup.

Legend: T tokens of this rank, D hidden size, K experts per token, G ranks, S slots of a rank, N rows arrived from all
ranks (one per token and rank), M rows sent to all ranks (on the way back: one per choice), W width of a row's hidden
state on its way, B words (8 bytes) of a whole row.

A token travels once to each rank that has some of its experts: its hidden state, the slots of all its K experts and
their weights, in one row. The experts take what has arrived as tokens, and sort for themselves (TokenBatch); a row for
each choice goes back, and the sender weights and adds them up in the order of a token's choices (sum_choices). Over a
network, where bytes are dear, a rank sends back one row per token, weighted and summed, and the sender adds up the
ranks' rows in their order: the sum is then the same on whichever rank a token is served, but not wherever its experts
are.

One all-to-all carries the rows to a rank, led by a row that says how many there are. The receiver gives a room before
it knows that number; when some message of any rank is longer, a second all-to-all carries what is left. That one begins
when the first has been waited for, so nothing hides it; therefore rooms grow to the longest message of any rank, of
which all ranks are told alike. A rank's own rows are not sent.
"""

from __future__ import annotations

import torch
from msgspec import Struct
from torch import Tensor

from ep.backends.lane import RowLane, rank_bags
from ep.protocol import Arrived, Later, Pending, Routing
from ep.transport.group import LARGE_BYTES, GlooGroup
from moe_kernels import TokenBatch, sum_choices, unpermute

_ROOM_BYTES = 1 << 18  # of a first message, per peer and lane, to begin with
_MOST_BYTES = 1 << 26  # of all rooms of a lane
_WORD = 8


class _Ticket(Struct, frozen=True):
    leaving: list[int]  # rows for each other rank, then for this one
    coming: list[int]  # rows from each other rank, then from this one
    longest: int  # rows of the longest message of any rank
    routing: Routing


class CollectiveAllToAll(RowLane[GlooGroup]):
    """Between ranks rows lie in the order of ranks, a rank's own rows last."""

    def __init__(
        self, group: GlooGroup, num_slots: int, hidden_size: int, dtype: torch.dtype, rows: str = "plain"
    ) -> None:
        super().__init__(group, num_slots, hidden_size, dtype, rows)
        self._room: dict[int, Tensor] = {}  # by K
        self._longest = 0  # message of the last dispatch, of any rank: the next one is most often alike
        # Messages lie in the order of ranks, this rank's own rows last: the column of a slot is its place in that
        # order.
        ranks = [*range(group.rank), *range(group.rank + 1, group.size), group.rank]
        column_G = torch.empty(group.size, dtype=torch.int64)
        column_G[torch.tensor(ranks)] = torch.arange(group.size)
        self._column_of_slot = column_G.repeat_interleave(num_slots)

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Pending[Arrived]:
        num_peers = self._group.size - 1
        room = self._room_for(routing.slot_TK.shape[1])
        # The leading row of message i is row i of the table, so that one gather builds every message.
        goes_XG = torch.zeros(num_peers + x_TD.shape[0], num_peers + 1, dtype=torch.bool)
        goes_XG[:num_peers].fill_diagonal_(True)
        column_TK = self._column_of_slot[routing.slot_TK]
        goes_XG[num_peers:].scatter_(1, column_TK, True)
        counts_G = goes_XG.sum(0)
        counts: list[int] = counts_G.tolist()
        longest = max(counts[:num_peers])
        table_XB = self._table(x_TD, routing)
        table_XB[:num_peers, 0] = counts_G[:num_peers]
        table_XB[:num_peers, 1] = longest
        rows_MB = table_XB.index_select(0, goes_XG.t().nonzero()[:, 1])
        first_MB, rest = rows_MB[: rows_MB.shape[0] - counts[num_peers]], None
        if longest > room.shape[1]:
            messages = torch.split(first_MB, counts[:num_peers])
            first_MB = torch.cat([message[: room.shape[1]] for message in messages])
            rest = torch.cat([message[room.shape[1] :] for message in messages])
        exchange = self._group.all_to_all(
            room.view(-1, room.shape[2]),
            first_MB,
            self._by_rank([room.shape[1]] * num_peers),
            self._by_rank([min(count, room.shape[1]) for count in counts[:num_peers]]),
            self._is_large(self._longest),
        )
        coming: list[int] = torch.bincount(column_TK.flatten(), minlength=num_peers + 1).tolist()
        if self._group.over_network:
            coming = [*(count - 1 for count in counts[:num_peers]), counts[num_peers]]
        sent = _Sent(exchange, room, rows_MB, rest, counts, longest, coming, routing)
        return Later(self.arrive, sent)

    def arrive(self, sent: _Sent) -> Arrived:
        """The second half of a sent."""
        sent.exchange.wait()
        room, counts = sent.room, sent.counts
        num_peers, limit = room.shape[0], room.shape[1]
        heads: list[list[int]] = room[:, 0, :2].tolist()
        coming = [count for count, _ in heads]
        longest = self._longest = max(sent.longest, *(longest for _, longest in heads))
        pieces = [room[i, 1:count] for i, count in enumerate(coming)]
        if longest > limit:
            left = [max(0, count - limit) for count in coming]
            rest_NB = room.new_empty(sum(left), room.shape[2])
            empty_MB = rest_NB[:0] if sent.rest is None else sent.rest
            going = [max(0, count - limit) for count in counts[:num_peers]]
            self._group.all_to_all(rest_NB, empty_MB, self._by_rank(left), self._by_rank(going), large=True).wait()
            rests = torch.split(rest_NB, left)
            pieces = [part for pair in zip(pieces, rests, strict=True) for part in pair]
            self._grow(room, longest)
        pieces.append(sent.rows_MB[sent.rows_MB.shape[0] - counts[num_peers] :])
        x_NW, slot_NK, weight_NK = self._fields(torch.cat(pieces))
        first_slot = self._group.rank * self._num_slots
        leaving = [*(count - 1 for count in coming), counts[num_peers]]
        rows_PD = None
        if not self._group.over_network:
            here_N = ((slot_NK >= first_slot) & (slot_NK < first_slot + self._num_slots)).sum(1)
            leaving = torch.stack([part.sum() for part in torch.split(here_N, leaving)]).tolist()
            rows_PD = torch.empty(sum(leaving), self._hidden_size, dtype=self._dtype)
        slot_NK, weight_NK = slot_NK.to(torch.int64), weight_NK.contiguous()
        tokens = TokenBatch(self._rows.tokens(x_NW), slot_NK, weight_NK, first_slot, torch.float32, rows_PD)
        return Arrived(tokens, _Ticket(leaving, sent.coming, longest, sent.routing))

    def combine(self, y: Tensor, ticket: object, out_TD: Tensor) -> Pending[Tensor]:
        assert isinstance(ticket, _Ticket)
        num_peers = self._group.size - 1
        leaving, coming = ticket.leaving, ticket.coming
        y = y.to(self._dtype)
        back_MD = y.new_empty(sum(coming[:num_peers]), self._hidden_size)
        exchange = self._group.all_to_all(
            back_MD,
            y[: y.shape[0] - leaving[num_peers]],
            self._by_rank(coming[:num_peers]),
            self._by_rank(leaving[:num_peers]),
            self._is_large(ticket.longest),
        )
        parts = list(torch.split(back_MD, coming[:num_peers]))
        parts.insert(self._group.rank, y[y.shape[0] - leaving[num_peers] :])
        return Later(self.gather, exchange, parts, ticket.routing, out_TD)

    def gather(self, exchange: Pending[None], parts: list[Tensor], routing: Routing, out_TD: Tensor) -> Tensor:
        """The second half of a combine. parts: by rank; over a network a row for each token that went there, else one
        for each choice."""
        exchange.wait()
        slot_TK = routing.slot_TK
        if not self._group.over_network:
            return sum_choices(parts, slot_TK, routing.weight_TK, self._num_slots, out_TD)
        goes_TG = torch.zeros(slot_TK.shape[0], len(parts), dtype=torch.bool)
        goes_TG.scatter_(1, slot_TK.div(self._num_slots, rounding_mode="floor"), True)
        return unpermute(torch.cat(parts), rank_bags(goes_TG), out_TD)

    def _is_large(self, num_rows: int) -> bool:
        return num_rows * self._hidden_size * self._dtype.itemsize >= LARGE_BYTES

    def _by_rank(self, of_peers: list[int]) -> list[int]:
        """The same with 0 for this rank."""
        rank = self._group.rank
        return [*of_peers[:rank], 0, *of_peers[rank:]]

    def _words(self) -> int:
        """Words of a row's hidden state."""
        return -(-(self._rows.width * self._rows.dtype.itemsize) // _WORD)

    def _room_for(self, top_k: int) -> Tensor:
        """Room for the first message of every other rank, int64 [G - 1, rows, B]."""
        if top_k not in self._room:
            words = self._words() + top_k
            rows = max(2, _ROOM_BYTES // (words * _WORD))
            self._room[top_k] = torch.empty(self._group.size - 1, rows, words, dtype=torch.int64)
        return self._room[top_k]

    def _grow(self, room: Tensor, longest: int) -> None:
        """From the next dispatch on messages of so many rows fit, at most _MOST_BYTES. All ranks do this in the same
        exchange."""
        num_peers, _, words = room.shape
        top_k = words - self._words()
        most = _MOST_BYTES // (num_peers * words * _WORD)
        # Another exchange may have grown it meanwhile.
        grown = max(self._room[top_k].shape[1], min(most, 1 << (longest - 1).bit_length()))
        if grown > self._room[top_k].shape[1]:
            self._room[top_k] = room.new_empty(num_peers, grown, words)

    def _fields(self, rows_NB: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of rows: x [N, W], slot int32 [N, K], weight float32 [N, K] (the last two share K words)."""
        top_k = rows_NB.shape[1] - self._words()
        first = 2 * self._words()
        x_NW = rows_NB.view(self._rows.dtype)[:, : self._rows.width]
        slot_NK = rows_NB.view(torch.int32)[:, first : first + top_k]
        return x_NW, slot_NK, rows_NB.view(torch.float32)[:, first + top_k :]

    def _table(self, x_TD: Tensor, routing: Routing) -> Tensor:
        """G - 1 unwritten rows, then one per token: int64 [G - 1 + T, B]."""
        num_peers = self._group.size - 1
        words = self._words() + routing.slot_TK.shape[1]
        table_XB = torch.empty(num_peers + x_TD.shape[0], words, dtype=torch.int64)
        values = (self._rows.pack(x_TD), routing.slot_TK, routing.weight_TK)
        for field, value in zip(self._fields(table_XB[num_peers:]), values, strict=True):
            field.copy_(value)
        return table_XB


class _Sent(Struct, frozen=True):
    exchange: Pending[None]
    room: Tensor
    rows_MB: Tensor  # every message, leading rows included, then the rank's own rows
    rest: Tensor | None  # what did not fit the first messages
    counts: list[int]  # rows of each message, leading row included; then the number of own rows
    longest: int
    coming: list[int]  # rows that will come back for each message, then for own ones
    routing: Routing
