"""deep_ep.Buffer (v1): high-throughput and low-latency kernels.

Legend: T tokens of this rank, H hidden size, K experts per token, R ranks, N rows arrived, E local experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from fake_cuda_graph import launch
from fake_world import Late, World, cat_fp8, new_world, rounded_fp8, unwritten
from torch import Tensor

topk_idx_t = torch.int64
HIDDEN = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
QP_DEPTH = 1024

Rows = Tensor | tuple[Tensor, Tensor]


class EventHandle:
    """A CUDA event."""


class EventOverlap:
    def __init__(self, late: Late | None = None) -> None:
        self._late = late

    def current_stream_wait(self) -> None:
        assert self._late is not None, "only an asynchronous call has an event to wait for"
        launch(self._late.arrive)


class Config:
    def __init__(self, num_sms: int) -> None:
        assert num_sms % 2 == 0
        self.num_sms = num_sms

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 128 * num_ranks * (hidden_bytes + 128) // 128 * 128

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0 if num_ranks <= 8 else self.get_nvl_buffer_size_hint(hidden_bytes, num_ranks)


def check_rows(x: Rows) -> tuple[Tensor, Tensor | None]:
    """As every kernel of both generations wants them."""
    x_TH, scale = x if isinstance(x, tuple) else (x, None)
    assert x_TH.dim() == 2 and x_TH.is_contiguous()
    assert x_TH.shape[1] * x_TH.element_size() % 16 == 0, "rows are copied by 16 bytes"
    if scale is None:
        assert x_TH.dtype is torch.bfloat16, x_TH.dtype
    else:
        assert x_TH.dtype is torch.float8_e4m3fn and scale.dtype is torch.float32
        assert x_TH.shape[1] % 128 == 0 and scale.shape == (x_TH.shape[0], x_TH.shape[1] // 128)
    return x_TH, scale


def check_choices(topk_idx: Tensor, num_experts: int, num_ranks: int, most: int) -> None:
    assert topk_idx.dtype is topk_idx_t and topk_idx.is_contiguous() and topk_idx.dim() == 2
    assert topk_idx.shape[1] <= most and num_experts % num_ranks == 0
    assert ((topk_idx >= -1) & (topk_idx < num_experts)).all()
    for row in topk_idx.tolist():
        chosen = [expert for expert in row if expert >= 0]
        assert len(set(chosen)) == len(chosen), "the experts of a token are distinct"


def local_choices(topk_idx: Tensor, weights: Tensor, rank: int, num_local: int) -> tuple[Tensor, Tensor, Tensor]:
    """tokens that go to `rank`, their local experts (-1: elsewhere), their weights (0 elsewhere)."""
    here = (topk_idx >= rank * num_local) & (topk_idx < (rank + 1) * num_local)
    token_N = here.any(1).nonzero().flatten()
    idx_NK = torch.where(here, topk_idx - rank * num_local, -1)[token_N]
    return token_N, idx_NK, torch.where(here, weights, 0.0)[token_N]


@dataclass
class _Flight:
    """A low-latency dispatch and its combine. A graph repeats them, with another number each time."""

    most: int
    hidden: int
    num_experts: int
    number: int = 0
    source: list[list[tuple[int, Tensor]]] = field(default_factory=list)  # by local expert: rank, and its tokens


class Buffer:
    num_sms = 20

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
    ) -> None:
        assert num_nvl_bytes % 128 == 0 and num_rdma_bytes % 128 == 0
        assert group is None and comm is not None, "the fake is told of the ranks by an MPI-like communicator"
        self.rank, self.group_size = comm.Get_rank(), comm.Get_size()
        self.world: World = new_world(self.group_size, self.rank, comm.allgather)
        self._nvl, self._rdma = num_nvl_bytes, num_rdma_bytes
        self._low_latency, self._qps, self._shrink = low_latency_mode, num_qps_per_rank, enable_shrink
        if num_nvl_bytes and self.group_size > 8:  # csrc/kernels/legacy/internode.cu: what traps in the first dispatch
            channels = self.num_sms // 2
            assert num_rdma_bytes > 0
            assert num_qps_per_rank == channels or num_qps_per_rank >= self.num_sms, "queue pairs of the normal kernels"
        if low_latency_mode:  # csrc/legacy/buffer.hpp
            assert self.group_size < 8 or self.group_size % 8 == 0, "ranks of whole nodes"
        self._explicitly_destroy = explicitly_destroy
        self._calls = 0
        self._dirty = False
        self._held = 0  # low-latency results not yet combined

    def destroy(self) -> None:
        assert self._explicitly_destroy
        self.world.kill(self.rank)

    @staticmethod
    def capture() -> EventOverlap:
        return EventOverlap(Late())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in RANKS, f"Unsupported number of EP ranks: {num_ranks}"
        return Config(Buffer.num_sms)

    get_combine_config = get_dispatch_config

    # ---- high throughput ----

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        self._check_stream(previous_event, async_finish, allocate_on_comm_stream)
        check_choices(topk_idx, num_experts, self.group_size, 128)
        num_local = num_experts // self.group_size
        in_rank = torch.zeros(topk_idx.shape[0], self.group_size + 1, dtype=torch.bool)
        in_rank.scatter_(1, torch.where(topk_idx >= 0, topk_idx // num_local, self.group_size), True)
        in_rank = in_rank[:, :-1].contiguous()
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).to(torch.int32)
        return in_rank.sum(0).to(torch.int32), None, per_expert, in_rank, EventOverlap(Late())

    def dispatch(
        self,
        x: Rows,
        handle: Any = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Rows, Tensor, Tensor, list[int], Any, EventOverlap]:
        assert self.group_size in (2, 4, 8), "the fake has the kernels of one node"
        assert handle is None and num_worst_tokens == 0, "the fake has the plain form only"
        assert num_tokens_per_rank is not None and is_token_in_rank is not None and num_tokens_per_expert is not None
        assert topk_idx is not None and topk_weights is not None and topk_idx.shape[1] <= 32
        assert topk_weights.dtype is torch.float32 and topk_weights.is_contiguous()
        assert topk_weights.shape == topk_idx.shape
        self._check_stream(previous_event, async_finish, allocate_on_comm_stream)
        x_TH, scale = check_rows(x)
        assert self._nvl >= 128 * self.group_size, "the buffer has no place for these kernels"
        num_local = num_tokens_per_expert.shape[0] // self.group_size
        assert num_local <= 1024
        parcels, sent = [], []
        for rank in range(self.group_size):
            token_N, idx_NK, weight_NK = local_choices(topk_idx, topk_weights, rank, num_local)
            assert num_tokens_per_rank[rank] == token_N.shape[0]
            assert torch.equal(is_token_in_rank[:, rank].nonzero().flatten(), token_N)
            scales = None if scale is None else scale[token_N]
            parcels.append((x_TH.view(torch.uint8)[token_N].view(x_TH.dtype), scales, idx_NK, weight_NK))
            sent.append(token_N)
        self._dirty = True
        self._calls += 1
        came = self.world.exchange(("dispatch", self._calls), self.rank, parcels)  # the host waits for the counts
        rows = [came[rank] for rank in range(self.group_size)]
        late = Late()
        recv_x: Rows = late.tensor(cat_fp8([row[0] for row in rows]))
        if scale is not None:
            recv_x = (recv_x, late.tensor(torch.cat([row[1] for row in rows])))
        idx = torch.cat([row[2] for row in rows])
        counts = torch.bincount(idx[idx >= 0], minlength=num_local).tolist()
        aligned = [-(-count // expert_alignment) * expert_alignment for count in counts]
        weights = late.tensor(torch.cat([row[3] for row in rows]))
        back = (self._calls, [row[2].shape[0] for row in rows], sent, x_TH.shape)
        recv_idx = late.tensor(idx)
        if not async_finish:
            late.arrive()
        return recv_x, recv_idx, weights, aligned, back, EventOverlap(late if async_finish else None)

    def combine(
        self,
        x: Tensor,
        handle: Any,
        topk_weights: Tensor | None = None,
        bias: Any = None,
        config: Config | None = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Adds what the ranks made of a token; weights nothing."""
        self._check_stream(previous_event, async_finish, allocate_on_comm_stream)
        assert bias is None and topk_weights is None, "the fake has the plain form only"
        assert x.dtype is torch.bfloat16 and x.is_contiguous()
        number, arrived, sent, shape = handle
        assert x.shape == (sum(arrived), shape[1])
        came = self.world.exchange(("combine", number), self.rank, list(torch.split(x.clone(), arrived)))
        sums = torch.zeros(shape, dtype=torch.float32)
        for rank, token_N in enumerate(sent):
            sums.index_add_(0, token_N, came[rank].float())
        late = Late()
        result = late.tensor(sums.to(torch.bfloat16))
        if not async_finish:
            late.arrive()
        return result, None, EventOverlap(late if async_finish else None)

    def _check_stream(self, previous: Any, async_finish: bool, on_comm_stream: bool) -> None:
        if on_comm_stream:
            assert previous is not None and async_finish, "allocating on the other stream wants events on both sides"

    # ---- low latency ----

    @staticmethod
    def get_low_latency_rdma_size_hint(tokens: int, hidden: int, num_ranks: int, num_experts: int) -> int:
        return -(-2 * tokens * num_experts * (2 * hidden + 16) // 128) * 128

    def clean_low_latency_buffer(self, tokens: int, hidden: int, num_experts: int) -> None:
        assert self._low_latency
        self._calls += 1
        self.world.exchange(("clean", self._calls), self.rank, [None] * self.group_size)
        self._dirty = False

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Rows, Tensor, Any, EventOverlap, Callable[[], None]]:
        """The ready rows of each expert come first, those of lower ranks before others; the rest is unwritten."""
        most, num_local = num_max_dispatch_tokens_per_rank, num_experts // self.group_size
        self._check_low_latency(x, most, num_experts)
        assert x.dtype is torch.bfloat16 and x.is_contiguous() and x.shape[0] == topk_idx.shape[0] <= most
        assert return_recv_hook and not async_finish, "the fake has the form with a hook only"
        assert not use_ue8m0 and not round_scale
        flight = _Flight(most, x.shape[1], num_experts)
        launch(self._send_rows, flight, use_fp8, x, topk_idx)
        room = self.group_size * most
        recv = unwritten(num_local, room, x.shape[1], dtype=torch.float8_e4m3fn if use_fp8 else x.dtype)
        # Scales lie column by column.
        scales = unwritten(num_local, x.shape[1] // 128, room, dtype=torch.float32).transpose(1, 2) if use_fp8 else None
        count = unwritten(num_local, dtype=torch.int32)
        hook = partial(launch, self._receive_rows, flight, recv, scales, count)
        return (recv if scales is None else (recv, scales)), count, flight, EventOverlap(), hook

    def _send_rows(self, flight: _Flight, use_fp8: bool, x: Tensor, topk_idx: Tensor) -> None:
        check_choices(topk_idx, flight.num_experts, self.group_size, 11)
        assert not self._dirty, "clean_low_latency_buffer after normal kernels"
        self._held += 1
        assert self._held <= 2, "there is place for two results"
        value, scale = rounded_fp8(x) if use_fp8 else (x, None)
        num_local = flight.num_experts // self.group_size
        parcels: list[Any] = []
        for rank in range(self.group_size):
            chosen = [(topk_idx == rank * num_local + e).any(1).nonzero().flatten() for e in range(num_local)]
            parcels.append(
                [(value.view(torch.uint8)[t].view(value.dtype), None if scale is None else scale[t], t) for t in chosen]
            )
        self._calls += 1
        flight.number = self._calls
        self.world.post(("ll dispatch", flight.number), self.rank, parcels)

    def _receive_rows(self, flight: _Flight, recv: Tensor, scales: Tensor | None, count: Tensor) -> None:
        came = self.world.take(("ll dispatch", flight.number), self.rank)
        flight.source = [[] for _ in range(count.shape[0])]
        for expert, source in enumerate(flight.source):
            at = 0
            for rank in sorted(came):
                rows, of_rows, token = came[rank][expert]
                end = at + rows.shape[0]
                recv.view(torch.uint8)[expert, at:end] = rows.view(torch.uint8)
                if scales is not None:
                    scales[expert, at:end] = of_rows
                source.append((rank, token))
                at = end
            count[expert] = at

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: Any,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
    ) -> tuple[Tensor, EventOverlap, Callable[[], None]]:
        """Multiplies by the weights and adds. A masked rank's experts count nothing."""
        flight: _Flight = handle
        num_local = flight.num_experts // self.group_size
        self._check_low_latency(x, flight.most, flight.num_experts)
        assert x.dtype is torch.bfloat16 and x.is_contiguous()
        assert x.shape == (num_local, self.group_size * flight.most, flight.hidden)
        assert topk_weights.dtype is torch.float32 and topk_weights.shape == topk_idx.shape
        assert return_recv_hook and not async_finish and not zero_copy and not use_logfmt
        result = unwritten(topk_idx.shape[0], flight.hidden, dtype=torch.bfloat16) if out is None else out
        assert result.dtype is torch.bfloat16 and result.shape == (topk_idx.shape[0], flight.hidden)
        launch(self._send_back, flight, x)
        return result, EventOverlap(), partial(launch, self._receive_back, flight, topk_idx, topk_weights, result)

    def _send_back(self, flight: _Flight, x: Tensor) -> None:
        parcels: list[Any] = [[] for _ in range(self.group_size)]
        for expert, parts in enumerate(flight.source):
            at = 0
            for rank, token in parts:
                rows = x[expert, at : at + token.shape[0]].clone()
                parcels[rank].append((self.rank * len(flight.source) + expert, token, rows))
                at += token.shape[0]
        self._held -= 1
        self.world.post(("ll combine", flight.number), self.rank, parcels)

    def _receive_back(self, flight: _Flight, topk_idx: Tensor, topk_weights: Tensor, result: Tensor) -> None:
        sums = torch.zeros(result.shape, dtype=torch.float32)
        for parts in self.world.take(("ll combine", flight.number), self.rank).values():
            for expert, token, rows in parts:
                weight = torch.where(topk_idx == expert, topk_weights, 0.0).sum(1)[token]
                sums.index_add_(0, token, rows.float() * weight.unsqueeze(1))
        result.copy_(sums)

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        assert self._shrink and mask_status.dtype is torch.int32 and mask_status.shape == (self.group_size,)
        mask_status.copy_(torch.tensor([int(rank in self.world.dead) for rank in range(self.group_size)]))

    def _check_low_latency(self, x: Tensor, most: int, num_experts: int) -> None:
        assert self._low_latency and not self._dirty, "clean_low_latency_buffer after normal kernels"
        assert x.shape[-1] in HIDDEN and x.shape[-1] % 512 == 0, "SWITCH_HIDDEN"
        assert self.group_size * most % 4 == 0 and num_experts % self.group_size == 0
        assert self._qps >= num_experts // self.group_size, "a queue pair per local expert"
        assert (most + 1) * 2 <= QP_DEPTH
        assert self._rdma >= self.get_low_latency_rdma_size_hint(most, x.shape[-1], self.group_size, num_experts)
