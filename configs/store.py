"""Where weights lie: in memory of each rank's own, or in the store of the machine. Without torch."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from configs.engine import EngineConfig, Plan
from configs.machine import Machine, ModelNumbers

CACHED_BYTES = 512 << 20  # weights that take less are not kept on disk unless that is asked for
OFF = "off"
# Of a process that waits to become a rank: Python, torch and what a rank imports; benchmarks/bench_store.py shows it.
STANDBY_BYTES = 208 << 20


def plan_store(
    config: EngineConfig,
    model: ModelNumbers,
    machine: Machine,
    alone: bool,
    needed: int,
    room: int,
    why: dict[str, str],
) -> int:
    """On how many machines weights lie in a store; 0: each rank has its own. needed: bytes that a store takes; room:
    what all machines have for weights."""
    why["store_bytes"] = "each rank has weights of its own"
    stores = machine.machines
    if machine.device != "cpu" or not (machine.shared_memory or stores > 1):
        why["weight_store"] = "only ranks of one machine without a GPU share weights"
    elif alone and (config.weight_cache == OFF or (config.weight_cache is None and needed < CACHED_BYTES)):
        why["weight_store"] = "there is one process, and what it packs is not kept on disk"
    elif model.num_experts and config.num_redundant_experts is not None:
        why["weight_store"] = "num_redundant_experts asks for experts of each rank's own"
    elif stores > 1 and stores * needed > room:
        why["weight_store"] = (
            f"{stores} machines with all weights each would take {stores * needed >> 20} MiB, more than the "
            f"{room >> 20} MiB that leave room for the cache"
        )
    else:
        why["weight_store"] = "filled once by all ranks of the machine, and mapped by each"
        if alone:
            why["weight_store"] = "there is one process; what it packs is kept on disk, and mapped at the next start"
        why["store_bytes"] = "all weights, once" if stores == 1 else "all weights, once on each machine"
        why["rank_bytes"] = "its cache; its weights are the store's"
        return stores
    return 0


def with_cache(plan: Plan, asked: str | None, folder: Path) -> Plan:
    """The plan with the directory for packed weights; `folder` unless another one or none was asked for."""
    cache, reason = "", "as asked"
    if not plan.weight_store:
        reason = "there is no store of weights to keep"
        if asked not in (None, OFF):
            raise ValueError(f"weight_cache {asked!r}: {reason}: {plan.reasons['weight_store']}")
    elif asked is None and plan.store_bytes < CACHED_BYTES:
        reason = f"weights of less than {CACHED_BYTES >> 20} MiB are packed in a moment"
    elif asked is None:
        cache, reason = str(folder), "packed weights are mapped at the next start"
    elif asked != OFF:
        path = Path(asked).absolute()
        there = next(found for found in (path, *path.parents) if found.exists())
        if not there.is_dir():
            raise ValueError(f"weight_cache {asked!r}: {there} is not a directory")
        cache = str(path)
    return replace(plan, weight_cache=cache, reasons={**plan.reasons, "weight_cache": reason})


def with_bytes(plan: Plan, stores: int, weights: int, cache: int) -> Plan:
    """The plan with what its memory is for. weights: bytes of all ranks' together; cache: of one rank's cache."""
    if stores:
        return replace(plan, weight_store=True, store_bytes=weights // stores, rank_bytes=cache)
    return replace(plan, rank_bytes=weights // plan.data_parallel_size + cache)
