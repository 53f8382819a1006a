"""A fake of pplx-kernels on the CPU, for ranks that are threads: AllToAll.internode over the fake of NVSHMEM.

Legend: T tokens of this rank, H hidden size, K experts per token, E local experts.
"""

from __future__ import annotations

from typing import Any

import torch
from fake_cuda_graph import launch
from fake_world import poison
from nvshmem.core import this_pe
from torch import Tensor


class AllToAll:
    """Sending and receiving are two halves of one call, with the same arguments."""

    def __init__(self, **sizes: int) -> None:
        assert sizes["world_size"] % sizes["dp_size"] == 0 and sizes["world_size"] // sizes["dp_size"] > 1
        assert sizes["num_experts"] % sizes["world_size"] == 0
        assert sizes["hidden_dim_bytes"] % 16 == 0 and sizes["hidden_dim_scale_bytes"] % 16 == 0, "copied by 16 bytes"
        self._sizes = sizes
        self._world, rank = this_pe()
        assert rank == sizes["rank"] and sizes["dp_size"] == 1, "the fake has one rank per data-parallel group"
        self._rank, self._size = rank, self._world.size
        self._name = self._world.count("pplx", rank)
        self._dispatched = self._combined = 0
        self._source: list[list[tuple[int, Tensor]]] = []

    @classmethod
    def internode(
        cls,
        max_num_tokens: int,
        num_experts: int,
        experts_per_token: int,
        rank: int,
        world_size: int,
        dp_size: int,
        hidden_dim: int,
        hidden_dim_bytes: int,
        hidden_dim_scale_bytes: int,
    ) -> AllToAll:
        return cls(
            max_num_tokens=max_num_tokens,
            num_experts=num_experts,
            experts_per_token=experts_per_token,
            rank=rank,
            world_size=world_size,
            dp_size=dp_size,
            hidden_dim=hidden_dim,
            hidden_dim_bytes=hidden_dim_bytes,
            hidden_dim_scale_bytes=hidden_dim_scale_bytes,
        )

    def destroy(self) -> None:
        self._sizes = {}

    def dispatch(
        self,
        out_expert_num_tokens: Tensor,
        out_expert_x: Tensor,
        out_expert_x_scale: Tensor | None,
        dp_x: Tensor,
        dp_x_scale: Tensor | None,
        indices: Tensor,
        bound_m: Tensor | None,
        do_send: bool = True,
        do_recv: bool = True,
    ) -> None:
        sizes = self._sizes
        num_local = sizes["num_experts"] // self._size
        assert (sizes["hidden_dim_scale_bytes"] > 0) == (dp_x_scale is not None) == (out_expert_x_scale is not None)
        assert dp_x.shape[1] == sizes["hidden_dim"] and dp_x.is_contiguous() and bound_m is None
        assert dp_x.shape[1] * dp_x.element_size() == sizes["hidden_dim_bytes"]
        assert dp_x.shape[0] <= sizes["max_num_tokens"]
        assert indices.dtype is torch.uint32 and indices.shape == (dp_x.shape[0], sizes["experts_per_token"])
        assert out_expert_num_tokens.dtype is torch.int32 and out_expert_num_tokens.shape == (num_local,)
        assert out_expert_x.shape == (num_local, sizes["max_num_tokens"] * self._size, sizes["hidden_dim"])
        out = out_expert_num_tokens, out_expert_x, out_expert_x_scale
        if do_send:
            launch(self._send, dp_x, dp_x_scale, indices.view(torch.int32), *out)
        if do_recv:
            launch(self._receive, *out)

    def _send(
        self, x: Tensor, scale: Tensor | None, slot_TK: Tensor, counts: Tensor, out: Tensor, out_scale: Tensor | None
    ) -> None:
        for tensor in (counts, out, out_scale):
            if tensor is not None:
                poison(tensor)
        self._dispatched += 1
        num_local = counts.shape[0]
        assert ((slot_TK >= 0) & (slot_TK < self._size * num_local)).all(), "it has no way to say nowhere"
        parcels: list[Any] = []
        for rank in range(self._size):
            chosen = [(slot_TK == rank * num_local + e).any(1).nonzero().flatten() for e in range(num_local)]
            parcels.append(
                [(x.view(torch.uint8)[t].clone(), None if scale is None else scale[t].clone(), t) for t in chosen]
            )
        self._world.post(("pplx dispatch", self._name, self._dispatched), self._rank, parcels)

    def _receive(self, counts: Tensor, out: Tensor, out_scale: Tensor | None) -> None:
        came = self._world.take(("pplx dispatch", self._name, self._dispatched), self._rank)
        self._source = [[] for _ in range(counts.shape[0])]
        for expert in range(counts.shape[0]):
            at = 0
            for rank in sorted(came):
                rows, scale, token = came[rank][expert]
                end = at + token.shape[0]
                out.view(torch.uint8)[expert, at:end] = rows
                if out_scale is not None:
                    out_scale[expert, at:end] = scale
                self._source[expert].append((rank, token))
                at = end
            counts[expert] = at

    def combine(
        self,
        out_tokens: Tensor,
        indices: Tensor,
        weights: Tensor,
        expert_y: Tensor,
        bound_m: Tensor | None,
        do_send: bool = True,
        do_recv: bool = True,
    ) -> None:
        """Multiplies by the weights and adds."""
        assert out_tokens.dtype in (torch.bfloat16, torch.float16) and weights.dtype is torch.float32
        assert expert_y.dim() == 3 and expert_y.is_contiguous() and indices.dtype is torch.uint32
        if do_send:
            launch(self._send_back, expert_y)
        if do_recv:
            launch(self._receive_back, indices.view(torch.int32), weights, out_tokens)

    def _send_back(self, expert_y: Tensor) -> None:
        self._combined += 1
        parcels: list[Any] = [[] for _ in range(self._size)]
        for expert, parts in enumerate(self._source):
            at = 0
            for rank, token in parts:
                end = at + token.shape[0]
                number = self._rank * len(self._source) + expert
                parcels[rank].append((number, token, expert_y[expert, at:end].clone()))
                at = end
        self._world.post(("pplx combine", self._name, self._combined), self._rank, parcels)

    def _receive_back(self, slot_TK: Tensor, weights: Tensor, out_tokens: Tensor) -> None:
        sums = torch.zeros(out_tokens.shape, dtype=torch.float32)
        for parts in self._world.take(("pplx combine", self._name, self._combined), self._rank).values():
            for expert, token, rows in parts:
                weight = torch.where(slot_TK == expert, weights, 0.0).sum(1)[token]
                sums.index_add_(0, token, rows.float() * weight.unsqueeze(1))
        out_tokens.copy_(sums)
