"""Slots per rank against memory and balance: what one more replica costs and brings, and where no algorithm can do
better.

Legend: L MoE layers, E logical experts, G ranks, S slots of a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from eplb.balance import Floats, balancedness, placement_balance, rank_load
from eplb.bounds import balance_bound
from eplb.coverage import worst_rank
from eplb.offline.cluster import Cluster
from eplb.offline.replay import slot_part, step_counts
from eplb.offline.shapes import ModelShape
from eplb.offline.trace import Trace
from eplb.placement import Placement
from eplb.planner import Coverage, Method, plan

_STEPS = 4  # single steps looked at in a pair of windows
_GPU_MEMORY = 0.9  # of a GPU's memory, for weights and cache


class Pair(Struct, frozen=True):
    """Loads of a window and of the one behind it, [L, E], and counts of single steps in that."""

    fit_LE: Floats
    next_LE: Floats
    steps: tuple[Floats, ...]


def window_pairs(trace: Trace, window: int, count: int) -> list[Pair]:
    """At most `count` pairs of windows of `window` records each, evenly over the trace.

    Raises ValueError when the trace holds no two windows.
    """
    last = trace.num_records - 2 * window
    if last < 0:
        raise ValueError(
            f"a window of {window} records needs a trace of {2 * window}; this one has {trace.num_records}"
        )
    pairs = []
    for start in sorted(set(np.linspace(0, last, count).round().astype(int).tolist())):
        middle, end = start + window, start + 2 * window
        chosen = sorted(set(np.linspace(middle, end - 1, min(_STEPS, window)).round().astype(int).tolist()))
        counts = tuple(step_counts(trace, record) for record in chosen)
        pairs.append(Pair(trace.window(start, middle), trace.window(middle, end), counts))
    return pairs


def memory(shape: ModelShape, slots: int, needed: int, cluster: Cluster | None) -> dict[str, Any]:
    """expert_gb: of a GPU's experts in all MoE layers; replica_gb: what of it the slots beyond `needed` take, and the
    KV tokens that would have fitted there; kv_tokens: what is left for the cache (None without a cluster)."""
    slot_bytes = shape.expert_bytes * shape.num_moe_layers
    replicas = (slots - needed) * slot_bytes
    result: dict[str, Any] = {
        "expert_gb": slots * slot_bytes / 1e9,
        "replica_gb": replicas / 1e9,
        "kv_tokens_lost": round(replicas / shape.kv_bytes_per_token),
        "kv_tokens": None,
    }
    if cluster is not None:
        left = cluster.gpu.hbm_gb * 1e9 * _GPU_MEMORY - shape.replicated_bytes - slots * slot_bytes
        result["kv_tokens"] = max(0, int(left / shape.kv_bytes_per_token))
    return result


def point(
    pairs: Sequence[Pair],
    num_ranks: int,
    slots: int,
    *,
    domains: Sequence[int] = (),
    method: Method = "auto",
    coverage: Coverage = "spread",
    min_copies: int = 1,
    predict: Callable[[npt.NDArray[np.float64]], dict[str, float]] | None = None,
) -> dict[str, Any]:
    """One S, means over the pairs: in_window, next_window, step (of single steps in the next window), bound (of any
    placement in these slots), uncovered by the worst rank; with `predict` (slot loads -> a step's cost) milliseconds
    and tokens/s."""
    rows = []
    costs = []
    for pair in pairs:
        made = plan(
            pair.fit_LE,
            num_ranks,
            slots,
            failure_domains=domains,
            method=method,
            coverage=coverage,
            min_copies=min_copies,
        )
        placement = made.placement
        bound = balance_bound(pair.fit_LE, slots * num_ranks, num_ranks, min_copies)
        rows.append(
            (
                made.balance.mean(),
                placement_balance(placement, pair.next_LE).mean(),
                np.mean([_step(placement, counts) for counts in pair.steps]),
                bound.mean(),
                worst_rank(placement)[1].mean(),
            )
        )
        if predict is not None:
            costs.append(predict(slot_part(placement, pair.steps[-1])))
    names = ("in_window", "next_window", "step", "bound", "uncovered_by_worst_rank")
    result: dict[str, Any] = dict(zip(names, np.mean(rows, axis=0).tolist(), strict=True))
    for name in ("total_ms", "tokens_per_s_per_gpu") if costs else ():
        result[name] = float(np.mean([cost[name] for cost in costs]))
    return result


def _step(placement: Placement, counts_LE: Floats) -> float:
    return float(balancedness(rank_load(placement.slot_to_expert, placement.share, counts_LE)).mean())
