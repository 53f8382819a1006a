"""Which experts a placement would lose with a rank or with a node, and what it would cost to bring them back.

Pure functions of the placement. An expert is uncovered by a loss when no rank that goes on has a slot of it.

Legend: L MoE layers, G ranks, S slots of a rank, E logical experts, N failure domains (nodes).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from eplb.placement import Placement
from eplb.repair import lost_experts

Counts = npt.NDArray[np.int64]


def domains_of(placement: Placement) -> tuple[int, ...]:
    """The failure domain of each rank; without labels every rank is its own."""
    return placement.failure_domains or tuple(range(placement.num_ranks))


def numbered(labels: Sequence[int]) -> list[int]:
    """The labels as numbers from 0 without gaps, in order of appearance."""
    number = {label: index for index, label in enumerate(dict.fromkeys(labels))}
    return [number[label] for label in labels]


def uncovered(placement: Placement, lost_ranks: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """For each layer the experts that no rank but `lost_ranks` (and the dead) has a slot of, in rising order.

    Raises ValueError when a rank is out of range.
    """
    alive = list(placement.alive)
    for rank in lost_ranks:
        if not 0 <= rank < placement.num_ranks:
            raise ValueError(f"rank {rank} is out of range: the placement has ranks 0 to {placement.num_ranks - 1}")
        alive[rank] = False
    return lost_experts(placement, alive)


def host_matrix(placement: Placement) -> npt.NDArray[np.bool_]:
    """bool [L, G, E]: which live rank has a slot of which expert."""
    num_layers, num_ranks, _ = placement.slot_to_expert.shape
    hosts = np.zeros((num_layers, num_ranks, placement.num_experts + 1), dtype=bool)
    np.put_along_axis(hosts, placement.slot_to_expert.astype(np.int64), True, axis=2)  # -1 is the last column
    hosts[:, ~np.array(placement.alive, dtype=bool)] = False
    return hosts[:, :, :-1]


def uncovered_by_group(placement: Placement, label_G: Sequence[int]) -> tuple[tuple[int, ...], Counts]:
    """The labels in rising order, and int64 [L, N]: how many experts have all their copies on ranks of one label."""
    labels = sorted(set(label_G))
    hosts = host_matrix(placement)
    groups = np.stack([hosts[:, np.array(label_G) == label].any(1) for label in labels], axis=1)
    single = groups.sum(1) == 1
    return tuple(labels), (groups & single[:, None]).sum(2)


def worst_rank(placement: Placement) -> tuple[npt.NDArray[np.int64], Counts]:
    """(rank, experts), both int64 [L]: the rank whose loss uncovers most experts in each layer, and how many."""
    _, count_LG = uncovered_by_group(placement, range(placement.num_ranks))
    return count_LG.argmax(1), count_LG.max(1, initial=0)


def worst_node(placement: Placement) -> tuple[npt.NDArray[np.int64], Counts]:
    """(label, experts), both int64 [L]: the failure domain whose loss uncovers most experts, and how many."""
    labels, count_LN = uncovered_by_group(placement, domains_of(placement))
    return np.array(labels, dtype=np.int64)[count_LN.argmax(1)], count_LN.max(1, initial=0)


def survivable_losses(num_experts: int, slots_per_rank: int, num_ranks: int) -> int:
    """How many ranks, whichever they are, can be lost and every expert still be held after a reload (-1: none fit now).

    F0: any k losses are survived if and only if (G - k) * S >= E.
    """
    return num_ranks - -(-num_experts // slots_per_rank) if num_ranks * slots_per_rank >= num_experts else -1


def fewest_uncovered(num_experts: int, slots: int, num_ranks: int) -> int:
    """F2: in any placement of a layer in `slots` slots some rank's loss uncovers at least this many experts.

    At least 2 E - P experts have a single copy, and some rank holds its part of them, rounded up.
    """
    if num_ranks == 1:
        return num_experts
    return -(-max(0, 2 * num_experts - slots) // num_ranks)
