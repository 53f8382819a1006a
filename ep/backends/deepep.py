"""What DeepEP's two older kinds of kernels share (https://github.com/deepseek-ai/DeepEP): the library, its buffer, and
FP8 rows.

Legend: T tokens of this rank, D hidden size, K experts per token, N rows arrived (one per token and rank).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ep.protocol import Arrived, Later
from ep.transport.device_group import DeviceGroup
from layers.optional import load
from moe_kernels import TokenBatch, dequantize_rows, quantize_rows

INSTALL = (
    "pip install 'moesaic[deepep]' (sgl-deep-ep, which provides deep_ep; the project named deep-ep cannot be built)"
)
ROUND_TOKENS = 4  # ranks * tokens must be a multiple of it


class DeepEpBuffer:
    """One buffer for the kernels of both kinds, because NVSHMEM can be started once only.

    The high-throughput kernels leave their traces in memory that the low-latency ones want to find zero: `clean`
    between.
    """

    def __init__(self, group: DeviceGroup, hidden_size: int, num_slots: int, high_throughput: bool, few: int) -> None:
        """num_slots: of each rank; few: the most tokens of a rank in a low-latency exchange; 0: there are none."""
        self.deep_ep = load("deep_ep", INSTALL)
        buffer = self.deep_ep.Buffer
        self.num_experts = group.size * num_slots
        self.max_tokens = -(-few // ROUND_TOKENS) * ROUND_TOKENS
        self.dirty = False
        self._hidden_size = hidden_size
        row_bytes = hidden_size * 2  # of bfloat16
        num_nvl_bytes = num_rdma_bytes = 0
        if high_throughput:
            for config in (buffer.get_dispatch_config(group.size), buffer.get_combine_config(group.size)):
                num_nvl_bytes = max(num_nvl_bytes, config.get_nvl_buffer_size_hint(row_bytes, group.size))
                num_rdma_bytes = max(num_rdma_bytes, config.get_rdma_buffer_size_hint(row_bytes, group.size))
        # A queue pair per local expert for the low-latency kernels; the others, between nodes, want one per
        # multiprocessor they take.
        num_qps = max(buffer.num_sms if high_throughput else 0, num_slots if few else 0)
        if few:
            size = buffer.get_low_latency_rdma_size_hint(self.max_tokens, hidden_size, group.size, self.num_experts)
            num_rdma_bytes = max(num_rdma_bytes, size)
        self.buffer: Any = buffer(
            None,
            num_nvl_bytes=num_nvl_bytes,
            num_rdma_bytes=num_rdma_bytes,
            low_latency_mode=few > 0,
            num_qps_per_rank=num_qps,
            explicitly_destroy=True,
            enable_shrink=few > 0,
            comm=group.comm,
        )
        group.at_end(self.buffer.destroy)

    def clean(self) -> None:
        """All ranks at once, when a low-latency step follows others."""
        if self.dirty:
            self.buffer.clean_low_latency_buffer(self.max_tokens, self._hidden_size, self.num_experts)
            self.dirty = False


def packed(x_TD: Tensor, fp8: bool) -> Tensor | tuple[Tensor, Tensor]:
    """As the kernels take rows: bfloat16, or (float8_e4m3fn, float32 scales)."""
    return quantize_rows(x_TD) if fp8 else x_TD.contiguous()


def arrived(
    event: Any,
    rows: Tensor | tuple[Tensor, Tensor],
    slot_NK: Tensor,
    weight_NK: Tensor,
    handle: object,
    count: Tensor | None = None,
) -> Arrived:
    """Tokens that were on their way, each with its choices among the slots of this rank (-1: elsewhere). count: how
    many came; what lies behind them is anything. None: all."""
    event.current_stream_wait()
    slot_NK = slot_NK.to(torch.int64)
    if count is not None:
        came_N1 = torch.arange(slot_NK.shape[0], device=slot_NK.device).unsqueeze(1) < count
        slot_NK = slot_NK.masked_fill(~came_N1, -1)
    x_ND = dequantize_rows(*rows, torch.bfloat16) if isinstance(rows, tuple) else rows
    return Arrived(TokenBatch(x_ND, slot_NK, weight_NK, 0, torch.bfloat16), handle)


def combined(buffer: Any, y: Tensor, handle: object, out_TD: Tensor, **how: bool) -> Later[Tensor]:
    """The sums of the ranks' rows, unweighted. how: what the buffer calls an asynchronous call."""
    previous = buffer.capture()
    sum_TD, _, event = buffer.combine(
        y.contiguous(), handle, previous_event=previous, allocate_on_comm_stream=True, **how
    )
    return Later(_copied, event, sum_TD, out_TD)


def _copied(event: Any, sum_TD: Tensor, out_TD: Tensor) -> Tensor:
    """Sums that were on their way, which the library has put into a tensor of its own."""
    event.current_stream_wait()
    return out_TD.copy_(sum_TD)
