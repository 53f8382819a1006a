"""The memory nodes of a machine (NUMA), and on which of them there is to be a store of weights. Standard library
only: what the kernel says under /sys/devices/system/node.

A rank reads its weights in every step, so those that lie on another node cost the link between the nodes. Pages lie on
the node of the core that first writes them: a store is filled by ranks that run on the cores of its node.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

SYSFS = Path("/sys/devices/system/node")


class Node(NamedTuple):
    number: int
    cores: frozenset[int]
    free: int  # bytes


def nodes(root: Path = SYSFS) -> tuple[Node, ...]:
    """Those that have cores, by number; empty where the kernel tells of none."""
    found = []
    for folder in root.glob("node[0-9]*"):
        try:
            cores = _numbers((folder / "cpulist").read_text())
            free = _kibibytes((folder / "meminfo").read_text(), "MemFree") + _kibibytes(
                (folder / "meminfo").read_text(), "FilePages"
            )
        except (OSError, ValueError):
            continue
        if cores:  # one without is memory only
            found.append(Node(int(folder.name.removeprefix("node")), cores, free << 10))
    return tuple(sorted(found))


def store_nodes(found: Sequence[Node], cores: frozenset[int], store_bytes: int) -> tuple[int, ...]:
    """The nodes that are to have a store each; none when there is to be one for the machine: there is one node whose
    cores (those that may be used) take part, or one of them has no room for a store and as much again."""
    used = [node for node in found if node.cores & cores]
    if len(used) < 2 or any(node.free < 2 * store_bytes for node in used):
        return ()
    return tuple(node.number for node in used)


def node_of(found: Sequence[Node], cores: frozenset[int]) -> int:
    """The node that has most of these cores, the first of equals; -1: none has any."""
    best = max(found, key=lambda node: (len(node.cores & cores), -node.number), default=None)
    return -1 if best is None or not best.cores & cores else best.number


def _numbers(text: str) -> frozenset[int]:
    """Of a list like 0-3,8 (cpuset(7), list format)."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _kibibytes(text: str, name: str) -> int:
    found = re.search(rf"\b{name}:\s+(\d+) kB", text)
    return int(found[1]) if found else 0
