"""The live balancer behind the interface of a scoring script: start() and observe().

Legend: L MoE layers, G ranks, S slots of a rank, E logical experts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb.balancer import Balancer, BalancerConfig
from eplb.planner import plan

Arrays = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]


class ScoredPolicy:
    """`plan` at the start, then `Balancer`, with the settings that it has by default in serving."""

    def __init__(self) -> None:
        self._balancer: Balancer | None = None

    def start(
        self, load_LE: npt.NDArray[np.float64], num_ranks: int, slots_per_rank: int, ranks_per_node: int
    ) -> Arrays:
        """(slot_to_expert [L, G, S], share [L, G, S]) from the expected loads of the first window."""
        domains = [rank // ranks_per_node for rank in range(num_ranks)]
        placement = plan(load_LE, num_ranks, slots_per_rank, failure_domains=domains).placement
        self._balancer = Balancer(placement, BalancerConfig())
        self._balancer.seed(load_LE)
        return placement.slot_to_expert, placement.share

    def observe(self, counts_LE: npt.NDArray[np.int64]) -> Arrays | None:
        """The plan to use from the next step, or None to go on; counts_LE: tokens of the step."""
        assert self._balancer is not None, "observe before start"
        decision = self._balancer.observe(counts_LE)
        return None if decision is None else (decision.placement.slot_to_expert, decision.placement.share)


def policy() -> ScoredPolicy:
    """The factory that the scoring script loads."""
    return ScoredPolicy()
