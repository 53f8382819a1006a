"""What the loss of ranks would do to a placement: which experts go, how much load they carry, what is read again and
how even the rest is, and which of the guarantees F0 to F5 hold.

Legend: L MoE layers, E logical experts, G ranks, S slots of a rank, N failure domains.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct, structs

from eplb.balance import Floats, balancedness, rank_load
from eplb.coverage import domains_of, fewest_uncovered, host_matrix, survivable_losses, uncovered_by_group
from eplb.mover import improve
from eplb.offline.replay import slot_part
from eplb.placement import Placement
from eplb.repair import diff, lost_experts, ranks_needed, repair
from eplb.shares import reweight

MAX_SETS = 2000  # of k ranks that are looked at; more are sampled
EXTRA_MOVES = 3  # a layer, after a repair
Bools = npt.NDArray[np.bool_]


class Sets(Struct, frozen=True):
    """Sets of ranks to lose, one scenario each. complete: all that there are, not a sample."""

    name: str
    ranks: tuple[tuple[int, ...], ...]
    complete: bool = True


def parse_kill(text: str, placement: Placement) -> Sets:
    """`rank:3`, `rank:3,7` (at once), `node:1`, `any-rank`, `any-node` or `k=2` (any two ranks).

    Raises ValueError when it is none of these, or names a rank or node that is not there or not alive.
    """
    live = [rank for rank, alive in enumerate(placement.alive) if alive]
    domains = domains_of(placement)
    kind, _, rest = text.partition(":")
    if text == "any-rank":
        return Sets(text, tuple((rank,) for rank in live))
    if text == "any-node":
        return Sets(text, tuple(_of_node(node, domains, live) for node in sorted({domains[rank] for rank in live})))
    if text.startswith("k="):
        return _any_k(text, live)
    numbers = [int(part) for part in rest.split(",") if part.isascii() and part.isdigit()]
    if kind not in ("rank", "node") or len(numbers) != len(rest.split(",")):
        raise ValueError(f"--kill {text}: it must be rank:3, rank:3,7, node:1, any-rank, any-node or k=2")
    known = live if kind == "rank" else sorted({domains[rank] for rank in live})
    for number in numbers:
        if number not in known:
            raise ValueError(f"--kill {text}: there is no live {kind} {number}; they are {known[0]} to {known[-1]}")
    ranks = numbers if kind == "rank" else [rank for node in numbers for rank in _of_node(node, domains, live)]
    return Sets(text, (tuple(sorted(set(ranks))),))


def _of_node(node: int, domains: Sequence[int], live: Sequence[int]) -> tuple[int, ...]:
    return tuple(rank for rank in live if domains[rank] == node)


def _any_k(text: str, live: list[int]) -> Sets:
    count = text.removeprefix("k=")
    if not (count.isascii() and count.isdigit()) or not 1 <= int(count) < len(live):
        raise ValueError(f"--kill {text}: k must be 1 or more, and less than the {len(live)} live rank(s)")
    k = int(count)
    if math.comb(len(live), k) <= MAX_SETS:
        return Sets(text, tuple(itertools.combinations(live, k)))
    rng = np.random.default_rng(0)
    drawn = {tuple(sorted(rng.choice(live, k, replace=False).tolist())) for _ in range(MAX_SETS)}
    return Sets(text, tuple(sorted(drawn)), complete=False)


def scan(placement: Placement, sets: Sets) -> dict[str, Any]:
    """Experts uncovered, mean over layers, over all scenarios: mean, worst and which; and how many scenarios leave
    all covered."""
    hosts = host_matrix(placement)
    copies_LE = hosts.sum(1)
    per_set = []
    for ranks in sets.ranks:
        there = hosts[:, list(ranks)].sum(1)
        per_set.append(((copies_LE == there) & (there > 0)).sum(1))
    uncovered = np.array(per_set)
    mean = uncovered.mean(1)
    worst = int(mean.argmax())
    return {
        "scenarios": len(sets.ranks),
        "complete": sets.complete,
        "uncovered_mean": float(mean.mean()),
        "uncovered_worst": float(mean[worst]),
        "uncovered_worst_layer": int(uncovered[worst].max(initial=0)),
        "worst_ranks": list(sets.ranks[worst]),
        "without_reload": int((uncovered.max(1, initial=0) == 0).sum()),
    }


def loss(
    placement: Placement,
    lost: Sequence[int],
    load_LE: npt.ArrayLike,
    slots_L: Sequence[int],
    expert_bytes: float,
    read_gbps: float,
    predict: Callable[[Floats], dict[str, float]] | None = None,
) -> dict[str, Any]:
    """One scenario in full.

    uncovered: experts per layer; load_part: what of a layer's tokens they take; reload_gb, reload_s: what is read again
    and for how long the busiest survivor reads at read_gbps; balance before, after the repair (even and re-solved
    shares) and after at most EXTRA_MOVES moves a layer, and what `predict` (loads of the live ranks' slots -> a
    step's cost) says of the last. feasible False: the survivors have too few slots, smallest_slots is what they would
    need.
    """
    load = np.asarray(load_LE, dtype=np.float64)
    alive = [a and rank not in lost for rank, a in enumerate(placement.alive)]
    gone = lost_experts(placement, alive)
    total_L = np.maximum(load.sum(1), 1e-300)
    part_L = [load[layer, list(experts)].sum() / total_L[layer] for layer, experts in enumerate(gone)]
    counts = [len(experts) for experts in gone]
    result: dict[str, Any] = {
        "ranks": list(lost),
        "survivors": sum(alive),
        "uncovered": float(np.mean(counts)),
        "uncovered_worst_layer": max(counts, default=0),
        "uncovered_per_layer": counts,
        "load_part": float(np.mean(part_L)),
        "load_part_worst_layer": float(max(part_L, default=0.0)),
        "reload_gb": sum(counts) * expert_bytes / 1e9,
        "balance_before": _balance(placement, placement.share, load),
    }
    smallest = -(-placement.num_experts // max(1, sum(alive)))
    result |= {"feasible": min(slots_L, default=0) >= smallest, "smallest_slots": smallest}
    if not result["feasible"] or not any(alive):
        return result | {"feasible": False}
    after = repair(placement, alive, placement.epoch + 1)
    loads = diff(placement, after)
    brought = [step.rank for step in loads]
    share = reweight(after.slot_to_expert, load, after.alive)
    moved = improve(after, load, max_moves=EXTRA_MOVES * placement.num_layers, max_moves_per_layer=EXTRA_MOVES)
    busiest = max((brought.count(rank) for rank in set(brought)), default=0)
    last = after if moved is None else moved
    last_share = share if moved is None else moved.share
    if predict is not None:
        part = slot_part(structs.replace(last, share=last_share), load)
        result["step_ms_after"] = predict(part[:, alive])["total_ms"]
    return result | {
        "loaded": len(loads),
        "reload_s": busiest * expert_bytes / (read_gbps * 1e9),
        "reload_gb_busiest": busiest * expert_bytes / 1e9,
        "balance_even": _balance(after, after.share, load),
        "balance_repaired": _balance(after, share, load),
        "balance_moved": _balance(last, last_share, load),
        "moves": 0 if moved is None else len(diff(after, moved)),
        "same_again": repair(placement, alive, placement.epoch + 1).checksum() == after.checksum(),
    }


def _balance(placement: Placement, share: npt.NDArray[np.float32], load_LE: Floats) -> float:
    return float(balancedness(rank_load(placement.slot_to_expert, share, load_LE), placement.alive).mean())


def guarantees(placement: Placement, slots_L: Sequence[int], worst: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The verdicts: rows of {id, holds, says}. worst: `loss` of the scenario in question, for F3 and F4."""
    live = sum(placement.alive)
    least = min(slots_L)
    k = survivable_losses(placement.num_experts, least, live)
    hosts = host_matrix(placement)
    copies_LE = hosts.sum(1)
    single = int((copies_LE == 1).sum(1).max(initial=0))
    by_rank = uncovered_by_group(placement, range(placement.num_ranks))[1].max(1, initial=0)
    bound = [fewest_uncovered(placement.num_experts, slots * live, live) for slots in slots_L]
    domains = domains_of(placement)
    spread = _spread(hosts, domains)
    several = copies_LE > 1
    near = int((several & ~spread).sum())
    nodes = len({domain for domain, alive in zip(domains, placement.alive, strict=True) if alive})
    rows: list[tuple[str, bool | None, str]] = [
        (
            "F0 capacity",
            k >= 1,
            f"any {max(k, 0)} rank loss(es) can be repaired: (G - k) * S >= E with S = {least}; it takes "
            f"{ranks_needed(placement.num_experts, least)} ranks",
        ),
        (
            "F1 no reload after one rank",
            single == 0,
            "every expert is on two ranks or more"
            if single == 0
            else f"up to {single} experts of a layer have one copy only",
        ),
        (
            "F2 bounded reload",
            None if not slots_L else bool((by_rank <= np.array(bound) + 2).all()),
            f"the worst rank takes {by_rank.mean():.2f} experts of a layer along, {int(by_rank.max(initial=0))} at "
            f"most; no placement in these slots is under {np.mean(bound):.0f} (holds: within 2 of that in every layer)",
        ),
        (
            "F5 failure domains",
            near == 0 if nodes > 1 else None,
            f"{nodes} domain(s); {near} expert(s) with several copies have them all in one",
        ),
    ]
    if worst is not None and worst["feasible"]:
        rows[3:3] = _after_repair(worst)
    return [{"id": name, "holds": holds, "says": says} for name, holds, says in rows]


def _after_repair(worst: dict[str, Any]) -> list[tuple[str, bool | None, str]]:
    """F3 and F4 of a `loss` that can be repaired."""
    lost = sum(worst["uncovered_per_layer"])
    return [
        (
            "F3 minimal reload",
            worst["loaded"] == lost,
            f"{worst['loaded']} experts are read, {lost} were lost; the others stay where they are",
        ),
        (
            "F4 balance after repair",
            worst["balance_moved"] >= 0.9,
            f"{worst['balance_repaired']:.4f} with new shares, "
            f"{worst['balance_moved']:.4f} after {worst['moves']} move(s) (holds: 0.9 or more)",
        ),
    ]


def _spread(hosts_LGE: Bools, domains: Sequence[int]) -> Bools:
    """bool [L, E]: the expert has copies in two failure domains or more."""
    labels = np.array(domains)
    groups = np.stack([hosts_LGE[:, labels == label].any(1) for label in sorted(set(domains))])
    spread: Bools = groups.sum(0) > 1
    return spread
