"""Expert parallelism of N ranks inside one process and one thread: for tests, and for reading.

Legend: T tokens of this rank, D hidden size, K experts per token, S slots of a rank, R rows, W width of a row on its
way, C rows per padded slot.

Each rank runs its forward as a generator (dbo/steps.py) and `weave` lets them take turns. Every (token, k) pair travels
on its own and the sender sums what comes back (sum_choices): the plainest form of what the other backends do.
"""

from __future__ import annotations

from typing import cast

import torch
from msgspec import Struct
from torch import Tensor

from ep.protocol import Arrived, Later, Routing
from ep.rows import Rows, padding
from ep.transport.group import MailboxWorld
from moe_kernels import ExpertBatch, Layout, sum_choices


class _Ticket(Struct, frozen=True):
    key: tuple[str, int, int]
    slot_TK: Tensor
    weight_TK: Tensor
    row_of: list[Tensor]  # for each rank, which rows here (flat) are its own, in the order it sent them


class Mailbox:
    """One rank's all-to-all. `wait()` before every peer has posted is an assertion error that names those missing."""

    def __init__(
        self,
        world: MailboxWorld,
        rank: int,
        num_slots: int,
        lane: int = 0,
        layout: Layout = Layout.RAGGED,
        rows: Rows | None = None,
    ) -> None:
        """rows: how they travel to the experts (ep/rows.py); None: as they are."""
        self.layout = layout
        self._world = world
        self._rank = rank
        self._num_slots = num_slots
        self._lane = lane
        self._rows = rows
        self._num_dispatched = 0

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Later[Arrived]:
        key = ("dispatch", self._lane, self._num_dispatched)
        self._num_dispatched += 1
        slot_P = routing.slot_TK.flatten()
        pairs_of = [(slot_P // self._num_slots == rank).nonzero().flatten() for rank in range(self._world.num_ranks)]
        x_TW = x_TD if self._rows is None else self._rows.pack(x_TD)
        for rank, pair_R in enumerate(pairs_of):
            parcel = (x_TW[pair_R // routing.slot_TK.shape[1]], slot_P[pair_R] % self._num_slots)
            self._world.post(key, self._rank, rank, parcel)
        return Later(self.arrive, key, routing)

    def combine(self, y: Tensor, ticket: object, out_TD: Tensor) -> Later[Tensor]:
        assert isinstance(ticket, _Ticket)
        key = ("combine", *ticket.key[1:])
        for rank, row_R in enumerate(ticket.row_of):
            self._world.post(key, self._rank, rank, y.reshape(-1, y.shape[-1])[row_R])
        return Later(self.gather, key, ticket, out_TD)

    def close(self) -> None:
        """Nothing is held."""

    def arrive(self, key: tuple[str, int, int], routing: Routing) -> Arrived:
        parcels = cast(list[tuple[Tensor, Tensor]], self._world.take(key, self._rank))
        x_RW = torch.cat([x for x, _ in parcels])
        slot_R = torch.cat([slot for _, slot in parcels])
        order_R = slot_R.argsort(stable=True)
        rows_S = torch.bincount(slot_R, minlength=self._num_slots)
        count_R = torch.arange(order_R.shape[0], device=order_R.device)
        if self.layout is Layout.RAGGED:
            x, place_R = x_RW[order_R], count_R
        else:
            num_rows = int(rows_S.max())
            start_S = rows_S.cumsum(0) - rows_S
            first_S = torch.arange(self._num_slots, device=order_R.device) * num_rows - start_S
            place_R = count_R + first_S[slot_R[order_R]]
            x = x_RW.new_full((self._num_slots * num_rows, x_RW.shape[1]), padding(x_RW.dtype))
            x[place_R] = x_RW[order_R]
            x = x.view(self._num_slots, num_rows, x_RW.shape[1])
        row_R = torch.empty_like(order_R)
        row_R[order_R] = place_R
        row_of = list(torch.split(row_R, [slot.shape[0] for _, slot in parcels]))
        rows_S = rows_S.to(torch.int32)
        batch = ExpertBatch(self.layout, x, rows_S) if self._rows is None else self._rows.batch(self.layout, x, rows_S)
        return Arrived(batch, _Ticket(key, routing.slot_TK, routing.weight_TK, row_of))

    def gather(self, key: tuple[str, int, int], ticket: _Ticket, out_TD: Tensor) -> Tensor:
        parts = cast(list[Tensor], self._world.take(key, self._rank))
        return sum_choices(parts, ticket.slot_TK, ticket.weight_TK, self._num_slots, out_TD)
