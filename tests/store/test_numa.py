"""Nodes of memory as the kernel tells of them, from a made-up tree."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from configs.engine import EngineConfig
from engine.plan import make_plan
from engine.process.places import store_names
from launch.processes import RuntimeDir
from launch.weights import WeightsKept
from store.numa import Node, node_of, nodes, store_nodes

pytestmark = pytest.mark.store

GIB = 1 << 30


def tree(root: Path, *told: tuple[str, int]) -> Path:
    for number, (cores, free) in enumerate(told):
        folder = root / f"node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores + "\n")
        said = f"Node {number} MemTotal: 99 kB\nNode {number} MemFree: {free >> 11} kB\n"
        (folder / "meminfo").write_text(f"{said}Node {number} FilePages: {free >> 11} kB\n")
    (root / "has_cpu").touch()
    return root


def test_two_sockets(tmp_path: Path) -> None:
    found = nodes(tree(tmp_path / "node", ("0-3,8", 8 * GIB), ("4-7,9", 6 * GIB), ("", 64 * GIB)))
    assert found == (Node(0, frozenset({0, 1, 2, 3, 8}), 8 * GIB), Node(1, frozenset({4, 5, 6, 7, 9}), 6 * GIB))
    every = frozenset(range(10))
    assert store_nodes(found, every, 3 * GIB) == (0, 1)
    assert store_nodes(found, every, 3 * GIB + 1) == (), "node 1 has no room for it and as much again"
    assert store_nodes(found, frozenset({0, 1}), GIB) == (), "the cores of one node may be used"
    assert [node_of(found, frozenset(cores)) for cores in ({2, 3}, {3, 4, 5}, {3, 4}, {77})] == [0, 1, 0, -1]


def test_one_node_and_none(tmp_path: Path) -> None:
    one = nodes(tree(tmp_path / "node", ("0-1", 8 * GIB)))
    assert len(one) == 1 and store_nodes(one, frozenset({0, 1}), GIB) == ()
    assert nodes(tmp_path / "absent") == () and store_nodes((), frozenset({0}), GIB) == ()
    assert node_of((), frozenset({0})) == -1


def test_what_cannot_be_read_is_no_node(tmp_path: Path) -> None:
    root = tree(tmp_path / "node", ("0-1", GIB), ("none", GIB))
    assert [node.number for node in nodes(root)] == [0]


def test_this_machine() -> None:
    """Whatever it is: the cores of its nodes are there once."""
    found = nodes()
    cores = [core for node in found for core in node.cores]
    assert len(cores) == len(set(cores))
    if found:
        assert node_of(found, frozenset(os.sched_getaffinity(0))) in {node.number for node in found}


def test_a_store_for_each_node(tmp_path: Path) -> None:
    """And one for the machine where there are no nodes to choose from."""
    plan = replace(make_plan(EngineConfig(data_parallel_size=2)), weight_cache="")
    for chosen, names in (((0, 1), ["weights-0", "weights-1"]), ((), ["weights"])):
        runtime = RuntimeDir(tmp_path)
        try:
            WeightsKept(replace(plan, store_nodes=chosen), runtime)
            assert store_names(chosen) == names
            before = [runtime.file(name) for name in names]
            WeightsKept(replace(plan, store_nodes=chosen), runtime)  # the machine's ranks begin anew
            assert [runtime.file(name) for name in names] == before
            assert len({runtime.file(name).stat().st_ino for name in names}) == len(names)
        finally:
            runtime.close()
