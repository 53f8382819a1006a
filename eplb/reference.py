"""Slow and plain answers that the fast code is compared with.

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
