"""Expert parallelism by DeepEP's high-throughput kernels (deep_ep.Buffer).

Legend: T tokens of this rank, D hidden size, K experts per token, N rows arrived (one per token and rank).

A token travels once to each rank that has some of its experts, with its choices there (-1 elsewhere) and their weights:
what TokenBatch wants. combine adds up the ranks' rows and does not weight them; the experts have. The host waits for
the number of rows that arrive, so a CUDA graph cannot hold this.
"""

from __future__ import annotations

from torch import Tensor

from ep.backends.deepep import DeepEpBuffer, arrived, combined, packed
from ep.protocol import Arrived, Later, Pending, Routing
from moe_kernels import Layout


class HighThroughput:
    """One lane; lanes share the buffer, and use it in the same order on all ranks. bfloat16 only."""

    layout = Layout.RAGGED

    def __init__(self, shared: DeepEpBuffer, fp8: bool) -> None:
        """fp8: rows travel to the experts in 8 bits."""
        self._shared = shared
        self._fp8 = fp8

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Pending[Arrived]:
        shared, buffer = self._shared, self._shared.buffer
        shared.dirty = True
        slot_TK = routing.slot_TK.to(shared.deep_ep.topk_idx_t).contiguous()
        x = packed(x_TD, self._fp8)
        per_rank, per_node, per_expert, goes_TG, counted = buffer.get_dispatch_layout(
            slot_TK,
            shared.num_experts,
            previous_event=buffer.capture(),
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        rows, slot_NK, weight_NK, _, handle, event = buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=goes_TG,
            num_tokens_per_expert=per_expert,
            topk_idx=slot_TK,
            topk_weights=routing.weight_TK.contiguous(),
            previous_event=counted,
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        return Later(arrived, event, rows, slot_NK, weight_NK, handle)

    def combine(self, y: Tensor, ticket: object, out_TD: Tensor) -> Pending[Tensor]:
        return combined(self._shared.buffer, y, ticket, out_TD, async_finish=True)

    def close(self) -> None:
        """The group gives the buffer back."""
