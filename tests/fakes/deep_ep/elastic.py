"""deep_ep.ElasticBuffer (v2), without its expanded layout.

Legend: T tokens of this rank, H hidden size, K experts per token, R ranks, N rows arrived.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from fake_cuda_graph import launch
from fake_world import Late, cat_fp8, new_world, poison, unwritten
from torch import Tensor

from deep_ep.legacy import EventOverlap, Rows, check_choices, check_rows, local_choices


@dataclass
class EPHandle:
    """A graph repeats what fills it, with another number each time."""

    do_expand: bool
    num_experts: int
    num_max_tokens_per_rank: int
    topk_idx: Tensor
    psum_num_recv_tokens_per_scaleup_rank: Tensor
    num_recv_tokens_per_expert_list: list[int] = field(default_factory=list)
    number: int = 0
    arrived: list[int] = field(default_factory=list)
    sent: list[Tensor] = field(default_factory=list)


class ElasticBuffer:
    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        def gather(value: Any) -> list[Any]:
            values: list[Any] = [None] * group.size()
            dist.all_gather_object(values, value, group)
            return values

        # deep_ep/utils/comm.py takes the address of NCCL's communicator, which is there after the first collective.
        backend = group._get_backend(torch.device("cpu"))
        assert backend._get_sequence_number_for_group() > 0, "_comm_ptr() is 0: the group has had no collective"
        # csrc/kernels/backend/nccl.cu: without the variable it wants InfiniBand for more than one rank, on one node too.
        assert os.environ.get("EP_DISABLE_GIN") == "1" and not allow_hybrid_mode, "railedGinType != NONE"
        assert num_bytes is not None or (num_max_tokens_per_rank > 0 and hidden > 0)
        self.rank_idx, self.num_ranks = group.rank(), group.size()
        self.world = new_world(self.num_ranks, self.rank_idx, gather)
        self._most, self._hidden, self._fp8 = num_max_tokens_per_rank, hidden, use_fp8_dispatch
        self._explicitly_destroy = explicitly_destroy
        self._calls = 0

    def destroy(self) -> None:
        assert self._explicitly_destroy
        self.world.kill(self.rank_idx)

    @staticmethod
    def capture() -> EventOverlap:
        return EventOverlap(Late())

    def dispatch(
        self,
        x: Rows,
        topk_idx: Tensor,
        topk_weights: Tensor,
        num_experts: int,
        num_max_tokens_per_rank: int | None = None,
        previous_event: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
    ) -> tuple[Rows, Tensor, Tensor, EPHandle, EventOverlap]:
        """Without do_cpu_sync there are rows for the worst case, of which those past the last prefix sum are unwritten; nothing
        then asks the host, so a graph can hold it."""
        assert previous_event is None or allocate_on_comm_stream
        assert not do_expand, "the fake has the plain layout only"
        x_TH, scale = check_rows(x)
        most = num_max_tokens_per_rank or self._most
        assert x_TH.shape[0] <= most <= self._most and x_TH.shape[1] == self._hidden
        assert scale is None or self._fp8, "the buffer was not made for FP8"
        assert topk_weights.dtype is torch.float32 and topk_weights.is_contiguous()
        psum = torch.zeros(self.num_ranks, dtype=torch.int32)
        handle = EPHandle(do_expand, num_experts, most, topk_idx.clone(), psum)
        payloads = [x_TH, topk_weights] if scale is None else [x_TH, topk_weights, scale]
        late = Late()
        if do_cpu_sync is None or do_cpu_sync:
            psum.tolist()  # the host waits for it
            rows = self._send(handle, payloads)
            held = [unwritten(sum(handle.arrived), *part.shape[1:], dtype=part.dtype) for part in rows]
            of_experts = rows[-1][rows[-1] >= 0]
            num_local = num_experts // self.num_ranks
            handle.num_recv_tokens_per_expert_list = torch.bincount(of_experts, minlength=num_local).tolist()
            _hold(late, held, rows)
        else:
            room = self.num_ranks * most
            held = [unwritten(room, *part.shape[1:], dtype=part.dtype) for part in (*payloads, topk_idx)]
            launch(lambda: _hold(late, held, self._send(handle, payloads)))
        event = _event(late, async_with_compute_stream)
        recv_x: Rows = held[0] if scale is None else (held[0], held[2])
        return recv_x, held[-1], held[1], handle, event

    def _send(self, handle: EPHandle, payloads: list[Tensor]) -> list[Tensor]:
        """What comes in return: rows, weights, perhaps scales, and local choices."""
        x_TH, topk_weights, *scales = payloads
        topk_idx, most = handle.topk_idx, handle.num_max_tokens_per_rank
        check_choices(topk_idx, handle.num_experts, self.num_ranks, 32)
        num_local = handle.num_experts // self.num_ranks
        parcels: list[Any] = []
        handle.sent = []
        for rank in range(self.num_ranks):
            token_N, idx_NK, weight_NK = local_choices(topk_idx, topk_weights, rank, num_local)
            rows_N = x_TH.view(torch.uint8)[token_N].view(x_TH.dtype)
            parcels.append((most, [rows_N, weight_NK, *(scale[token_N] for scale in scales), idx_NK]))
            handle.sent.append(token_N)
        self._calls += 1
        handle.number = self._calls
        came = self.world.exchange(("dispatch", handle.number), self.rank_idx, parcels)
        assert {limit for limit, _ in came.values()} == {most}, "all ranks must hold the same value"
        parts = [came[rank][1] for rank in range(self.num_ranks)]
        handle.arrived = [part[-1].shape[0] for part in parts]
        handle.psum_num_recv_tokens_per_scaleup_rank.copy_(torch.tensor(handle.arrived).cumsum(0))
        return [cat_fp8(list(column)) for column in zip(*parts, strict=True)]

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Any = None,
        previous_event: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Adds what the ranks made of a token; weights nothing."""
        assert topk_weights is None and bias is None
        assert x.dtype is torch.bfloat16 and x.is_contiguous() and x.shape[1] % 256 == 0
        late = Late()
        result = unwritten(handle.topk_idx.shape[0], x.shape[1], dtype=torch.bfloat16)
        launch(lambda: late.into(result, self._send_back(handle, x)))
        return result, None, _event(late, async_with_compute_stream)

    def _send_back(self, handle: EPHandle, x: Tensor) -> Tensor:
        valid = x[: sum(handle.arrived)].clone()
        assert not valid.isnan().any(), "rows that came must be given back"
        parcels = list(torch.split(valid, handle.arrived))
        came = self.world.exchange(("combine", handle.number), self.rank_idx, parcels)
        sums = torch.zeros(handle.topk_idx.shape[0], x.shape[1], dtype=torch.float32)
        for rank, token_N in enumerate(handle.sent):
            sums.index_add_(0, token_N, came[rank].float())
        return sums.to(torch.bfloat16)


def _hold(late: Late, held: list[Tensor], rows: list[Tensor]) -> None:
    """They come into the first places; the rest is unwritten."""
    for holder, part in zip(held, rows, strict=True):
        late.into(poison(holder)[: part.shape[0]], part)


def _event(late: Late, asynchronous: bool) -> EventOverlap:
    if not asynchronous:
        launch(late.arrive)
    return EventOverlap(late if asynchronous else None)
