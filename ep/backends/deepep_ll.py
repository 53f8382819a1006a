"""Expert parallelism by DeepEP's low-latency kernels (deep_ep.Buffer in low-latency mode).

Legend: T tokens of this rank, D hidden size, K experts per token, S slots of a rank, C rows per slot (ranks * most
tokens), G ranks.

Rows arrive padded, one per token and expert, and nothing asks the host, so a CUDA graph can hold it. combine weights
and sums. A call sends; what has been sent arrives when its receive hook is called (`wait`).

A peer that does not answer for about 100 s (fixed when the library is compiled) is masked and left out: results are
then wrong, silently. `confirm` looks at the masks after every step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from msgspec import Struct
from torch import Tensor

from ep.backends.deepep import DeepEpBuffer
from ep.backends.dispatchers import Confirm
from ep.device import fetch
from ep.protocol import Arrived, Later, PeerLost, Pending, Routing
from ep.transport.device_group import DeviceGroup
from moe_kernels import ExpertBatch, Layout


class LowLatency:
    """One lane; two may share the buffer, which has place for two results. bfloat16 only."""

    layout = Layout.PADDED

    def __init__(self, shared: DeepEpBuffer, fp8: bool) -> None:
        """fp8: rows travel to the experts in 8 bits, rounded by the kernel itself."""
        self._shared = shared
        self._fp8 = fp8

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Pending[Arrived]:
        """At most `few` tokens (DeepEpBuffer)."""
        shared = self._shared
        assert x_TD.shape[0] <= shared.max_tokens, f"{x_TD.shape[0]} tokens, but at most {shared.max_tokens}"
        assert not shared.dirty, "the buffer is cleaned before the first low-latency exchange"
        slot_TK = routing.slot_TK.to(shared.deep_ep.topk_idx_t).contiguous()
        rows, rows_S, handle, _, hook = shared.buffer.low_latency_dispatch(
            x_TD.contiguous(),
            slot_TK,
            shared.max_tokens,
            shared.num_experts,
            use_fp8=self._fp8,
            return_recv_hook=True,
        )
        ticket = _Ticket(handle, slot_TK, routing.weight_TK.contiguous())
        return Later(_arrived, hook, rows, rows_S, ticket)

    def combine(self, y: Tensor, ticket: object, out_TD: Tensor) -> Pending[Tensor]:
        assert isinstance(ticket, _Ticket)
        _, _, hook = self._shared.buffer.low_latency_combine(
            y.contiguous(), ticket.slot_TK, ticket.weight_TK, ticket.handle, return_recv_hook=True, out=out_TD
        )
        return Later(_summed, hook, out_TD)

    def close(self) -> None:
        """The group gives the buffer back."""


def confirm(shared: DeepEpBuffer, group: DeviceGroup) -> Callable[[], Confirm]:
    """What is to be asked behind the exchanges of every step: have all ranks answered? The answer is read when the
    device has given it (the group waits for that, within its bound); PeerLost names those that have not."""

    def ask() -> Confirm:
        masked_G = torch.zeros(group.size, dtype=torch.int32, device=group.device)
        shared.buffer.low_latency_query_mask_buffer(masked_G)
        answer_G = fetch(masked_G)

        def read() -> None:
            lost = tuple(rank for rank, masked in enumerate(answer_G.tolist()) if masked)
            if lost:
                raise PeerLost(lost, f"rank {group.rank} has masked them: they did not answer the low-latency kernels")

        return read

    return ask


class _Ticket(Struct, frozen=True):
    handle: object
    slot_TK: Tensor
    weight_TK: Tensor


def _arrived(
    hook: Callable[[], None], rows: Tensor | tuple[Tensor, Tensor], rows_S: Tensor, ticket: _Ticket
) -> Arrived:
    hook()
    x, scale = rows if isinstance(rows, tuple) else (rows, None)
    return Arrived(ExpertBatch(Layout.PADDED, x, rows_S, scale), ticket)


def _summed(hook: Callable[[], None], out_TD: Tensor) -> Tensor:
    hook()
    return out_TD
