"""A large change of placement in small ones, each of which keeps every expert on some live rank.

Legend: L MoE layers, G ranks, S slots of a rank, E logical experts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb.placement import Placement

Ids = npt.NDArray[np.int32]


def next_batch(current: Placement, target_LGS: Ids, experts_per_rank: int) -> Ids:
    """int32 [L, G, S]: the ids of `current`, as many of them changed to the target's as bring no rank more than
    `experts_per_rank` experts; layer by layer. Equal to the target when that is the last batch.

    An expert that would be overwritten in its only slot comes to its new one in the same batch. When such a ring is
    longer than the batch, it is a batch of its own. target_LGS: covers every expert of every layer.
    """
    ids = current.slot_to_expert.copy()
    room_G = np.full(current.num_ranks, experts_per_rank, dtype=np.int64)
    begun = False
    for layer in np.flatnonzero((ids != target_LGS).any((1, 2))):
        ids_GS, target_GS = ids[layer], target_LGS[layer]
        for slot, rank in np.argwhere(
            (ids_GS != target_GS).T
        ).tolist():  # the first slots of all ranks before the second
            if ids_GS[rank, slot] == target_GS[rank, slot]:
                continue
            ring = _ring(ids_GS, target_GS, rank, slot)
            brought_G = np.zeros_like(room_G)
            for other, its_slot in ring:
                expert = target_GS[other, its_slot]
                brought_G[other] += expert >= 0 and expert not in current.slot_to_expert[layer, other]
            if begun and (brought_G > room_G).any():
                continue
            begun = True
            room_G -= brought_G
            for other, its_slot in ring:
                ids_GS[other, its_slot] = target_GS[other, its_slot]
        if room_G.max() <= 0:
            break
    return ids


def _ring(ids_GS: Ids, target_GS: Ids, rank: int, slot: int) -> list[tuple[int, int]]:
    """The slots that have to change together with this one, so that no expert is without a slot in between."""
    after_GS = ids_GS.copy()
    ring = [(rank, slot)]
    index = 0
    while index < len(ring):
        place = ring[index]
        index += 1
        gone = int(after_GS[place])
        after_GS[place] = target_GS[place]
        if gone < 0 or (after_GS == gone).any():
            continue
        coming = np.argwhere((target_GS == gone) & (after_GS != gone)).tolist()
        # Where the target wants the expert that would be lost. There is such a slot, for the target covers all experts.
        ring.append(next((r, s) for r, s in coming if (r, s) not in ring))
    return ring
