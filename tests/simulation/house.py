"""What the processes of a simulated server share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from configs.engine import Plan
from eplb.placement import Placement, linear_placement
from launch.signs import Signs
from tests.simulation.disk import Disk
from tests.simulation.standin import Facts
from tests.simulation.transport import Delays, Meeting
from tests.simulation.world import World

if TYPE_CHECKING:
    from tests.simulation.processes import RankProcess


class House(list[Any]):
    """What all processes of a server share. Index r: the process that is rank r now, or None."""

    def __init__(self, world: World, delays: Delays, plan: Plan, facts: Facts, hear: Callable[[Any], None]) -> None:
        super().__init__([None] * plan.data_parallel_size)
        self.world = world
        self.delays = delays
        self.plan = plan
        self.facts = facts
        self.hear = hear  # the front's socket
        self.meetings: dict[int, Meeting] = {}
        self.disk = Disk(world, delays)
        self.watch: Callable[[str, int], None] = lambda what, rank: None  # told of what happens to a rank
        self.on_fence: Callable[[RankProcess], None] = lambda process: None  # told before the monitor kills it
        self.slow_until = [0.0] * plan.data_parallel_size
        self.rings: list[list[int]] = [[] for _ in self]  # that nobody was there for
        self.next_pid = 1000
        self.ended: list[str] = []  # ranks that ended by themselves, and why
        self._placements: dict[int, Placement] = {}

    def signs(self, pid: int) -> Signs | None:
        """launch.signs.signs_of."""
        return next((process.signs() for process in self if process is not None and process.pid == pid), None)

    def grow(self, count: int) -> None:
        for _ in range(len(self), count):
            self.append(None)
            self.slow_until.append(0.0)
            self.rings.append([])

    def placement(self, num_ranks: int) -> Placement | None:
        """The one that ranks start with."""
        plan = self.plan
        if not plan.num_experts:
            return None
        if num_ranks not in self._placements:
            made = linear_placement(self.facts.num_layers, plan.num_experts, num_ranks, plan.slots_per_rank)
            self._placements[num_ranks] = made
        return self._placements[num_ranks]

    def meeting(self, epoch: int, size: int) -> Meeting:
        return self.meetings.setdefault(epoch, Meeting(self.world, self.delays, size))
