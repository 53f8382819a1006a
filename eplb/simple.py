"""What the balancer does without a compiler: other and simpler policies than native/src/eplb_*.cpp, slower, and with
the same guarantees (eplb/reference.py), but for how good they are.

Legend: L MoE layers, G ranks, S slots of a rank, E logical experts, M copies of an expert.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]
Shares = npt.NDArray[np.float32]
Load = tuple[int, int, int]  # (rank, slot, expert) to bring

_SWEEPS = 400
_SETTLED = 1e-10  # of the layer's load: shares that change by less are done
_DONORS = 3  # the heaviest experts of the fullest rank, of which another copy is tried


def reweight_layer(ids_GS: Ids, load_E: Floats, alive_G: npt.NDArray[np.bool_], share_GS: Shares) -> int:
    """Min-max shares of one layer into share_GS, which is zero. Gives the first expert without a live slot, or -1.

    Expert after expert is spread over its ranks so that they are as level as it can make them, until nothing changes:
    that is coordinate descent for the least sum of squares, whose loads are the lexicographically least too.
    """
    slots: list[dict[int, int]] = [{} for _ in load_E]  # of each expert: rank -> its first slot there
    for rank in np.flatnonzero(alive_G).tolist():
        for slot, expert in enumerate(ids_GS[rank].tolist()):
            if expert >= 0:
                slots[expert].setdefault(rank, slot)
    if not all(slots):
        return slots.index({})
    ranks = [np.array(list(of)) for of in slots]
    flows = [np.full(len(of), load / len(of)) for of, load in zip(slots, load_E, strict=True)]
    load_G = np.zeros(len(ids_GS))
    for rank_M, flow_M in zip(ranks, flows, strict=True):
        load_G[rank_M] += flow_M
    shared = [e for e, of in enumerate(slots) if len(of) > 1 and load_E[e] > 0]
    for _ in range(_SWEEPS):
        moved = 0.0
        for e in shared:
            others_M = load_G[ranks[e]] - flows[e]
            flow_M = _level(others_M, float(load_E[e]))
            moved = max(moved, float(np.abs(flow_M - flows[e]).max()))
            load_G[ranks[e]] = others_M + flow_M
            flows[e] = flow_M
        if moved <= _SETTLED * load_E.sum():
            break
    for of, flow_M in zip(slots, flows, strict=True):
        total = flow_M.sum()
        part_M = flow_M / total if total > 0 else np.full(len(of), 1 / len(of))
        share_GS[list(of), list(of.values())] = part_M
    return -1


def _level(others_M: Floats, amount: float) -> Floats:
    """How `amount` is poured on top of the others' loads so that the lowest rise to one level."""
    rising = np.sort(others_M)
    levels = (amount + np.cumsum(rising)) / np.arange(1, len(rising) + 1)
    full = np.flatnonzero(levels > rising)[-1]  # as many as lie below the level that they would reach
    poured_M: Floats = np.maximum(levels[full] - others_M, 0.0)
    return poured_M


def pack_layer(
    load_E: Floats, num_slots: int, domain_G: Sequence[int], theta: float, min_copies: int, first: int
) -> list[list[int]]:
    """For each rank its experts, at most num_slots of them; arguments as eplb.kernels.native_pack.

    Copies of an expert go to ranks that follow each other, where a rank is followed by one of another failure domain;
    then each expert with one copy, the heaviest first, to the emptiest rank.
    """
    num_ranks = len(domain_G)
    copies_E = _copies(load_E, num_ranks * num_slots, num_ranks, theta, min_copies)
    place = [list(domain_G[:rank]).count(label) for rank, label in enumerate(domain_G)]
    cycle = sorted(range(num_ranks), key=lambda rank: (place[rank], domain_G[rank]))
    part_E = load_E / copies_E
    ids: list[list[int]] = [[] for _ in range(num_ranks)]
    load_G = [0.0] * num_ranks
    at = first
    for e in sorted(range(len(load_E)), key=lambda e: (copies_E[e] == 1, -part_E[e], e)):
        if copies_E[e] > 1:
            chosen = [cycle[(at + i) % num_ranks] for i in range(copies_E[e])]
            at += len(chosen)
        else:
            free = (cycle[(first + i) % num_ranks] for i in range(num_ranks))
            chosen = [min((rank for rank in free if len(ids[rank]) < num_slots), key=load_G.__getitem__)]
        for rank in chosen:
            ids[rank].append(e)
            load_G[rank] += part_E[e]
    return ids


def _copies(load_E: Floats, slots: int, num_ranks: int, theta: float, min_copies: int) -> npt.NDArray[np.int64]:
    """Copies of each expert: more for the heaviest until no copy carries more than theta times the mean rank load, then
    a second one for as many as can be, then more for the heaviest again."""
    copies_E = np.full(len(load_E), min_copies, dtype=np.int64)
    for _ in range(slots - len(load_E) * min_copies):
        part_E = np.where(copies_E < num_ranks, load_E / copies_E, -1.0)
        top = int(part_E.argmax())
        if part_E[top] <= theta * load_E.sum() / num_ranks and num_ranks > 1 and (copies_E == 1).any():
            top = int(np.where(copies_E == 1, load_E, -1.0).argmax())
        if copies_E[top] == num_ranks:
            break
        copies_E[top] += 1
    return copies_E


def improve_layer(
    ids_GS: Ids,
    load_E: Floats,
    alive_G: npt.NDArray[np.bool_],
    domain_G: Sequence[int],
    min_copies: int,
    max_loads: int,
    min_gain: float,
    keep_coverage: bool,
) -> tuple[list[Load], float]:
    """Experts to bring and the balancedness that they gain. Arguments as eplb.kernels.native_improve.

    Another copy of one of the fullest rank's heaviest experts takes the place, on the emptiest rank where that can be,
    of a copy that can be spared; the best is taken as long as it gains min_gain.
    """
    loads: list[Load] = []
    if not load_E.any():
        return loads, 0.0
    live = np.flatnonzero(alive_G)
    ids_GS = np.where(alive_G[:, None], ids_GS, -1)
    start, load_G = _balance(ids_GS, load_E, alive_G)
    score, least = start, _alone(ids_GS, len(load_E), domain_G)
    spare = max(0, 2 * len(load_E) - len(live) * ids_GS.shape[1])
    allowed = -(-spare // len(live)) + 1
    largest = max(np.bincount(np.array(domain_G)[live]).tolist())
    most = max(allowed, least[0]), max(allowed * largest, least[1])
    while len(loads) < max_loads:
        best: tuple[float, Load] | None = None
        fullest = int(live[load_G[live].argmax()])
        donors = sorted({e for e in ids_GS[fullest].tolist() if e >= 0}, key=lambda e: (-load_E[e], e))[:_DONORS]
        for expert in donors:
            for rank in live[np.argsort(load_G[live], kind="stable")].tolist():
                found = None if expert in ids_GS[rank] else _spare_slot(ids_GS, rank, min_copies, load_E)
                if found is None:
                    continue
                trial = ids_GS.copy()
                trial[rank, found] = expert
                alone = _alone(trial, len(load_E), domain_G)
                if keep_coverage and (alone[0] > most[0] or alone[1] > most[1]):
                    continue
                reached, _ = _balance(trial, load_E, alive_G)
                if best is None or reached > best[0]:
                    best = reached, (rank, found, expert)
                break
        if best is None or best[0] - score < min_gain:
            break
        score, (rank, slot, expert) = best
        loads.append((rank, slot, expert))
        ids_GS[rank, slot] = expert
        _, load_G = _balance(ids_GS, load_E, alive_G)
    return loads, score - start


def _spare_slot(ids_GS: Ids, rank: int, min_copies: int, load_E: Floats) -> int | None:
    """The slot of `rank` that is unused, holds its expert a second time, or else a copy that weighs least."""
    row = ids_GS[rank].tolist()
    for slot, expert in enumerate(row):
        if expert < 0 or expert in row[:slot]:
            return slot
    copies = [int((ids_GS == expert).any(1).sum()) for expert in row]
    sparable = [slot for slot, count in enumerate(copies) if count > max(1, min_copies)]
    return min(sparable, key=lambda slot: (load_E[row[slot]] / copies[slot], slot), default=None)


def _balance(ids_GS: Ids, load_E: Floats, alive_G: npt.NDArray[np.bool_]) -> tuple[float, Floats]:
    """(mean / max of the live ranks' loads, the loads), with the best shares."""
    share_GS = np.zeros(ids_GS.shape, dtype=np.float32)
    reweight_layer(ids_GS, load_E, alive_G, share_GS)
    load_G: Floats = (share_GS * load_E[np.maximum(ids_GS, 0)]).sum(1)
    return float(load_G[alive_G].mean() / load_G.max()), load_G


def _alone(ids_GS: Ids, num_experts: int, domain_G: Sequence[int]) -> tuple[int, int]:
    """The most experts that one rank, and that one failure domain, holds alone."""
    worst = []
    for label_G in (range(len(ids_GS)), domain_G):
        hosts = np.zeros((max(label_G) + 1, num_experts + 1), dtype=bool)
        hosts[np.repeat(np.array(label_G), ids_GS.shape[1]), ids_GS.ravel()] = True  # -1 is the last column
        hosts = hosts[:, :-1]
        worst.append(int((hosts & (hosts.sum(0) == 1)).sum(1).max(initial=0)))
    return worst[0], worst[1]


def relabel(new_LGS: Ids, old_LGS: Ids, groups: list[list[int]]) -> Ids:
    """As eplb.assign.relabel, but every group keeps its ranks, and those that have most in common are paired first."""
    out = new_LGS.copy()
    for new_GS, old_GS, out_GS in zip(new_LGS, old_LGS, out, strict=True):
        for group in groups:
            kept = {(a, b): len(({*new_GS[a].tolist()} & {*old_GS[b].tolist()}) - {-1}) for a in group for b in group}
            left, free = set(group), set(group)
            for a, b in sorted(kept, key=lambda pair: (-kept[pair], pair)):
                if a in left and b in free:
                    left.remove(a)
                    free.remove(b)
                    out_GS[b] = _aligned(new_GS[a], old_GS[b])
    return out


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
