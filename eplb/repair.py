"""Who hosts what after ranks were lost, came back or were added (docs/design.md, section 5). Pure: equal inputs give
equal plans everywhere.

Legend: L MoE layers, G ranks, S slots of a rank, E logical experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from eplb.placement import Placement, linear_placement, owner_shares

Ids = npt.NDArray[np.int32]


class SlotUpdate(NamedTuple):
    """The weights of `expert` have to be brought into `slot` of `rank`, in MoE layer `layer`."""

    layer: int
    rank: int
    slot: int
    expert: int


def ranks_needed(num_experts: int, slots_per_rank: int) -> int:
    """The fewest live ranks that can hold every expert: ceil(E / S)."""
    return -(-num_experts // slots_per_rank)


def lost_experts(placement: Placement, alive: Sequence[bool]) -> tuple[tuple[int, ...], ...]:
    """For each layer the experts that no rank of `alive` has a slot of, in rising order."""
    live = np.array(alive, dtype=bool)
    lost = []
    for layer in range(placement.num_layers):
        held = placement.slot_to_expert[layer][live]
        missing = np.setdiff1d(np.arange(placement.num_experts), held)
        lost.append(tuple(int(expert) for expert in missing))
    return tuple(lost)


def repair(placement: Placement, alive: Sequence[bool], epoch: int) -> Placement:
    """The placement of `epoch` among the ranks of `alive`, with as few reads as can be.

    A rank that goes on keeps its slots; one that comes back gets those that the linear placement gives it, which is
    what a rank that starts has read already. Only then experts without a live copy are placed: in the first unused
    slots, then in slots whose expert has another copy, on the rank that has the fewest to read so far. The slots of
    dead ranks become -1 and one copy of each expert does all its work (owner_shares), until a planner that knows the
    loads says better. `alive` may be longer than the placement: those ranks are new, and treated like ranks that come
    back. Raises ValueError, naming the experts and the number of ranks it takes, when the live ones have too few slots.
    """
    if len(alive) < placement.num_ranks:
        raise ValueError(f"alive has {len(alive)} entries for {placement.num_ranks} ranks")
    placement = widen(placement, len(alive))
    needed = ranks_needed(placement.num_experts, placement.slots_per_rank)
    if placement.num_layers and sum(alive) < needed:
        raise ValueError(_too_few(placement, alive, needed))
    ids = np.array(placement.slot_to_expert)
    ids[:, ~np.array(alive, dtype=bool)] = -1
    back = [rank for rank, lives in enumerate(alive) if lives and not placement.alive[rank]]
    if back:
        home = linear_placement(
            placement.num_layers,
            placement.num_experts,
            placement.num_ranks,
            placement.slots_per_rank,
            placement.failure_domains,
            placement.stores,
        )
        ids[:, back] = home.slot_to_expert[:, back]
    live = [rank for rank, lives in enumerate(alive) if lives]
    reads_G = np.zeros(ids.shape[1], dtype=np.int64)
    for layer_GS, share_GS in zip(ids, placement.share, strict=True):
        _cover(layer_GS, share_GS, live, placement.num_experts, reads_G)
    share = owner_shares(ids, placement.num_experts)
    return replace(placement, epoch=epoch, slot_to_expert=ids, share=share, alive=tuple(alive))


def widen(placement: Placement, num_ranks: int) -> Placement:
    """The same for at least `num_ranks` ranks: those that it did not know are dead, have no expert, and each is a
    failure domain and has a store of its own; unless there is one store for all, as ranks are added on one machine."""
    num_new = num_ranks - placement.num_ranks
    if num_new <= 0:
        return placement
    room = ((0, 0), (0, num_new), (0, 0))
    domains = placement.failure_domains
    if domains:
        domains += tuple(range(max(domains) + 1, max(domains) + 1 + num_new))
    stores = placement.stores
    if len(set(stores)) == 1 and not domains:
        stores += stores[:1] * num_new
    elif stores:
        stores += tuple(range(max(stores) + 1, max(stores) + 1 + num_new))
    return replace(
        placement,
        slot_to_expert=np.pad(placement.slot_to_expert, room, constant_values=-1),
        share=np.pad(placement.share, room),
        alive=placement.alive + (False,) * num_new,
        failure_domains=domains,
        stores=stores,
    )


def even_shares(slot_to_expert: Ids, num_experts: int) -> npt.NDArray[np.float32]:
    """float32 [L, G, S]: one over the number of slots that its expert has in the layer; 0 on unused slots."""
    share = np.zeros(slot_to_expert.shape, dtype=np.float32)
    for ids, out in zip(slot_to_expert, share, strict=True):
        used = ids >= 0
        copies = np.bincount(ids[used], minlength=num_experts)
        out[used] = 1.0 / copies[ids[used]]
    return share


def diff(old: Placement, new: Placement) -> tuple[SlotUpdate, ...]:
    """What has to be read to come from `old` to `new`, ordered by layer, rank and slot. Slots that become unused need
    nothing. A rank that `old` does not know had nothing. Raises ValueError when the two differ in shape otherwise."""
    old = widen(old, new.num_ranks)
    if old.slot_to_expert.shape != new.slot_to_expert.shape:
        shapes = [list(placement.slot_to_expert.shape) for placement in (old, new)]
        raise ValueError(f"the placements have shapes {shapes[0]} and {shapes[1]}; they must be equal")
    changed = (old.slot_to_expert != new.slot_to_expert) & (new.slot_to_expert >= 0)
    return tuple(
        SlotUpdate(int(layer), int(rank), int(slot), int(new.slot_to_expert[layer, rank, slot]))
        for layer, rank, slot in np.argwhere(changed)
    )


def _cover(
    ids_GS: Ids,
    share_GS: npt.NDArray[np.float32],
    live: Sequence[int],
    num_experts: int,
    reads_G: npt.NDArray[np.int64],
) -> None:
    """Write every expert without a slot into one of the live ranks' slots, and count in reads_G who has to read one.

    Serving waits for the rank that reads most, so the reads are spread first, in the layer and over all layers. No rank
    is sure of the loads here; but what was a small part of its expert's tokens is missed least.
    """
    slots = ids_GS.shape[1]
    rank_N = np.repeat(np.array(live), slots)
    slot_N = np.tile(np.arange(slots), len(live))
    copies = np.bincount(ids_GS[ids_GS >= 0], minlength=num_experts)
    before_G = reads_G.copy()
    share_N = share_GS[rank_N, slot_N]
    for expert in np.flatnonzero(copies == 0):
        held_N = ids_GS[rank_N, slot_N]
        used_N = held_N >= 0
        copies_N = np.where(used_N, copies[held_N], 0)
        part_N = np.divide(1.0, copies_N, out=np.zeros(len(held_N)), where=used_N)
        load_N = np.bincount(rank_N, weights=part_N)[rank_N].round(6)
        here_N, reads_N = (reads_G - before_G)[rank_N], reads_G[rank_N]
        # Then the least loaded rank, the slot with the smallest share, the first. A sole copy is never given up.
        first = np.lexsort((share_N, load_N, reads_N, here_N, used_N, copies_N == 1))[0]
        if used_N[first]:
            copies[held_N[first]] -= 1
        ids_GS[rank_N[first], slot_N[first]] = expert
        reads_G[rank_N[first]] += 1
        copies[expert] = 1


def _too_few(placement: Placement, alive: Sequence[bool], needed: int) -> str:
    lost = lost_experts(placement, alive)
    worst = max(range(len(lost)), key=lambda layer: len(lost[layer]))
    named = ", ".join(str(expert) for expert in lost[worst][:8]) + (", ..." if len(lost[worst]) > 8 else "")
    return (
        f"{sum(alive)} live rank(s) of {placement.slots_per_rank} slots cannot hold {placement.num_experts} experts: "
        f"it takes {needed} ranks (without a live copy, layer {worst}: {named})"
    )
