"""The store of weights of a rank's machine, as its process has it. Without torch: it can be mapped before that is there
(engine/process/fork_process.py)."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import NamedTuple

import msgspec

from configs.engine import Plan
from engine.process.places import Places, store_capacity, store_names
from store.memory import Store
from store.numa import node_of, nodes


class Begun(NamedTuple):
    """What a process has done before it is a rank. store: full, and mapped, or about to be. reading: of the vocabulary,
    when a process that has practised has waited for a while: most of the work, and a rank can serve without; another
    loss may be near, and the ranks need their cores. None: it has not practised."""

    store: Store
    reading: threading.Timer | None = None


def open_store(plan: Plan, places: Places) -> Store | None:
    """Where this machine's ranks have their weights, or those of this rank's node of memory. None: nowhere."""
    if not plan.weight_store:
        return None
    names = store_names(plan.store_nodes)
    node = node_of(nodes(), frozenset(os.sched_getaffinity(0))) if plan.store_nodes else -1
    name = names[plan.store_nodes.index(node)] if node in plan.store_nodes else names[0]
    return Store(places.file(name), plan.weight_key, store_capacity(plan))


def full_store(plan: Plan, places: Places) -> Store | None:
    """For a process that is no rank yet. None: there is no full one, or which one it will map depends on its cores, and
    those on its number."""
    store = None if plan.store_nodes else open_store(plan, places)
    if store is not None and not store.complete:
        store.close()
        return None
    return store


def begin(plan: Path, runtime_dir: Path, memory: Path | None) -> Begun | None:
    """Map the store, if it is full, while torch is imported. As the options of engine/process/rank_process.py."""
    with contextlib.suppress(OSError, ValueError):  # the rank will say so
        store = full_store(read_plan(plan), Places(runtime_dir, memory))
        if store is not None:
            start_mapping(store)
            return Begun(store)
    return None


def read_plan(path: Path) -> Plan:
    return msgspec.json.decode(path.read_bytes(), type=Plan)


def start_mapping(store: Store) -> None:
    """Not at low priority: whatever else of this process asks for memory waits for a piece of it to end."""
    threading.Thread(target=store.map_ahead, name="mapping", daemon=True).start()
