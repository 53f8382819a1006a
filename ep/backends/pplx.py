"""Expert parallelism by pplx-kernels (https://github.com/perplexityai/pplx-kernels) over NVSHMEM.

Legend: T tokens of this rank, D hidden size, K experts per token, S slots of a rank, C rows per slot (ranks * most
tokens), B blocks of a row.

Rows arrive padded, one per token and expert; combine weights and sums. Sending and receiving are two calls, of which
the second is `wait`. Nothing asks the host, so a CUDA graph can hold it.
"""

from __future__ import annotations

from typing import Any

import torch
from msgspec import Struct
from torch import Tensor

from ep.backends.nvshmem import start
from ep.protocol import Arrived, Later, Pending, Routing
from ep.transport.device_group import DeviceGroup
from layers.optional import load
from moe_kernels import ExpertBatch, Layout, quantize_rows
from moe_kernels.quant import num_blocks

INSTALL = "it is not on PyPI: pip install git+https://github.com/perplexityai/pplx-kernels"


class Pplx:
    """One lane."""

    layout = Layout.PADDED

    def __init__(
        self, group: DeviceGroup, num_slots: int, hidden_size: int, dtype: torch.dtype, max_tokens: int, fp8: bool
    ) -> None:
        """max_tokens: of a rank in one exchange; fp8: rows travel to the experts in 8 bits."""
        self._pplx: Any = load("pplx_kernels", INSTALL)
        start(group)
        self._group = group
        self._num_slots = num_slots
        self._hidden_size, self._dtype = hidden_size, dtype
        self._max_tokens = max_tokens
        self._fp8 = fp8
        self._kernels: Any = None

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Pending[Arrived]:
        assert x_TD.shape[0] <= self._max_tokens, f"{x_TD.shape[0]} tokens, but at most {self._max_tokens}"
        kernels = self._kernels_for(routing.slot_TK.shape[1])
        slot_TK = routing.slot_TK.to(torch.int32).view(torch.uint32)
        x, scale = quantize_rows(x_TD) if self._fp8 else (x_TD.contiguous(), None)
        shape = (self._num_slots, self._group.size * self._max_tokens)
        rows_S = torch.empty(self._num_slots, dtype=torch.int32, device=x.device)
        out = torch.empty(*shape, self._hidden_size, dtype=x.dtype, device=x.device)
        out_scale = None
        if scale is not None:
            out_scale = torch.empty(*shape, num_blocks(self._hidden_size), dtype=torch.float32, device=x.device)
        call = (rows_S, out, out_scale, x, scale, slot_TK, None)
        kernels.dispatch(*call, do_send=True, do_recv=False)
        return Later(self.arrive, call, _Ticket(slot_TK, routing.weight_TK.contiguous()))

    def combine(self, y: Tensor, ticket: object, out_TD: Tensor) -> Pending[Tensor]:
        assert isinstance(ticket, _Ticket)
        call = (out_TD, ticket.slot_TK, ticket.weight_TK, y.contiguous(), None)
        self._kernels.combine(*call, do_send=True, do_recv=False)
        return Later(self.gather, call)

    def arrive(self, call: tuple[Any, ...], ticket: _Ticket) -> Arrived:
        """The second half of a dispatch."""
        self._kernels.dispatch(*call, do_send=False, do_recv=True)
        rows_S, x, scale = call[:3]
        return Arrived(ExpertBatch(Layout.PADDED, x, rows_S, scale), ticket)

    def gather(self, call: tuple[Any, ...]) -> Tensor:
        """The second half of a combine."""
        self._kernels.combine(*call, do_send=False, do_recv=True)
        out_TD: Tensor = call[0]
        return out_TD

    def close(self) -> None:
        """The group gives the buffers back."""

    def _kernels_for(self, top_k: int) -> Any:
        """Made with the first exchange, which is when the number of choices is known; all ranks come here together."""
        if self._kernels is None:
            item = 1 if self._fp8 else self._dtype.itemsize
            self._kernels = self._pplx.AllToAll.internode(
                max_num_tokens=self._max_tokens,
                num_experts=self._group.size * self._num_slots,
                experts_per_token=top_k,
                rank=self._group.rank,
                world_size=self._group.size,
                dp_size=1,  # every rank has tokens of its own
                hidden_dim=self._hidden_size,
                hidden_dim_bytes=self._hidden_size * item,
                hidden_dim_scale_bytes=4 * num_blocks(self._hidden_size) if self._fp8 else 0,
            )
            self._group.at_end(self._kernels.destroy)
        return self._kernels


class _Ticket(Struct, frozen=True):
    slot_TK: Tensor
    weight_TK: Tensor
