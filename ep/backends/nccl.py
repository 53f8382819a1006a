"""Expert parallelism by plain collectives on tensors of the device: NCCL between GPUs (gloo in its place on a CPU).

Legend: T tokens of this rank, D hidden size, K experts per token, G ranks, S slots of a rank, M rows sent (one per
token and rank), N rows arrived, W width of a row's hidden state on its way, B bytes of a whole row.

As ep/backends/collective.py, but for a transport whose exchanges cost microseconds and whose sizes must be known: the
ranks first tell each other how many rows come, which the host waits for; so a CUDA graph cannot hold this. A rank sends
back one row per token, and all of them, own ones too, are rounded and added up in the order of ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from msgspec import Struct
from torch import Tensor

from ep.backends.lane import RowLane, rank_bags
from ep.protocol import Arrived, Later, PeerLost, Pending, Routing
from ep.transport.device_group import DeviceGroup
from moe_kernels import Bags, TokenBatch, unpermute


class _Ticket(Struct, frozen=True):
    arrived: list[int]  # rows from each rank
    sent: list[int]  # rows to each rank
    back: Bags  # from the M rows sent to the T tokens


class NcclAllToAll(RowLane[DeviceGroup]):
    def dispatch(self, x_TD: Tensor, routing: Routing) -> Pending[Arrived]:
        size = self._group.size
        goes_TG = torch.zeros(x_TD.shape[0], size, dtype=torch.bool, device=x_TD.device)
        goes_TG.scatter_(1, routing.slot_TK.div(self._num_slots, rounding_mode="floor"), True)
        counts_2G = torch.empty(2, size, dtype=torch.int64, device=x_TD.device)
        torch.sum(goes_TG, 0, out=counts_2G[0])
        self._exchange(counts_2G[1], counts_2G[0], [1] * size, [1] * size).wait()
        self._group.confirm()
        sent, arrived = counts_2G.tolist()
        token_M = goes_TG.t().nonzero()[:, 1]
        rows_MB = self._table(x_TD, routing).index_select(0, token_M)
        rows_NB = rows_MB.new_empty(sum(arrived), rows_MB.shape[1])
        exchange = self._exchange(rows_NB, rows_MB, arrived, sent)
        ticket = _Ticket(arrived, sent, rank_bags(goes_TG))
        return Later(self.arrive, exchange, rows_NB, routing.slot_TK.shape[1], ticket)

    def arrive(self, exchange: Pending[None], rows_NB: Tensor, top_k: int, ticket: _Ticket) -> Arrived:
        """The second half of a dispatch."""
        exchange.wait()
        return Arrived(self.tokens(rows_NB, top_k), ticket)

    def combine(self, y: Tensor, ticket: object, out_TD: Tensor) -> Pending[Tensor]:
        assert isinstance(ticket, _Ticket)
        sum_ND = y.to(self._dtype).contiguous()
        back_MD = sum_ND.new_empty(sum(ticket.sent), self._hidden_size)
        exchange = self._exchange(back_MD, sum_ND, ticket.sent, ticket.arrived)
        return Later(self.gather, exchange, back_MD, ticket.back, out_TD)

    def gather(self, exchange: Pending[None], back_MD: Tensor, back: Bags, out_TD: Tensor) -> Tensor:
        """The second half of a combine. back: which of the M are added up for each token."""
        exchange.wait()
        return unpermute(back_MD, back, out_TD)

    def tokens(self, rows_NB: Tensor, top_k: int) -> TokenBatch:
        """What has arrived, apart."""
        width = self._rows.width * self._rows.dtype.itemsize
        x_N, slot_N, weight_N = torch.split(rows_NB, [width, 4 * top_k, 4 * top_k], 1)
        return TokenBatch(
            self._rows.tokens(x_N.contiguous().view(self._rows.dtype)),
            slot_N.contiguous().view(torch.int32).to(torch.int64),
            weight_N.contiguous().view(torch.float32),
            self._group.rank * self._num_slots,
            torch.float32,
        )

    def _table(self, x_TD: Tensor, routing: Routing) -> Tensor:
        """uint8 [T, B]: a token's hidden state, all its slots and their weights."""
        fields = (self._rows.pack(x_TD), routing.slot_TK.to(torch.int32), routing.weight_TK)
        return torch.cat([field.contiguous().view(torch.uint8) for field in fields], 1)

    def _exchange(self, out: Tensor, rows: Tensor, room: list[int], sent: list[int]) -> Pending[None]:
        self._group.check()
        try:
            return _Exchange(self._group, self._group.transport().alltoall_base(out, rows, room, sent), rows)
        except RuntimeError as error:
            raise _lost(self._group, error) from error


def _lost(group: DeviceGroup, error: RuntimeError) -> PeerLost:
    """Neither transport says whom. The group is closed, so that others who wait for this rank learn of it."""
    group.close()
    return PeerLost((), f"rank {group.rank}: {str(error).splitlines()[0]}")


class _Exchange(Struct, frozen=True):
    group: DeviceGroup
    work: dist.Work
    rows: Tensor  # the transport knows its address only

    def wait(self) -> None:
        try:
            self.work.wait()
        except RuntimeError as error:
            raise _lost(self.group, error) from error
