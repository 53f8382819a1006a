"""A few moves that help a layer most, in plain Python: the specification that native/src/eplb_moves.cpp follows.

A move brings an expert to a slot: another copy in the place of a copy that can be spared, or two experts change places.
Each candidate is judged with the shares that would be best after it.

Legend: G ranks, S slots of a rank, E logical experts, J experts with copies on several ranks, M copies of one of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from eplb.flow import Flows
from eplb.kernels import LayerMoves

_LEAST = 1e-4  # gain of a move on the way to a better place
_EXPERTS = 2  # of the fullest set, the heaviest ones, that are tried
_SPARES = 8  # slots that can be given up, the ones that do least harm
_TARGETS = 4  # exchanges; they are looked for on as many of the emptiest ranks, or on
_SMALL = 4  # all when the fullest set has no more ranks than this


@dataclass(frozen=True, slots=True)
class _Move:
    score: float
    gain: float  # of score per expert brought
    loads: tuple[tuple[int, int, int], ...] = ()


def improve_layer(
    ids_GS: list[list[int]],
    load_E: Sequence[float],
    alive: Sequence[bool],
    domain_G: Sequence[int],
    *,
    max_loads: int,
    min_gain: float,
    min_copies: int = 1,
    keep_coverage: bool = True,
) -> LayerMoves:
    """The moves to make, at most max_loads experts brought, and the balancedness they gain; ids_GS is changed
    accordingly.

    Takes the best move again and again, however small its gain, for often only several together help; then goes back to
    the last point where every expert brought was worth min_gain on average. keep_coverage: no rank and no failure
    domain comes to hold alone more experts than the worst one did, or than one per rank above the least possible
    (eplb.coverage).
    """
    layer = _Layer(ids_GS, load_E, alive, domain_G, min_copies)
    loads: list[tuple[int, int, int]] = []
    replaced: list[int] = []
    kept, gain, first = 0, 0.0, 0.0
    while layer.mean > 0 and len(loads) < max_loads:
        layer.solve()
        if not loads:
            first = layer.score_now
        if 1.0 - layer.score_now < min_gain:
            break
        best = layer.best_move(swaps=max_loads - len(loads) >= 2, keep_coverage=keep_coverage)
        if not best.loads:
            break
        for rank, slot, expert in best.loads:
            loads.append((rank, slot, expert))
            replaced.append(ids_GS[rank][slot])
            ids_GS[rank][slot] = expert
        if best.score - first >= min_gain * len(loads):
            kept, gain = len(loads), best.score - first
    for (rank, slot, _), expert in reversed(list(zip(loads[kept:], replaced[kept:], strict=True))):
        ids_GS[rank][slot] = expert
    return LayerMoves(loads[:kept], gain)


class _Layer:
    def __init__(
        self,
        ids_GS: list[list[int]],
        load_E: Sequence[float],
        alive: Sequence[bool],
        domain_G: Sequence[int],
        min_copies: int,
    ) -> None:
        self.ids, self.w, self.alive, self.domain, self.min_copies = ids_GS, load_E, alive, domain_G, min_copies
        self.living = [rank for rank, lives in enumerate(alive) if lives]
        self.mean = 0.0
        for weight in load_E:
            self.mean += weight
        self.mean /= len(self.living)

    def solve(self) -> None:
        """The best shares of the present ids, the set of ranks that share the fullest level, and who covers whom."""
        hosts: list[list[int]] = [[] for _ in self.w]
        for rank in self.living:
            for expert in self.ids[rank]:
                if expert >= 0 and (not hosts[expert] or hosts[expert][-1] != rank):
                    hosts[expert].append(rank)
        self.hosts = hosts
        self.index = {e: j for j, e in enumerate(e for e in range(len(self.w)) if len(hosts[e]) > 1)}
        load = [0.0] * len(self.ids)
        for e, ranks in enumerate(hosts):
            for rank in ranks:
                load[rank] += self.w[e] / len(ranks)
        flow = [[self.w[e] / len(hosts[e])] * len(hosts[e]) for e in self.index]
        self.base = Flows([hosts[e] for e in self.index], flow, load)
        self.base.solve()
        self.score_now = self._score(self.base.load_G)
        self._count_alone()
        fullest = max(self.living, key=lambda rank: (self.base.load_G[rank], -rank))
        self.top = self.base.reach(fullest)
        inside = set(self.top)
        self.outside = sorted((g for g in self.living if g not in inside), key=lambda g: (self.base.load_G[g], g))
        donors = [e for e, ranks in enumerate(hosts) if any(rank in inside for rank in ranks)]
        self.donors = sorted(donors, key=lambda e: (-self.w[e], e))

    def best_move(self, swaps: bool, keep_coverage: bool) -> _Move:
        best = self._try_copies(_Move(0.0, _LEAST), keep_coverage)
        return self._try_swaps(best) if swaps else best

    def _score(self, load_G: list[float]) -> float:
        """mean / (64-norm of the loads): like balancedness, but the second fullest rank counts a little too."""
        total = 0.0
        for rank in self.living:
            x = load_G[rank] / self.mean
            for _ in range(6):
                x *= x
            total += x
        total /= len(self.living)
        for _ in range(6):
            total = math.sqrt(total)
        return 1.0 / total

    # ---- coverage ----

    def _only_domain(self, e: int, without: int = -1) -> int:
        """The domain that all hosts of e but `without` are in, or -1."""
        domains = {self.domain[rank] for rank in self.hosts[e] if rank != without}
        return domains.pop() if len(domains) == 1 else -1

    def _count_alone(self) -> None:
        self.alone_rank, self.alone_domain = [0] * len(self.ids), [0] * len(self.ids)
        for e, ranks in enumerate(self.hosts):
            if len(ranks) == 1:
                self.alone_rank[ranks[0]] += 1
            domain = self._only_domain(e)
            if domain >= 0:
                self.alone_domain[domain] += 1
        # One more per rank than in the most covering placement is always allowed: heavy experts may need a third copy.
        living = len(self.living)
        allowed = -(-max(0, 2 * len(self.w) - living * len(self.ids[0])) // living) + 1
        largest = max(Counter(self.domain[rank] for rank in self.living).values())
        self.most_rank = max(allowed, *self.alone_rank)
        self.most_domain = max(allowed * largest, *self.alone_domain)

    def _keeps_coverage(self, e: int, rank: int, evicted: int) -> bool:
        if evicted < 0:
            return True
        loses_rank, loses_domain = -1, -1  # who comes to hold the evicted expert alone
        others = [host for host in self.hosts[evicted] if host != rank]
        if len(others) == 1:
            loses_rank = others[0]
        if self._only_domain(evicted) < 0:
            loses_domain = self._only_domain(evicted, rank)
        freed_rank = self.hosts[e][0] if len(self.hosts[e]) == 1 else -1
        freed_domain = self._only_domain(e)
        if freed_domain == self.domain[rank]:
            freed_domain = -1
        if loses_rank >= 0 and loses_rank != freed_rank and self.alone_rank[loses_rank] >= self.most_rank:
            return False
        return not (
            loses_domain >= 0 and loses_domain != freed_domain and self.alone_domain[loses_domain] >= self.most_domain
        )

    # ---- candidates ----

    def _spares(self) -> list[tuple[float, int, int, int]]:
        """(harm, rank, slot, expert or -1): the slots outside the fullest set that can be given up, the least harm
        first.

        Harm is the load that the rank, or the other copies' ranks on average, would have without that copy.
        """
        found = []
        for rank in sorted(self.outside):
            for slot, expert in enumerate(self.ids[rank]):
                if expert < 0 or self.ids[rank].count(expert) > 1:  # twice on this rank: as good as unused
                    found.append((self.base.load_G[rank], rank, slot, -1))
                    continue
                count = len(self.hosts[expert])
                if count <= max(1, self.min_copies):
                    continue
                part, others = 0.0, 0.0
                j = self.index[expert]
                for host, flow in zip(self.base.hosts_JM[j], self.base.flow_JM[j], strict=True):
                    if host == rank:
                        part = flow
                    else:
                        others += self.base.load_G[host]
                harm = max(self.base.load_G[rank] - part, (others + part) / (count - 1))
                found.append((harm, rank, slot, expert))
        return sorted(found, key=lambda spare: spare[:3])

    def _try_copies(self, best: _Move, keep_coverage: bool) -> _Move:
        for _, rank, slot, evicted in self._spares()[:_SPARES]:
            tried = 0
            for e in self.donors:
                if tried == _EXPERTS:
                    break
                if rank in self.hosts[e] or (keep_coverage and not self._keeps_coverage(e, rank, evicted)):
                    continue
                tried += 1
                best = self._judge(best, self._with_copy(e, rank, evicted), ((rank, slot, e),))
        return best

    def _try_swaps(self, best: _Move) -> _Move:
        """Exchange of two experts that have one copy each. Of every rank outside the pair that seems best, were that
        rank alone; of those pairs the best few in earnest."""
        size, level = len(self.top), self.base.load_G[self.top[0]]
        pairs = []
        for rank in self.outside if size <= _SMALL else self.outside[:_TARGETS]:
            found = (level, -1, -1)
            for at in ((g, s) for g in self.top for s in range(len(self.ids[g]))):
                a = self.ids[at[0]][at[1]]
                if a < 0 or len(self.hosts[a]) != 1:
                    continue
                for slot, b in enumerate(self.ids[rank]):
                    if b < 0 or self.w[b] >= self.w[a] or len(self.hosts[b]) != 1:
                        continue
                    less = self.w[a] - self.w[b]
                    then = max(level - less / size, self.base.load_G[rank] + less)
                    if then < found[0]:
                        found = (then, self._slot(*at), self._slot(rank, slot))
            if found[1] >= 0:
                pairs.append(found)
        slots = len(self.ids[0])
        for _, here, there in sorted(pairs, key=lambda pair: (pair[0], pair[2]))[:_TARGETS]:
            (g, s), (h, t) = divmod(here, slots), divmod(there, slots)
            a, b = self.ids[g][s], self.ids[h][t]
            trial = self._copy()
            trial.load_G[g] += self.w[b] - self.w[a]
            trial.load_G[h] += self.w[a] - self.w[b]
            best = self._judge(best, trial, ((h, t, a), (g, s, b)))
        return best

    def _slot(self, rank: int, slot: int) -> int:
        return rank * len(self.ids[0]) + slot

    def _judge(self, best: _Move, trial: Flows, loads: tuple[tuple[int, int, int], ...]) -> _Move:
        trial.solve()
        score = self._score(trial.load_G)
        gain = (score - self.score_now) / len(loads)
        return _Move(score, gain, loads) if gain > best.gain else best

    def _copy(self) -> Flows:
        base = self.base
        return Flows([list(h) for h in base.hosts_JM], [list(f) for f in base.flow_JM], list(base.load_G))

    def _with_copy(self, e: int, rank: int, evicted: int) -> Flows:
        base = self.base
        hosts, flow = [list(h) for h in base.hosts_JM], [list(f) for f in base.flow_JM]
        load = list(base.load_G)
        if e in self.index:
            hosts[self.index[e]].append(rank)
            flow[self.index[e]].append(0.0)
        else:
            hosts.append([self.hosts[e][0], rank])
            flow.append([self.w[e], 0.0])
        if evicted >= 0:
            j = self.index[evicted]
            at = hosts[j].index(rank)
            part = flow[j][at]
            del hosts[j][at], flow[j][at]
            to = min(range(len(hosts[j])), key=lambda m: load[hosts[j][m]])
            flow[j][to] += part
            load[hosts[j][to]] += part
            load[rank] -= part
        return Flows(hosts, flow, load)
