"""Exact min-max shares of one layer, in plain Python: the specification that native/src/eplb.h follows step by step.

The copies of an expert share its load in any proportion. Wanted are the flows (expert, rank) -> load whose rank loads
are lexicographically least when sorted from the fullest rank down. They exist, and the loads (not the flows) are
unique.

Legend: G ranks, J experts with copies on several ranks, M copies of one of them.
"""

from __future__ import annotations

from collections import deque

_TOLERANCE = 1e-9  # of the mean rank load


class Flows:
    """hosts_JM: the distinct ranks of each expert; flow_JM: any split of its load to begin with (the nearer to the
    solution the quicker); load_G: the load of each rank with those flows. `solve` changes flow_JM and load_G in
    place."""

    def __init__(self, hosts_JM: list[list[int]], flow_JM: list[list[float]], load_G: list[float]) -> None:
        self.hosts_JM = hosts_JM
        self.flow_JM = flow_JM
        self.load_G = load_G
        self._copies_of: list[list[tuple[int, int]]] = [[] for _ in load_G]  # rank -> (expert, its copy there)
        for j, hosts in enumerate(hosts_JM):
            for m, rank in enumerate(hosts):
                self._copies_of[rank].append((j, m))
        self._open = [True] * len(load_G)
        self._eps = _TOLERANCE * sum(load_G) / max(1, len(load_G))

    def solve(self) -> None:
        """Level the set of ranks that the fullest one can give load to; where it stays uneven it splits. Finite and
        exact.

        A set closed under "can give load to" keeps its total whatever the shares, so its mean is a lower bound of its
        fullest rank: once such a set is level and no rank outside is fuller, nothing better exists for it, and it is
        put aside.
        """
        self._open = [bool(copies) for copies in self._copies_of]
        while any(self._open):
            top = max(
                (rank for rank, free in enumerate(self._open) if free), key=lambda rank: (self.load_G[rank], -rank)
            )
            reached = self.reach(top)
            target = sum(self.load_G[rank] for rank in reached) / len(reached)
            moved = False
            for rank in reached:
                while self.load_G[rank] - target > self._eps and self._push(rank, target):
                    moved = True
            # All open ranks, because a fuller one may have stayed outside that can give load to this set.
            level = all(load - target <= self._eps for load, free in zip(self.load_G, self._open, strict=True) if free)
            if level or not moved:
                for rank in reached:
                    self._open[rank] = False
        self._open = [True] * len(self._open)

    def _next(self, rank: int) -> list[tuple[int, int, int, int]]:
        """(other rank, expert, its copy here, its copy there) for all open ranks that `rank` can give load to."""
        return [
            (other, j, m, k)
            for j, m in self._copies_of[rank]
            if self.flow_JM[j][m] > self._eps
            for k, other in enumerate(self.hosts_JM[j])
            if self._open[other]
        ]

    def reach(self, start: int) -> list[int]:
        """The ranks that `start` can give load to, directly or through others; itself first. Only those not yet put
        aside while solving, all of them before and after."""
        reached, seen = [start], {start}
        for rank in reached:
            for other, _, _, _ in self._next(rank):
                if other not in seen:
                    seen.add(other)
                    reached.append(other)
        return reached

    def _push(self, start: int, target: float) -> bool:
        """Send load from `start` along a shortest path to a rank below the target; False when there is none."""
        came: dict[int, tuple[int, int, int, int] | None] = {
            start: None
        }  # rank -> (from, expert, copy there, copy here)
        queue = deque([start])
        while queue:
            rank = queue.popleft()
            if target - self.load_G[rank] > self._eps:
                break
            for other, j, m, k in self._next(rank):
                if other not in came:
                    came[other] = (rank, j, m, k)
                    queue.append(other)
        else:
            return False
        amount = min(self.load_G[start] - target, target - self.load_G[rank])
        path, end = [], rank
        while (step := came[rank]) is not None:
            path.append(step)
            amount = min(amount, self.flow_JM[step[1]][step[2]])
            rank = step[0]
        for _, j, m, k in path:
            self.flow_JM[j][m] -= amount
            self.flow_JM[j][k] += amount
        self.load_G[start] -= amount
        self.load_G[end] += amount
        return True
