"""What has to travel between two placements: which expert, from where, over which link, in how many rounds.

Legend: L MoE layers, G ranks, S slots of a rank, E logical experts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from eplb.coverage import domains_of, host_matrix
from eplb.placement import Placement

Counts = npt.NDArray[np.int64]


class Transfer(NamedTuple):
    """`expert` of MoE layer `layer` goes from rank `source` to rank `target`; source -1: no live rank has it, it is
    read from the checkpoint."""

    layer: int
    expert: int
    source: int
    target: int


class Difference(Struct, frozen=True, eq=False):
    """transfers: what a rank hosts that it did not. received, sent: int64 [G] experts; links: int64 [G, G] experts from
    rank to rank; loaded: int64 [G] experts from the checkpoint. changed_layers: layers in which something moves.
    rounds: steps that suffice when a rank sends one expert and receives one at a time; rounds_per_layer: the same with
    layer after layer. reshared: slots that keep their expert but get another share.
    """

    transfers: tuple[Transfer, ...]
    received: Counts
    sent: Counts
    loaded: Counts
    links: Counts
    across_nodes: int
    changed_layers: int
    rounds: int
    rounds_per_layer: int
    reshared: int

    @property
    def num_moves(self) -> int:
        return len(self.transfers)


def difference(old: Placement, new: Placement) -> Difference:
    """Compare by rank: an expert that only changes its slot within a rank does not travel.

    Each transfer takes its expert from a rank of the target's node if one has it, else from another; among these from
    the one that sends least so far. Raises ValueError when the two differ in layers, ranks or experts.
    """
    for name, a, b in (
        ("layers", old.num_layers, new.num_layers),
        ("ranks", old.num_ranks, new.num_ranks),
        ("experts", old.num_experts, new.num_experts),
    ):
        if a != b:
            raise ValueError(f"the placements have {a} and {b} {name}; they must be equal")
    before, after = host_matrix(old), host_matrix(new)
    domain_G = np.array(domains_of(new if new.failure_domains else old))
    ranks = old.num_ranks
    transfers: list[Transfer] = []
    sent, links = np.zeros(ranks, dtype=np.int64), np.zeros((ranks, ranks), dtype=np.int64)
    loaded = np.zeros(ranks, dtype=np.int64)
    usable = np.array(old.alive) & np.array(new.alive)
    for layer, target, expert in np.argwhere(after & ~before):
        sources = np.flatnonzero(before[layer, :, expert] & usable)
        if not len(sources):
            transfers.append(Transfer(int(layer), int(expert), -1, int(target)))
            loaded[target] += 1
            continue
        far = domain_G[sources] != domain_G[target]
        source = int(sources[np.lexsort((sources, sent[sources], far))[0]])
        transfers.append(Transfer(int(layer), int(expert), source, int(target)))
        sent[source] += 1
        links[source, target] += 1
    received = links.sum(0) + loaded
    return Difference(
        transfers=tuple(transfers),
        received=received,
        sent=sent,
        loaded=loaded,
        links=links,
        across_nodes=int(links[domain_G[:, None] != domain_G[None, :]].sum()),
        changed_layers=len({transfer.layer for transfer in transfers}),
        rounds=_rounds(transfers, ranks),
        rounds_per_layer=sum(
            _rounds([move for move in transfers if move.layer == layer], ranks)
            for layer in sorted({move.layer for move in transfers})
        ),
        reshared=_reshared(old, new),
    )


def _rounds(transfers: list[Transfer], num_ranks: int) -> int:
    """Transfers between senders and receivers are the edges of a bipartite graph: as many rounds as the busiest side of
    any rank has edges are enough (König's theorem on edge colouring)."""
    if not transfers:
        return 0
    sources = np.array([move.source for move in transfers if move.source >= 0], dtype=np.int64)
    targets = np.array([move.target for move in transfers], dtype=np.int64)
    return int(max(np.bincount(sources, minlength=num_ranks).max(), np.bincount(targets, minlength=num_ranks).max()))


def _reshared(old: Placement, new: Placement) -> int:
    if old.slot_to_expert.shape != new.slot_to_expert.shape:
        return 0
    same = (old.slot_to_expert == new.slot_to_expert) & (new.slot_to_expert >= 0)
    return int((same & (np.abs(old.share - new.share) > 1e-4)).sum())
