"""How evenly a placement spreads given loads over the ranks.

Balancedness is mean / max of the live ranks' loads in a layer: 1 is perfect, 1 / G is everything on one rank.

Legend: L MoE layers, G ranks, S slots of a rank, E logical experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from eplb.placement import Placement

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int32]


def checked_load(load_LE: npt.ArrayLike, num_experts: int | None = None) -> Floats:
    """load_LE as float64 [L, E]. Raises ValueError when it is no such table, or holds a number that is negative or
    not finite."""
    load = np.asarray(load_LE, dtype=np.float64)
    if load.ndim != 2:
        raise ValueError(f"load has shape {list(load.shape)}; it must be [layers, experts]")
    if num_experts is not None and load.shape[1] != num_experts:
        raise ValueError(f"load has {load.shape[1]} experts; the placement has {num_experts}")
    bad = ~(np.isfinite(load) & (load >= 0))
    if bad.any():
        layer, expert = (int(i) for i in np.argwhere(bad)[0])
        raise ValueError(
            f"load: layer {layer}, expert {expert} is {load[layer, expert]}; every load must be finite, 0 or more"
        )
    return load


def rank_load(slot_to_expert_LGS: Ids, share_LGS: npt.NDArray[np.floating], load_LE: npt.ArrayLike) -> Floats:
    """float64 [L, G]: the tokens that each rank receives. slot_to_expert_LGS: -1 for an unused slot."""
    load = np.asarray(load_LE, dtype=np.float64)
    index = np.maximum(slot_to_expert_LGS, 0).reshape(len(slot_to_expert_LGS), -1)
    picked = np.take_along_axis(load, index, axis=1).reshape(slot_to_expert_LGS.shape)
    picked *= share_LGS
    picked[slot_to_expert_LGS < 0] = 0
    total: Floats = picked.sum(2)
    return total


def balancedness(load_LG: npt.ArrayLike, alive: Sequence[bool] | None = None) -> Floats:
    """float64 [L]: mean / max over the live ranks. A layer without tokens is perfectly balanced: 1."""
    load = np.asarray(load_LG, dtype=np.float64)
    if alive is not None:
        load = load[:, np.array(alive, dtype=bool)]
    most = load.max(1)
    even: Floats = np.divide(load.mean(1), most, out=np.ones(len(load)), where=most > 0)
    return even


def placement_balance(placement: Placement, load_LE: npt.ArrayLike) -> Floats:
    """float64 [L]: balancedness of the placement with its own shares."""
    load_LG = rank_load(placement.slot_to_expert, placement.share, load_LE)
    return balancedness(load_LG, placement.alive)
