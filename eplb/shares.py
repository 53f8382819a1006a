"""How much of its expert's tokens each slot should receive: exact min-max shares for a fixed placement.

No weights move, so it is cheap enough to run every few steps.

Legend: L MoE layers, G ranks, S slots of a rank, E logical experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from eplb.balance import Floats, Ids, checked_load
from eplb.kernels import native_reweight
from eplb.simple import reweight_layer

Shares = npt.NDArray[np.float32]


def reweight(
    slot_to_expert_LGS: Ids,
    load_LE: npt.ArrayLike,
    alive: Sequence[bool] | None = None,
) -> Shares:
    """float32 [L, G, S]: the shares whose rank loads are lexicographically least, fullest rank first.

    slot_to_expert_LGS: int32, -1 for an unused slot; alive: ranks that take part (all). Several slots of one rank with
    the same expert: the first takes the rank's part. An expert without load is split evenly. Raises ValueError when
    shapes do not fit, a load is negative or not finite, or an expert has no live slot.
    """
    ids = np.ascontiguousarray(slot_to_expert_LGS, dtype=np.int32)
    load = checked_load(load_LE)
    if ids.ndim != 3 or len(ids) != len(load):
        raise ValueError(
            f"slot_to_expert has shape {list(ids.shape)} and load {list(load.shape)}; layers must be equal"
        )
    live = np.ones(ids.shape[1], dtype=bool) if alive is None else np.array(alive, dtype=bool)
    if len(live) != ids.shape[1]:
        raise ValueError(f"alive has {len(live)} entries for {ids.shape[1]} ranks")
    if ids.size and (ids.min() < -1 or ids.max() >= load.shape[1]):
        raise ValueError(f"slot_to_expert holds ids from {ids.min()} to {ids.max()}; load has {load.shape[1]} experts")
    native = native_reweight(ids, load, live)
    share, missing = _reweight_simply(ids, load, live) if native is None else native
    if missing >= 0:
        layer, expert = divmod(missing, load.shape[1])
        raise ValueError(f"layer {layer}: expert {expert} has no slot on a live rank")
    return share


def _reweight_simply(ids: Ids, load: Floats, live: npt.NDArray[np.bool_]) -> tuple[Shares, int]:
    """As native_reweight."""
    share = np.zeros(ids.shape, dtype=np.float32)
    for layer, ids_GS in enumerate(ids):
        missing = reweight_layer(ids_GS, load[layer], live, share[layer])
        if missing >= 0:
            return share, layer * load.shape[1] + missing
    return share, -1
