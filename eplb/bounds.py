"""What no placement can do better than, whatever the algorithm.

Legend: L MoE layers, G ranks, E logical experts, P slots of a layer on all ranks together.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb.balance import Floats, checked_load


def lower_bound(
    load_LE: npt.ArrayLike, slots: int | npt.ArrayLike, num_ranks: int, min_copies: int = 1
) -> npt.NDArray[np.float64]:
    """float64 [L]: the least load that the fullest rank of any placement can have, with any shares.

    slots: the slots of a layer on all ranks together (P), one number or [L]. The bound is max(W / G, T): W is the
    layer's load, and T the smallest level at which sum over experts of max(min_copies, ceil(w / T)) <= P, for a copy of
    an expert is on one rank and cannot take more than that rank's load. Raises ValueError when the experts do not fit
    the slots, or a load is negative or not finite.
    """
    load = checked_load(load_LE)
    num_layers, num_experts = load.shape
    slots_L = np.broadcast_to(np.asarray(slots, dtype=np.int64), (num_layers,))
    if num_layers and slots_L.min() < num_experts * min_copies:
        raise ValueError(
            f"{slots_L.min()} slots cannot hold {min_copies} copies of {num_experts} experts: "
            f"it takes {num_experts * min_copies}"
        )
    spare_L = slots_L - num_experts * min_copies
    # The greatest quotient gets one more copy, again and again: Adams' divisor method, exact for this bound. Only the
    # heaviest experts, one more than there are spare slots, can ever be the greatest.
    most = int(spare_L.max(initial=0))
    heavy_LH = -np.sort(-load, axis=1)[:, : most + 1]
    copies_LH = np.full(heavy_LH.shape, min_copies, dtype=np.int64)
    rows = np.arange(num_layers)
    for turn in range(most):
        top_L = np.argmax(heavy_LH / copies_LH, axis=1)
        copies_LH[rows, top_L] += turn < spare_L
    bound: Floats = np.maximum(load.sum(1) / num_ranks, (heavy_LH / copies_LH).max(1, initial=0.0))
    return bound


def balance_bound(
    load_LE: npt.ArrayLike, slots: int | npt.ArrayLike, num_ranks: int, min_copies: int = 1
) -> npt.NDArray[np.float64]:
    """float64 [L]: the balancedness that `lower_bound` allows."""
    load = checked_load(load_LE)
    bound = lower_bound(load, slots, num_ranks, min_copies)
    balance: Floats = np.divide(load.sum(1) / num_ranks, bound, out=np.ones(len(load)), where=bound > 0)
    return balance
