"""Expert parallelism by FlashInfer's one-sided NVLink kernels (flashinfer.comm.MoeAlltoAll).

Legend: T tokens of this rank, D hidden size, K experts per token, G ranks, M room for tokens of a rank, B blocks of a
row.

Every rank has room for M tokens of each other: what arrives is [G, M, ...], of which the tokens without an expert here,
and the places where none came, are marked. combine adds up the ranks' rows and does not weight them; the experts have.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ep.backends.dispatchers import StepState
from ep.protocol import Arrived, Later, Pending, Ready, Routing
from ep.transport.device_group import DeviceGroup
from layers.optional import load
from moe_kernels import Layout, TokenBatch, dequantize_rows, quantize_rows

INSTALL = "pip install 'moesaic[flashinfer]'"
_NOBODY = -1  # the slot of a token that has no expert here


class OneSided:
    """One lane.

    The library keeps one workspace for all objects that agree in every number, in one process. Lanes must not share it:
    each asks for a little more than the one before.
    """

    layout = Layout.RAGGED

    def __init__(
        self,
        group: DeviceGroup,
        num_slots: int,
        hidden_size: int,
        dtype: torch.dtype,
        max_tokens: int,
        fp8: bool,
        lane: int,
        few: int = 0,
        state: StepState | None = None,
    ) -> None:
        """max_tokens: of a rank in one exchange. state: says how many there are in this step, so that no more room than
        that is taken, but for `few` of them always the same: ranks that replay a graph and others agree on it. None:
        max_tokens."""
        self._comm: Any = load("flashinfer.comm", INSTALL)
        self._group = group
        self._num_slots = num_slots
        self._hidden_size, self._dtype = hidden_size, dtype
        self._max_tokens = max_tokens
        self._fp8 = fp8
        self._lane = lane
        self._few = few
        self._state = state
        self._exchange: Any = None
        self._top_k = 0

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Pending[Arrived]:
        slot_TK = routing.slot_TK.to(torch.int32)
        exchange = self._exchange_for(slot_TK.shape[1])
        most = self._max_tokens if self._state is None else max(1, self._few, self._state.largest)
        x, scales = (x_TD.contiguous(), []) if not self._fp8 else _quantized(x_TD)
        slot_GMK, weight_GMK, *rows = exchange.dispatch(
            slot_TK,
            [slot_TK, routing.weight_TK.contiguous(), x, *scales],
            most,
            invalid_token_expert_id=_NOBODY,
            expert_id_payload_index=0,
        )
        top_k = slot_TK.shape[1]
        x_ND = rows[0].reshape(-1, x.shape[1])
        if self._fp8:
            x_ND = dequantize_rows(x_ND.view(torch.float8_e4m3fn), rows[1].flatten(0, 1), self._dtype)
        first = self._group.rank * self._num_slots
        slot_NK = slot_GMK.reshape(-1, top_k).to(torch.int64)
        tokens = TokenBatch(x_ND, slot_NK, weight_GMK.reshape(-1, top_k), first, self._dtype)
        return Ready(Arrived(tokens, most))

    def combine(self, y: Tensor, ticket: object, out_TD: Tensor) -> Pending[Tensor]:
        assert isinstance(ticket, int)
        y_GMD = y.contiguous().view(self._group.size, ticket, self._hidden_size)
        return Later(out_TD.copy_, self._exchange.combine(y_GMD, ticket))

    def close(self) -> None:
        """The library keeps its workspaces."""

    def _exchange_for(self, top_k: int) -> Any:
        """Made with the first exchange, which is when the number of choices is known; all ranks come here together."""
        if self._exchange is None:
            comm, size = self._comm, self._group.size
            num_experts = size * self._num_slots
            mapping = comm.Mapping(
                world_size=size, rank=self._group.rank, tp_size=size, moe_ep_size=size, moe_tp_size=1
            )
            workspace = comm.MoeAlltoAll.get_moe_workspace_size_per_rank(
                size, top_k, self._max_tokens, self._hidden_size
            )
            self._exchange = comm.MoeAlltoAll(
                mapping,
                self._max_tokens,
                top_k,
                num_experts,
                workspace_size_per_rank=workspace + 256 * self._lane,
                mnnvl_config=load("flashinfer.comm.mnnvl", INSTALL).MnnvlConfig(comm_backend=self._group.comm),
            )
            self._top_k = top_k
        assert top_k == self._top_k, "all layers of a model choose equally many experts"
        return self._exchange


def _quantized(x_TD: Tensor) -> tuple[Tensor, list[Tensor]]:
    value_TD, scale_TB = quantize_rows(x_TD)
    return value_TD.view(torch.uint8), [scale_TB]
