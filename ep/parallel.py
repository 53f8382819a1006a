"""A rank's place among the ranks that share the experts: what a model needs to build its MoE layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from ep.protocol import AllToAll
from eplb.placement import Placement


class Parallel(Struct, frozen=True):
    """placement is None for a model without routed experts.

    make_lanes(num_slots, hidden_size): the all-to-alls of this rank, one per lane of overlap. It is called once per
    model; every rank calls it in the same order.
    """

    rank: int
    size: int
    placement: Placement | None
    make_lanes: Callable[[int, int], Sequence[AllToAll]]
