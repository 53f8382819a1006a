"""A fake all-to-all of one rank that behaves like a low-latency one: padded rows for every slot, counts on the device, nothing read
on the host. So a forward pass through it can be captured.

Legend: T tokens, K experts per token, S slots, D hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ep.protocol import Arrived, Ready, Routing
from moe_kernels import ExpertBatch, Layout


class FakePaddedLane:
    """Every slot gets every token; only those routed to it count in the sum."""

    layout = Layout.PADDED

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Ready[Arrived]:
        x_STD = x_TD.expand(self._num_slots, *x_TD.shape).contiguous()
        rows_S = torch.full((self._num_slots,), x_TD.shape[0], dtype=torch.int32)
        return Ready(Arrived(ExpertBatch(Layout.PADDED, x_STD, rows_S), routing))

    def combine(self, y: Tensor, ticket: object, out_TD: Tensor) -> Ready[Tensor]:
        assert isinstance(ticket, Routing)
        weight_TS = torch.zeros(out_TD.shape[0], self._num_slots)
        weight_TS.scatter_(1, ticket.slot_TK, ticket.weight_TK)
        return Ready(out_TD.copy_(torch.einsum("ts,std->td", weight_TS, y.float())))

    def close(self) -> None:
        """Nothing is held."""
