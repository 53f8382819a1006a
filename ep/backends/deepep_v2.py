"""Expert parallelism by DeepEP's newer kernels over NCCL (deep_ep.ElasticBuffer).

Legend: T tokens of this rank, D hidden size, K experts per token, N rows arrived (one per token and rank).

As ep/backends/deepep_ht.py: a token travels once to each rank with its choices there, and combine adds without
weighting.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ep.backends.deepep import INSTALL, arrived, combined, packed
from ep.backends.dispatchers import StepState
from ep.protocol import Arrived, Later, Pending, Routing
from ep.transport.device_group import DeviceGroup
from layers.optional import load
from moe_kernels import Layout


class ElasticBuffers:
    """The buffer that all lanes share.

    In a step in which no rank has more than `few` tokens, the host does not wait for the number of rows: tensors have
    room for the worst case of so few, and a CUDA graph can hold the exchange.
    """

    def __init__(
        self,
        group: DeviceGroup,
        num_slots: int,
        hidden_size: int,
        max_tokens: int,
        fp8: bool,
        few: int = 0,
        state: StepState | None = None,
    ) -> None:
        """max_tokens: of a rank in one exchange. state: says how many there are in this step; None: perhaps so many."""
        self.deep_ep = load("deep_ep", INSTALL)
        self.num_experts = group.size * num_slots
        self.fp8 = fp8
        self._many, self._few = _rounded(max_tokens), few
        self._state = state
        self._process_group = (
            group.process_group()
        )  # the buffer goes on with its communicator, until the group has ended it
        self.buffer: Any = self.deep_ep.ElasticBuffer(
            self._process_group,
            num_max_tokens_per_rank=self._many,
            hidden=hidden_size,
            use_fp8_dispatch=fp8,
            allow_hybrid_mode=False,  # the ranks of a DeviceGroup are on one machine
            num_gpu_timeout_secs=max(1, round(group.timeout)),
            explicitly_destroy=True,
        )
        group.at_end(self.buffer.destroy)

    @property
    def most(self) -> tuple[int, bool]:
        """The most tokens of a rank in this step, and whether the host waits for the number of rows."""
        small = self._state is not None and self._state.largest <= self._few
        return (_rounded(self._few), False) if small else (self._many, True)


def _rounded(tokens: int) -> int:
    """Kernels are compiled for each number of tokens: a power of two."""
    return 1 << max(0, tokens - 1).bit_length()


class Elastic:
    """One lane. bfloat16 only."""

    layout = Layout.RAGGED

    def __init__(self, shared: ElasticBuffers) -> None:
        self._shared = shared

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Pending[Arrived]:
        shared, buffer = self._shared, self._shared.buffer
        most, exact = shared.most
        rows, slot_NK, weight_NK, handle, event = buffer.dispatch(
            packed(x_TD, shared.fp8),
            topk_idx=routing.slot_TK.to(shared.deep_ep.topk_idx_t).contiguous(),
            topk_weights=routing.weight_TK.contiguous(),
            num_experts=shared.num_experts,
            num_max_tokens_per_rank=most,
            previous_event=buffer.capture(),
            async_with_compute_stream=True,
            allocate_on_comm_stream=True,
            do_cpu_sync=exact,
        )
        count = None if exact else handle.psum_num_recv_tokens_per_scaleup_rank[-1]
        return Later(arrived, event, rows, slot_NK, weight_NK, handle, count)

    def combine(self, y: Tensor, ticket: object, out_TD: Tensor) -> Pending[Tensor]:
        return combined(self._shared.buffer, y, ticket, out_TD, async_with_compute_stream=True)

    def close(self) -> None:
        """The group gives the buffer back."""
