"""deep_ep.ElasticBuffer (v2), without its expanded layout.

Legend: T tokens of this rank, H hidden size, K experts per token, R ranks, N rows arrived.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from fake_world import Late, cat_fp8, new_world, poison
from torch import Tensor

from deep_ep.legacy import EventOverlap, Rows, check_choices, check_rows, local_choices


@dataclass
class EPHandle:
    do_expand: bool
    num_experts: int
    num_max_tokens_per_rank: int
    topk_idx: Tensor
    num_recv_tokens_per_expert_list: list[int]
    psum_num_recv_tokens_per_scaleup_rank: Tensor
    number: int
    arrived: list[int]
    sent: list[Tensor]


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
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        def gather(value: Any) -> list[Any]:
            values: list[Any] = [None] * group.size()
            dist.all_gather_object(values, value, group)
            return values

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
        """Without do_cpu_sync there are rows for the worst case, of which those past the last prefix sum are unwritten."""
        assert previous_event is None or allocate_on_comm_stream
        assert not do_expand, "the fake has the plain layout only"
        x_TH, scale = check_rows(x)
        check_choices(topk_idx, num_experts, self.num_ranks, 32)
        most = num_max_tokens_per_rank or self._most
        assert x_TH.shape[0] <= most <= self._most and x_TH.shape[1] == self._hidden
        assert scale is None or self._fp8, "the buffer was not made for FP8"
        assert topk_weights.dtype is torch.float32 and topk_weights.is_contiguous()
        num_local = num_experts // self.num_ranks
        parcels: list[Any] = []
        sent = []
        for rank in range(self.num_ranks):
            token_N, idx_NK, weight_NK = local_choices(topk_idx, topk_weights, rank, num_local)
            scales = None if scale is None else scale[token_N]
            parcels.append((x_TH.view(torch.uint8)[token_N].view(x_TH.dtype), scales, idx_NK, weight_NK, most))
            sent.append(token_N)
        self._calls += 1
        came = self.world.exchange(("dispatch", self._calls), self.rank_idx, parcels)
        rows = [came[rank] for rank in range(self.num_ranks)]
        assert {row[4] for row in rows} == {most}, "all ranks must hold the same value"
        arrived = [row[2].shape[0] for row in rows]
        exact = do_cpu_sync is None or do_cpu_sync
        room = sum(arrived) if exact else self.num_ranks * most
        late = Late()

        def received(parts: list[Tensor]) -> Tensor:
            whole = cat_fp8(parts)
            held = poison(torch.empty(room, *whole.shape[1:], dtype=whole.dtype))
            late.into(held[: whole.shape[0]], whole)
            return held

        recv_x: Rows = received([row[0] for row in rows])
        if scale is not None:
            recv_x = (recv_x, received([row[1] for row in rows]))
        idx = received([row[2] for row in rows])
        weights = received([row[3] for row in rows])
        psum = torch.tensor(arrived).cumsum(0).to(torch.int32)
        of_experts = torch.cat([row[2] for row in rows])
        counts = torch.bincount(of_experts[of_experts >= 0], minlength=num_local).tolist() if exact else []
        handle = EPHandle(do_expand, num_experts, most, topk_idx.clone(), counts, psum, self._calls, arrived, sent)
        if not async_with_compute_stream:
            late.arrive()
        return recv_x, idx, weights, handle, EventOverlap(late if async_with_compute_stream else None)

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
        valid = x[: sum(handle.arrived)].clone()
        assert not valid.isnan().any(), "rows that came must be given back"
        came = self.world.exchange(("combine", handle.number), self.rank_idx, list(torch.split(valid, handle.arrived)))
        sums = torch.zeros(handle.topk_idx.shape[0], x.shape[1], dtype=torch.float32)
        for rank, token_N in enumerate(handle.sent):
            sums.index_add_(0, token_N, came[rank].float())
        late = Late()
        result = late.tensor(sums.to(torch.bfloat16))
        if not async_with_compute_stream:
            late.arrive()
        return result, None, EventOverlap(late if async_with_compute_stream else None)
