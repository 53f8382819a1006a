"""The balancer's own costs, and a live rebalance under load.

    python benchmarks/bench_eplb.py [--part times] [--part routing] [--part recording] [--part live] [--repeats 20]
        [--json]

times: a full plan, new shares and a few moves for 58 layers of 256 experts on 32 ranks of 9 slots, and what the ranks
work out when one is lost or comes back (repair_..., slot_tables; everywhere: 8 ranks of one machine, each of which has
every expert), on one thread: ms of its CPU time.
routing: from experts to slots by hash and shares (ep.place.SlotTable), beside replica = token index modulo replicas;
us of CPU time per call of one layer, the two ways in turns.
recording, live: benchmarks/eplb_live.py; real servers of 4 ranks on the embedded model.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from eplb_live import live, recording
from torch import Tensor

from ep.place import SlotTable, slot_tables
from eplb.mover import improve
from eplb.placement import Placement, linear_placement
from eplb.planner import plan
from eplb.repair import repair
from eplb.shares import reweight

LAYERS, EXPERTS, RANKS, SLOTS, TOP_K = 58, 256, 32, 9, 8
EVERYWHERE = 8  # ranks of one machine, whose store has every expert
PARTS = ("times", "routing", "recording", "live")


def loads(rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """[L, E]: lognormal per layer, as skewed as DeepSeek-V3's experts are (sd of the log 0.8 to 1.5)."""
    sigma_L1 = rng.uniform(0.8, 1.5, (LAYERS, 1))
    return np.exp(sigma_L1 * rng.normal(size=(LAYERS, EXPERTS)))


def drifted(load_LE: npt.NDArray[np.float64], rng: np.random.Generator, amount: float) -> npt.NDArray[np.float64]:
    return load_LE * np.exp(amount * rng.normal(size=load_LE.shape))


def timed(call: Callable[[], object], repeats: int) -> dict[str, float]:
    """The first call, which may compile, is not counted."""
    call()
    seconds = []
    for _ in range(repeats):
        began = time.thread_time()
        call()
        seconds.append(time.thread_time() - began)
    return {"min_ms": round(min(seconds) * 1e3, 3), "median_ms": round(statistics.median(seconds) * 1e3, 3)}


def times(repeats: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    load = loads(rng)
    nodes = [rank // 8 for rank in range(RANKS)]
    first = plan(load, RANKS, SLOTS, failure_domains=nodes).placement
    steps = [drifted(load, rng, 0.05) for _ in range(64)]
    ids = first.slot_to_expert
    without = (True,) * (RANKS - 1) + (False,)
    left = repair(first, without, 1)
    everywhere = linear_placement(LAYERS, EXPERTS, EVERYWHERE, EXPERTS, stores=(0,) * EVERYWHERE)
    turn = 0

    def following() -> npt.NDArray[np.float64]:
        nonlocal turn
        turn += 1
        return steps[turn % len(steps)]

    placement = first

    def moves() -> None:
        nonlocal placement
        placement = improve(placement, following(), max_moves=LAYERS) or placement

    return {
        "plan": timed(lambda: plan(following(), RANKS, SLOTS, failure_domains=nodes), repeats),
        "plan_relabelled": timed(
            lambda: plan(following(), RANKS, SLOTS, failure_domains=nodes, current=first), repeats
        ),
        "reweight": timed(lambda: reweight(ids, following()), repeats),
        "incremental": timed(moves, repeats),
        "placement_object": timed(
            lambda: Placement(1, EXPERTS, ids, first.share, first.alive, first.failure_domains), repeats
        ),
        "repair_loss": timed(lambda: repair(first, without, 1), repeats),
        "repair_return": timed(lambda: repair(left, first.alive, 2), repeats),
        "repair_everywhere": timed(lambda: repair(everywhere, (*everywhere.alive[1:], False), 1), repeats),
        "slot_tables": timed(lambda: slot_tables(left, 0), repeats),
        "slot_tables_everywhere": timed(lambda: slot_tables(everywhere, 0), repeats),
        "layers": LAYERS,
        "ranks": RANKS,
    }


class Modulo:
    """What the field does: the replicas of an expert take turns by the token's place."""

    def __init__(self, placement: Placement, layer: int) -> None:
        slots = placement.slots_of(layer)
        self._most = max(len(pairs) for pairs in slots)
        table = [[slot for slot, _ in pairs] + [0] * (self._most - len(pairs)) for pairs in slots]
        self._slots = torch.tensor(table).flatten()
        self._replicas_E = torch.tensor([len(pairs) for pairs in slots])
        self._index = torch.arange(1 << 16)

    def __call__(self, expert_TK: Tensor) -> Tensor:
        index_T1 = self._index[: expert_TK.shape[0]].view(-1, 1)
        return self._slots[(index_T1 % self._replicas_E[expert_TK]).add_(expert_TK, alpha=self._most)]


def routing(repeats: int) -> dict[str, Any]:
    """ratio: hash to modulo, the median of the ratios of turns."""
    rng = np.random.default_rng(1)
    placement = plan(loads(rng)[:1], RANKS, SLOTS).placement
    hashed, modulo = SlotTable(placement, 0), Modulo(placement, 0)
    result: dict[str, Any] = {}
    for tokens in (16, 128, 4096):
        expert_TK = torch.from_numpy(rng.integers(0, EXPERTS, (tokens, TOP_K)))
        calls = max(1, 8192 // tokens // 4)
        pairs = []
        for _ in range(max(30, 10 * repeats)):
            pair = []
            for way in (hashed, modulo):
                began = time.thread_time()
                for _ in range(calls):
                    way(expert_TK)
                pair.append((time.thread_time() - began) / calls * 1e6)
            pairs.append(pair)
        hash_us, modulo_us = (min(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(one / other for one, other in pairs)
        result[f"tokens_{tokens}"] = {
            "hash_us": round(hash_us, 2),
            "modulo_us": round(modulo_us, 2),
            "ratio": round(ratio, 3),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="only these; default: all")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=4, help="of the servers")
    parser.add_argument("--streams", type=int, default=32, help="that load the servers")
    parser.add_argument("--all2all", choices=["shm", "gloo"], default="shm")
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    for part in arguments.part or PARTS:
        if part == "times":
            result[part] = times(arguments.repeats)
        elif part == "routing":
            result[part] = routing(arguments.repeats)
        else:
            result[part] = asyncio.run((live if part == "live" else recording)(arguments))
        if not arguments.json:
            print(f"{part}: {json.dumps(result[part])}", file=sys.stderr)
    print(json.dumps(result))
    sys.exit(bool(result.get("live", {}).get("failed") or result.get("live", {}).get("mismatched")))


if __name__ == "__main__":
    main()
