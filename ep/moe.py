"""A mixture-of-experts layer over ranks: the heart of the engine.

Legend: T tokens, D hidden size, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import dbo.alive as alive
from dbo.steps import Steps
from ep.experts import GATED, ExpertKind, Experts
from ep.parallel import Parallel
from ep.place import SlotTable, slot_tables
from ep.protocol import AllToAll, Routing
from ep.recorder import Kind
from moe_kernels import TokenBatch, add_rows, as_dtype
from native.tape import mark

_DISPATCH, _COMBINE = int(Kind.DISPATCH), int(Kind.COMBINE)


class MoE(nn.Module):
    """out = shared(x) + sum over the chosen experts of weight * expert(x).

    router: x [T, D] -> (expert int64 [T, K], weight float32 [T, K]) (ep/router.py). lanes: one all-to-all per lane of
    overlap; layers of a model share them. table: logical expert -> slot of the group; None: the two numbers are the
    same. shared: computed by every rank on its own tokens while theirs are in flight; None: there is none. A model that
    counts sets `load`, which is shown the expert ids of every step (eplb.load.ExpertLoad.recorder), and `arrivals`,
    which is shown how many rows each slot gets (eplb.load.RowLoad.recorder). number: among all layers of the
    model, which sets it. exchanges: with other ranks; False: each rank has all of the experts, expert e in slot e, and
    there are no lanes.
    """

    def __init__(
        self,
        router: nn.Module,
        experts: Experts,
        lanes: Sequence[AllToAll],
        table: SlotTable | None = None,
        shared: nn.Module | None = None,
        exchanges: bool = True,
    ) -> None:
        super().__init__()
        self.exchanges = exchanges
        self.router = router
        self.experts = experts
        self.lanes = tuple(lanes)
        self.table = table
        self.shared = shared
        self.number = 0
        self.load: Callable[[Tensor], None] | None = None
        self.arrivals: Callable[[Tensor], None] | None = None
        self._no_tokens: Routing | None = None

    def steps(self, x_TD: Tensor, lane: int = 0) -> Steps[Tensor]:
        """[T, D] -> [T, D] in x's dtype, as a generator. A rank without tokens takes part with T = 0.

        Raises PeerLost when another rank is gone.
        """
        if not self.exchanges:
            return self._alone(x_TD)
        a2a = self.lanes[lane]
        mark(self.number)
        idle = not x_TD.shape[0]
        sent = a2a.dispatch(x_TD, self._none(x_TD) if idle else self._route(x_TD))
        # Hides the flight even without a second lane.
        shared_TD = None if idle or self.shared is None else self.shared(x_TD)
        yield
        alive.at(_DISPATCH, self.number)
        arrived = sent.wait()
        if self.arrivals is not None:
            batch = arrived.batch
            rows_S = batch.rows_of(self.experts.num_slots) if isinstance(batch, TokenBatch) else batch.rows_S
            self.arrivals(rows_S)
        back = a2a.combine(self.experts(arrived.batch), arrived.ticket, torch.empty_like(x_TD))
        yield
        alive.at(_COMBINE, self.number)
        out_TD = back.wait()
        return out_TD if shared_TD is None else add_rows(out_TD, shared_TD)

    def _alone(self, x_TD: Tensor) -> Tensor:
        routing = self._route(x_TD)
        batch = TokenBatch(as_dtype(x_TD, self.experts.dtype), routing.slot_TK, routing.weight_TK, 0, x_TD.dtype)
        out_TD: Tensor = self.experts(batch)
        return out_TD if self.shared is None else add_rows(out_TD, self.shared(x_TD))

    def update_group(self, lanes: Sequence[AllToAll], table: SlotTable) -> None:
        """Exchange with other ranks from now on; between steps only. The weights of the slots are the caller's
        business."""
        self.lanes = tuple(lanes)
        self.table = table

    def _none(self, x_TD: Tensor) -> Routing:
        """That of no tokens: it is always the same."""
        if self._no_tokens is None:
            self._no_tokens = Routing(*self.router(x_TD))
        return self._no_tokens

    def _route(self, x_TD: Tensor) -> Routing:
        expert_TK, weight_TK = self.router(x_TD)
        if self.load is not None:
            self.load(expert_TK)
        return Routing(expert_TK if self.table is None else self.table(expert_TK), weight_TK)


class MoELayers:
    """Makes the MoE layers of a model, in their order, on one rank: it hosts its part of their experts, and all of them
    exchange through the same lanes."""

    def __init__(self, parallel: Parallel, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """ValueError when it is not known which experts the rank hosts."""
        placement = parallel.placement
        if placement is None:
            raise ValueError("a model with routed experts needs a placement of them")
        self._num_experts = placement.num_experts
        self._tables = iter(slot_tables(placement, parallel.rank, device))
        self._sizes = (placement.slots_per_rank, hidden_size)
        self._lanes = parallel.make_lanes(*self._sizes)
        self._dtype = dtype
        self._device = device

    def make(
        self,
        router: nn.Module,
        moe_intermediate_size: int,
        shared: nn.Module | None = None,
        kind: ExpertKind = GATED,
        whole: bool = False,
    ) -> MoE:
        """The next layer; see MoE. whole: each rank has all of its experts, and no placement knows it."""
        num_slots, hidden_size = self._sizes
        count = self._num_experts if whole else num_slots
        experts = Experts(count, hidden_size, moe_intermediate_size, self._dtype, self._device, kind)
        if whole:
            return MoE(router, experts, (), None, shared, exchanges=False)
        return MoE(router, experts, self._lanes, next(self._tables), shared)
