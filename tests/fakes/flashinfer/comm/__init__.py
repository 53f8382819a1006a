"""A fake of flashinfer.comm on the CPU, for ranks that are threads: Mapping and MoeAlltoAll.

Legend: T tokens of this rank, K experts per token, R ranks, M most tokens of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from fake_cuda_graph import launch
from fake_world import World, new_world, poison, unwritten
from torch import Tensor

from flashinfer.comm.mnnvl import MnnvlConfig


class Mapping:
    def __init__(self, world_size: int, rank: int, tp_size: int, moe_tp_size: int = -1, moe_ep_size: int = -1) -> None:
        assert tp_size == world_size, "world_size must equal to tp_size * pp_size * cp_size"
        assert moe_tp_size * moe_ep_size == tp_size
        self.moe_ep_size, self.moe_ep_rank = moe_ep_size, rank % moe_ep_size


@dataclass
class _Workspace:
    world: World
    number: int = 0
    owner: Any = None  # whose exchange is under way
    num_tokens: int = 0  # of mine in the dispatch that was asked for last
    tokens: list[Tensor] = field(default_factory=list)  # for each rank which of mine went there
    counts: list[int] = field(default_factory=list)  # how many came from each


class MoeAlltoAll:
    """One workspace for all objects that agree in every number: two exchanges in one of them destroy each other."""

    _WORKSPACE_CACHE: dict[Any, _Workspace] = {}  # noqa: RUF012

    def __init__(
        self,
        mapping: Mapping,
        max_num_tokens: int,
        top_k: int,
        num_experts: int,
        workspace_size_per_rank: int | None = None,
        hidden_size: int | None = None,
        mnnvl_config: MnnvlConfig | None = None,
        eplb_stats_num_experts: int = 0,
        enable_rank_mask: bool = False,
        *,
        backend: str = "trtllm",
    ) -> None:
        assert workspace_size_per_rank is not None or hidden_size is not None
        assert mnnvl_config is not None and backend == "trtllm"
        comm = mnnvl_config.comm_backend.Split(0, mapping.moe_ep_rank)
        self._size, self._rank = mapping.moe_ep_size, mapping.moe_ep_rank
        assert (comm.Get_rank(), comm.Get_size()) == (self._rank, self._size) and num_experts % self._size == 0
        self._most, self._top_k, self._local = max_num_tokens, top_k, num_experts // self._size
        key = workspace_size_per_rank, self._rank, self._size, max_num_tokens, eplb_stats_num_experts, backend
        if key not in self._WORKSPACE_CACHE:
            self._WORKSPACE_CACHE[key] = _Workspace(new_world(self._size, self._rank, comm.allgather))
        self._workspace = self._WORKSPACE_CACHE[key]

    @staticmethod
    def get_moe_workspace_size_per_rank(ep_size: int, top_k: int, max_num_tokens: int, hidden_size: int) -> int:
        return ep_size * max_num_tokens * (4 * hidden_size + 8 * top_k)

    def dispatch(
        self,
        token_selected_experts: Tensor,
        input_payloads: list[Tensor],
        runtime_max_tokens_per_rank: int,
        invalid_token_expert_id: int | None = None,
        expert_id_payload_index: int | None = None,
        eplb_local_stats: Tensor | None = None,
        active_rank_mask: Tensor | None = None,
    ) -> list[Tensor]:
        """A token goes once to each rank that has one of its experts; what each rank sends lies together, the rest of its
        room is unwritten. There the expert ids are replaced; a token that came keeps all of its own. Nothing asks the host."""
        space, most = self._workspace, runtime_max_tokens_per_rank
        assert most <= self._most, "runtime_max_tokens_per_rank exceeds max_num_tokens"
        assert token_selected_experts.dtype is torch.int32 and token_selected_experts.shape[1] == self._top_k
        assert token_selected_experts.shape[0] <= most
        assert all(payload.is_contiguous() for payload in input_payloads)
        assert (invalid_token_expert_id is None) == (expert_id_payload_index is None)
        space.num_tokens = token_selected_experts.shape[0]
        received = [unwritten(self._size, most, *payload.shape[1:], dtype=payload.dtype) for payload in input_payloads]
        launch(self._send, token_selected_experts, input_payloads, most, received)
        if invalid_token_expert_id is not None:
            launch(self._mark, received[expert_id_payload_index or 0], invalid_token_expert_id)
        return received

    def _send(self, chosen: Tensor, payloads: list[Tensor], most: int, received: list[Tensor]) -> None:
        space = self._workspace
        assert space.owner is None, "the workspace is in use"
        space.owner, space.number, space.tokens = self, space.number + 1, []
        parcels: list[Any] = []
        for rank in range(self._size):
            goes = (chosen // self._local == rank).any(1).nonzero().flatten()
            space.tokens.append(goes)
            parcels.append((most, [payload[goes] for payload in payloads]))
        came = space.world.exchange(("flashinfer dispatch", space.number), self._rank, parcels)
        assert {limit for limit, _ in came.values()} == {most}, "all ranks pass the same number"
        space.counts = []
        for out in received:
            poison(out)
        for rank, (_, parts) in came.items():
            for out, part in zip(received, parts, strict=True):
                out[rank, : part.shape[0]] = part
            space.counts.append(parts[0].shape[0])

    def _mark(self, ids: Tensor, invalid: int) -> None:
        for rank, count in enumerate(self._workspace.counts):
            ids[rank, count:] = invalid

    def combine(self, payload: Tensor, runtime_max_tokens_per_rank: int, payload_in_workspace: bool = False) -> Tensor:
        """Adds what the ranks made of a token; weights nothing."""
        assert payload.shape[:2] == (self._size, runtime_max_tokens_per_rank) and payload.is_contiguous()
        result = unwritten(self._workspace.num_tokens, payload.shape[2], dtype=payload.dtype)
        launch(self._send_back, payload, result)
        return result

    def _send_back(self, payload: Tensor, result: Tensor) -> None:
        space = self._workspace
        assert space.owner is self, "combine called before successful dispatch"
        space.owner = None
        came = space.world.exchange(("flashinfer combine", space.number), self._rank, list(payload.clone()))
        sums = torch.zeros(result.shape, dtype=torch.float32)
        for rank, goes in enumerate(space.tokens):
            sums.index_add_(0, goes, came[rank][: goes.shape[0]].float())
        result.copy_(sums)
