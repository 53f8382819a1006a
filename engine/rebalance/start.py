"""The placement that an operator has planned, as the one that the ranks begin with.

Legend: L MoE layers, G ranks, S slots of a rank.
"""

from __future__ import annotations

import numpy as np
from msgspec import structs

from eplb.offline.placement_file import read_placement
from eplb.placement import Placement, at_hand_everywhere


def start_placement(path: str, num_experts: int, shape: tuple[int, int, int]) -> Placement:
    """Read a file of `moesaic eplb plan` for a model and ranks of this shape (L, G, S). Slots that the file leaves over
    stay unused; where every rank has every expert, the file's shares are what counts.

    Raises ValueError, one line that names the file and what does not fit.
    """
    found = read_placement(path).placement
    layers, ranks, slots = shape
    if found.num_experts != num_experts:
        raise ValueError(f"{path}: experts is {found.num_experts}; the model has {num_experts}")
    if found.num_layers != layers:
        raise ValueError(f"{path}: layers is {found.num_layers}; the model has {layers} MoE layers")
    if found.num_ranks != ranks:
        raise ValueError(f"{path}: ranks is {found.num_ranks}; --data-parallel-size is {ranks}")
    if found.slots_per_rank > slots:
        spare = found.slots_per_rank * ranks - num_experts
        raise ValueError(
            f"{path}: it needs {found.slots_per_rank} slots per rank, there are {slots}; "
            f"--num-redundant-experts {spare} gives enough"
        )
    if not all(found.alive):
        raise ValueError(
            f"{path}: alive: rank {found.alive.index(False)} is dead in it; a server starts with all ranks"
        )
    if slots == num_experts:
        return at_hand_everywhere(structs.replace(found, epoch=0))
    room = ((0, 0), (0, 0), (0, slots - found.slots_per_rank))
    ids, share = np.pad(found.slot_to_expert, room, constant_values=-1), np.pad(found.share, room)
    return structs.replace(found, epoch=0, slot_to_expert=ids, share=share)
