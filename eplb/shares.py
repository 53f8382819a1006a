"""How much of its expert's tokens each slot should receive: exact min-max shares for a fixed placement.

No weights move, so it is cheap enough to run every few steps.

Legend: L MoE layers, G ranks, S slots of a rank, E logical experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from eplb.balance import Floats, Ids, checked_load
from eplb.flow import Flows
from eplb.kernels import native_reweight

Shares = npt.NDArray[np.float32]


def reweight(
    slot_to_expert_LGS: Ids,
    load_LE: npt.ArrayLike,
    alive: Sequence[bool] | None = None,
) -> Shares:
    """float32 [L, G, S]: the shares whose rank loads are lexicographically least, fullest rank first.

    slot_to_expert_LGS: int32, -1 for an unused slot; alive: ranks that take part (all). Several slots of one rank with
    the same expert: the first takes the rank's part. An expert without load is split evenly. Raises ValueError when
    shapes do not fit, a load is negative or not finite, or an expert has no living slot.
    """
    ids = np.ascontiguousarray(slot_to_expert_LGS, dtype=np.int32)
    load = checked_load(load_LE)
    if ids.ndim != 3 or len(ids) != len(load):
        raise ValueError(
            f"slot_to_expert has shape {list(ids.shape)} and load {list(load.shape)}; layers must be equal"
        )
    living = np.ones(ids.shape[1], dtype=bool) if alive is None else np.array(alive, dtype=bool)
    if len(living) != ids.shape[1]:
        raise ValueError(f"alive has {len(living)} entries for {ids.shape[1]} ranks")
    if ids.size and (ids.min() < -1 or ids.max() >= load.shape[1]):
        raise ValueError(f"slot_to_expert holds ids from {ids.min()} to {ids.max()}; load has {load.shape[1]} experts")
    native = native_reweight(ids, load, living)
    if native is not None:
        share, missing = native
        if missing >= 0:
            raise ValueError(_no_slot(*divmod(missing, load.shape[1])))
        return share
    return _reweight_plain(ids, load, living)


def _reweight_plain(ids: Ids, load: Floats, living: npt.NDArray[np.bool_]) -> Shares:
    share = np.zeros(ids.shape, dtype=np.float32)
    for layer, ids_GS in enumerate(ids):
        _reweight_layer(ids_GS, load[layer], living, share[layer], layer)
    return share


def _reweight_layer(ids_GS: Ids, load_E: Floats, living: npt.NDArray[np.bool_], out_GS: Shares, layer: int) -> None:
    num_ranks = len(ids_GS)
    slots_of: list[list[tuple[int, int]]] = [[] for _ in load_E]  # (rank, its first slot with the expert)
    for rank in range(num_ranks):
        seen = set()
        for slot, expert in enumerate(ids_GS[rank].tolist()):
            if living[rank] and expert >= 0 and expert not in seen:
                seen.add(expert)
                slots_of[expert].append((rank, slot))
    load_G = [0.0] * num_ranks
    hosts_JM, flow_JM, expert_J = [], [], []
    for expert, pairs in enumerate(slots_of):
        weight = float(load_E[expert])
        if not pairs:
            raise ValueError(_no_slot(layer, expert))
        parts = [weight / len(pairs)] * len(pairs)
        for (rank, _), part in zip(pairs, parts, strict=True):
            load_G[rank] += part
        if len(pairs) > 1 and weight > 0:
            hosts_JM.append([rank for rank, _ in pairs])
            flow_JM.append(parts)
            expert_J.append(expert)
        else:
            for rank, slot in pairs:
                out_GS[rank, slot] = 1.0 / len(pairs)
    Flows(hosts_JM, flow_JM, load_G).solve()
    for expert, flow in zip(expert_J, flow_JM, strict=True):
        total = sum(flow)
        for (rank, slot), part in zip(slots_of[expert], flow, strict=True):
            out_GS[rank, slot] = part / total


def _no_slot(layer: int, expert: int) -> str:
    return f"layer {layer}: expert {expert} has no slot on a living rank"
