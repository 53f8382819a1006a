"""What the balancer's algorithms guarantee, native or simple (eplb/simple.py), and slow answers that they are compared
with. tests/eplb/test_algorithms.py holds them to it.

Shares (`reweight`): the rank loads are those of `min_max_loads`, the lexicographically least, fullest rank first.
Packing (`plan`): every expert has min_copies or more, never two on a rank; no rank has more than its slots, and all are
used unless every expert is on every rank; with equal failure domains a second copy is in another one.
Moves (`improve`): at most max_loads experts are brought; an expert keeps a copy on a live rank and its min_copies; no
rank and no failure domain comes to hold alone more experts than `keep_coverage` allows; the fullest rank gets no
fuller.
Renaming (`relabel`): a rank's contents stay together, and the ranks of a failure domain too; native, as many experts
stay where they are as by `most_kept`.

Legend: G ranks, E logical experts, S slots of a rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def min_max_loads(
    hosts_E: Sequence[frozenset[int]], load_E: Sequence[float], ranks: frozenset[int]
) -> dict[int, float]:
    """The lexicographically least rank loads (fullest first) over all ways to share each expert's load among its ranks.

    By definition: the fullest level is the greatest mean over sets of ranks of the load that only they can take; that
    set is level, its ranks take nothing more, and the rest is solved again. Tries all 2**G sets.
    """
    if not ranks:
        return {}
    best, tight = -1.0, frozenset[int]()
    for size in range(len(ranks), 0, -1):
        for chosen in itertools.combinations(sorted(ranks), size):
            group = frozenset(chosen)
            level = sum(w for hosts, w in zip(hosts_E, load_E, strict=True) if hosts and hosts <= group) / size
            if level > best + 1e-12:
                best, tight = level, group
    rest = [hosts - tight for hosts in hosts_E]
    left = [0.0 if hosts <= tight else w for hosts, w in zip(hosts_E, load_E, strict=True)]
    return {**dict.fromkeys(tight, best), **min_max_loads(rest, left, ranks - tight)}


def most_kept(new_GS: Sequence[Sequence[int]], old_GS: Sequence[Sequence[int]]) -> int:
    """The most experts that stay on their rank when the contents of all ranks may be exchanged. Tries all G! ways."""
    kept = [[len({*new} & {*old} - {-1}) for old in old_GS] for new in new_GS]
    return max(
        sum(row[to] for row, to in zip(kept, way, strict=True)) for way in itertools.permutations(range(len(kept)))
    )
