"""Copies of experts into slots of ranks, one layer, in plain Python: the specification that native/src/eplb_pack.cpp
follows.

Shares can even out a layer later without moving anything, but only between ranks that have a copy of an expert in
common, directly or through others. So copies are spread to link as many ranks as can be (all of them, with a spare slot
per rank), and every rank gets as many copies of such experts as any other. Placed for even shares, the shares then have
room both ways. Copies of an expert are not all in one failure domain, if that can be.

Legend: G ranks, S slots of a rank, E logical experts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

_FULL = 1e300  # the load of a rank without room
_NEAR, _LINKED, _HERE = 1, 2, 4  # why a rank is a worse place for another copy of an expert


def pack_layer(
    load_E: Sequence[float],
    num_slots: int,
    domain_G: Sequence[int],
    *,
    theta: float,
    min_copies: int = 1,
    linked: bool = True,
    first: int = 0,
) -> list[list[int]]:
    """For each rank its experts, at most num_slots of them; all slots are used unless every expert is on every rank.

    domain_G: the failure domain of each rank, 0 <= label < G. theta: heavy experts get further copies until no copy
    carries more than theta times the mean rank load; then experts with a single copy get a second one, the heaviest
    first; then again the greatest load per copy. 0 lets the load alone decide, 1 covers as many experts as the load
    allows. linked False: largest copy first onto the emptiest rank, nothing else. first: the rank that ties go to.
    """
    return _Packer(load_E, num_slots, domain_G, min_copies, first).pack(theta, linked)


def _tie_order(num_ranks: int, first: int) -> list[int]:
    """`first`, then ranks far from each other: what is uneven adds up to even over layers and domains."""
    stride = max(1, num_ranks * 5 // 8)
    while math.gcd(stride, num_ranks) > 1:
        stride += 1
    return [(first + i * stride) % num_ranks for i in range(num_ranks)]


class _Packer:
    def __init__(
        self, load_E: Sequence[float], num_slots: int, domain_G: Sequence[int], min_copies: int, first: int
    ) -> None:
        self.w, self.domain, self.num_slots = load_E, domain_G, num_slots
        num_ranks = len(domain_G)
        self.ranks = _tie_order(num_ranks, first)
        self.ids: list[list[int]] = [[] for _ in range(num_ranks)]
        self.load = [0.0] * num_ranks
        self.copies = [min_copies] * len(load_E)
        self.quotient = [self._quotient(e) for e in range(len(load_E))]

    def pack(self, theta: float, linked: bool) -> list[list[int]]:
        self._count_copies(theta)
        order = sorted(range(len(self.w)), key=lambda e: (-(self.w[e] / self.copies[e]), e))
        if linked:
            self._place_links([e for e in order if self.copies[e] > 1])
            order = [e for e in order if self.copies[e] == 1]
        for e in order:
            chosen: set[int] = set()
            for _ in range(self.copies[e]):
                rank = min((g for g in self.ranks if g not in chosen), key=self.load.__getitem__)
                if self.load[rank] < _FULL:
                    self._put(rank, e)
                    chosen.add(rank)
        if len(set(self.domain)) > 1:
            self._cross()
        return self.ids

    def _quotient(self, e: int) -> float:
        """The load per copy; -1 where every rank has a copy."""
        return self.w[e] / self.copies[e] if self.copies[e] < len(self.domain) else -1.0

    def _add_copy(self, e: int) -> None:
        self.copies[e] += 1
        self.quotient[e] = self._quotient(e)

    def _divide(self, spare: int, target: float) -> int:
        """Another copy for the greatest load per copy as long as that is above the target; returns the slots left."""
        while spare > 0:
            top = max(range(len(self.w)), key=self.quotient.__getitem__)
            if self.quotient[top] <= target:
                break
            self._add_copy(top)
            spare -= 1
        return spare

    def _count_copies(self, theta: float) -> None:
        num_ranks, total = len(self.domain), 0.0
        for weight in self.w:
            total += weight
        spare = self._divide(num_ranks * self.num_slots - sum(self.copies), theta * total / num_ranks)
        for e in sorted(range(len(self.w)), key=lambda e: (-self.w[e], e)):
            if spare > 0 and self.copies[e] == 1 and num_ranks > 1:
                self._add_copy(e)
                spare -= 1
        self._divide(spare, -0.5)

    def _put(self, rank: int, e: int) -> None:
        self.ids[rank].append(e)
        self.load[rank] += self.w[e] / self.copies[e]
        if len(self.ids[rank]) == self.num_slots:
            self.load[rank] = _FULL

    def _place_links(self, experts: list[int]) -> None:
        """Each copy goes to a rank with as few copies of such experts as any, then to another failure domain and to
        ranks not yet linked with those chosen before, then to the emptiest."""
        num_ranks = len(self.domain)
        group = list(range(num_ranks))  # ranks that copies link have the same number
        links = [0] * num_ranks
        for e in experts:
            clash = [0] * num_ranks
            chosen: list[int] = []
            for _ in range(self.copies[e]):
                free = [g for g in self.ranks if self.load[g] != _FULL and clash[g] < _HERE]
                if not free:
                    break
                best = min(free, key=lambda g: (links[g], clash[g], self.load[g]))
                self._put(best, e)
                links[best] += 1
                chosen.append(best)
                for g in range(num_ranks):
                    clash[g] |= (_NEAR if self.domain[g] == self.domain[best] else 0) | (
                        _LINKED if group[g] == group[best] else 0
                    )
                clash[best] |= _HERE
            joined = {group[g] for g in chosen}
            group = [group[chosen[0]] if number in joined else number for number in group]

    def _cross(self) -> None:
        """An expert whose copies all ended up in one domain changes places with the expert elsewhere that is most
        like it."""
        domains_E: list[Counter[int]] = [Counter() for _ in self.w]
        for rank, experts in enumerate(self.ids):
            for e in experts:
                domains_E[e][self.domain[rank]] += 1
        for e, count in enumerate(self.copies):
            if count < 2 or len(domains_E[e]) > 1:
                continue
            pairs = [
                (abs(self.w[f] / self.copies[f] - self.w[e] / count), g, h, f)
                for g, here in enumerate(self.ids)
                if e in here
                for h, there in enumerate(self.ids)
                if self.domain[h] != self.domain[g]
                for f in there
                if f not in here and self._stays_spread(f, domains_E[f], self.domain[h], self.domain[g])
            ]
            if not pairs:
                continue
            _, g, h, f = min(pairs, key=lambda pair: pair[0])
            near, far = self.domain[g], self.domain[h]
            domains_E[e] = domains_E[e] - Counter([near]) + Counter([far])
            domains_E[f] = domains_E[f] - Counter([far]) + Counter([near])
            a, b = self.ids[g].index(e), self.ids[h].index(f)
            self.ids[g][a], self.ids[h][b] = f, e

    def _stays_spread(self, e: int, domains: Counter[int], without: int, plus: int) -> bool:
        return self.copies[e] == 1 or len(domains - Counter([without]) + Counter([plus])) > 1
