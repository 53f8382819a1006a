"""Renaming the ranks of a new plan so that as much as can be stays where it is.

Legend: L MoE layers, G ranks, S slots of a rank, E logical experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from eplb.kernels import native_relabel

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]


def relabel(new_LGS: Ids, old_LGS: Ids, num_experts: int, alive: Sequence[bool], domains: Sequence[int]) -> Ids:
    """The same rank contents, given to the ranks that keep most experts in place; int32 [L, G, S].

    Exact in every layer among all renamings that keep ranks of one failure domain together (so that what the plan
    covers stays covered); with no two ranks in a domain that is all of them. Only living ranks are renamed. Within a
    rank, an expert that stays keeps its slot. Both arrays have the same shape.
    """
    groups = rank_groups(alive, domains)
    native = native_relabel(new_LGS, old_LGS, num_experts, groups)
    return _relabel_plain(new_LGS, old_LGS, num_experts, groups) if native is None else native


def _relabel_plain(new_LGS: Ids, old_LGS: Ids, num_experts: int, groups: list[list[int]]) -> Ids:
    out = new_LGS.copy()
    for layer, (new_GS, old_GS) in enumerate(zip(new_LGS, old_LGS, strict=True)):
        keep_GG = _hosts(new_GS, num_experts) @ _hosts(old_GS, num_experts).T
        for rank, to in _renamed(keep_GG, groups).items():
            out[layer, to] = _aligned(new_GS[rank], old_GS[to])
    return out


def assign(value: Floats) -> npt.NDArray[np.int64]:
    """The column of each row of a square table so that the sum of the chosen values is greatest (Hungarian method).

    Shortest augmenting paths with potentials, one row at a time: O(n**3), the inner loop vectorised.
    """
    n = len(value)
    cost = value.max(initial=0.0) - value
    row_of = np.full(n + 1, -1)  # column -> row; column n stands for "none yet"
    of_row, of_column = np.zeros(n), np.zeros(n + 1)
    for row in range(n):
        row_of[n] = row
        column = n
        least = np.full(n, np.inf)
        came = np.full(n, n)
        done = np.zeros(n + 1, dtype=bool)
        while row_of[column] >= 0:
            done[column] = True
            current = row_of[column]
            open_columns = ~done[:n]
            through = cost[current] - of_row[current] - of_column[:n]
            better = open_columns & (through < least)
            least[better] = through[better]
            came[better] = column
            following = int(np.argmin(np.where(open_columns, least, np.inf)))
            delta = least[following]
            of_row[row_of[done]] += delta
            of_column[done] -= delta
            least[open_columns] -= delta
            column = following
        while column != n:
            row_of[column] = row_of[came[column]]
            column = int(came[column])
    columns = np.empty(n, dtype=np.int64)
    columns[row_of[:n]] = np.arange(n)
    return columns


def rank_groups(alive: Sequence[bool], domains: Sequence[int]) -> list[list[int]]:
    """The living ranks whose contents may be swapped without changing what a loss uncovers: those of one failure
    domain, or all when every rank is its own."""
    living = [rank for rank, lives in enumerate(alive) if lives]
    labels = [domains[rank] for rank in living] if domains else living
    if len(set(labels)) == len(labels):
        return [living]
    return [[rank for rank, own in zip(living, labels, strict=True) if own == label] for label in sorted(set(labels))]


def _hosts(ids_GS: Ids, num_experts: int) -> Floats:
    hosts = np.zeros((len(ids_GS), num_experts + 1))
    np.put_along_axis(hosts, ids_GS.astype(np.int64), 1.0, axis=1)  # -1 is the last column
    return hosts[:, :-1]


def _renamed(keep_GG: Floats, groups: list[list[int]]) -> dict[int, int]:
    """Rank of the plan -> rank that gets its contents. A group's ranks go to one group of the same size."""
    total = np.full((len(groups), len(groups)), -1e9)
    inner: dict[tuple[int, int], npt.NDArray[np.int64]] = {}
    for i, source in enumerate(groups):
        for j, target in enumerate(groups):
            if len(source) == len(target):
                block = keep_GG[np.ix_(source, target)]
                inner[i, j] = assign(block)
                total[i, j] = block[np.arange(len(source)), inner[i, j]].sum()
    renamed = {}
    for i, j in enumerate(assign(total).tolist()):
        for rank, column in zip(groups[i], inner[i, j].tolist(), strict=True):
            renamed[rank] = groups[j][column]
    return renamed


def _aligned(new_S: Ids, old_S: Ids) -> Ids:
    """The new contents with every expert that was there before in a slot that it had."""
    rest = new_S.tolist()
    out = [-1] * len(rest)
    for slot, expert in enumerate(old_S.tolist()):
        if expert >= 0 and expert in rest:
            out[slot] = expert
            rest.remove(expert)
    rest = [expert for expert in rest if expert >= 0]
    for slot, expert in enumerate(out):
        if expert < 0 and rest:
            out[slot] = rest.pop(0)
    return np.array(out, dtype=np.int32)
