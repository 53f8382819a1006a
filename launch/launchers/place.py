"""Which node of a launch this process is: from the variables of the system that started it, and from nothing else.

One process per node starts, with the same words everywhere; LeaderWorkerSet, torchrun (or whatever else sets RANK and
WORLD_SIZE as it does), Slurm or MPI tells it which one it is. They are asked in this order, because each may run inside
of the next ones. Words of the command line win over all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from msgspec import Struct

Variables = Mapping[str, str]
WORDS = "say --nnodes and --node-rank"  # which end every doubt


class Place(Struct, frozen=True):
    """Node `index` of `nodes`. head: the address or the name of node 0; None: the system does not say. said: the
    variables that told it; (): the command line did."""

    nodes: int
    index: int
    head: str | None
    said: tuple[str, ...] = ()


class _System(NamedTuple):
    name: str
    marks: tuple[str, ...]  # variables one of which is there when the system has started this process
    read: Callable[[Variables], Place]


def find_place(variables: Variables, nodes: int | None, index: int | None, head: str | None) -> Place:
    """nodes, index, head: of the command line; None: to be found. Raises ValueError, which names the variables, where
    nothing says it, or not clearly."""
    if nodes is None or index is None:
        found = _ask(variables)
    elif head is None and nodes > 1:
        found = _ask_head(variables, nodes, index)
    else:
        found = Place(nodes, index, head)
    nodes = found.nodes if nodes is None else nodes
    place = Place(nodes, found.index if index is None else index, head or found.head, found.said)
    if place.nodes < 1:
        raise ValueError(f"--nnodes must be at least 1, not {place.nodes}")
    if not 0 <= place.index < place.nodes:
        given = "--node-rank" if index is not None else f"node rank ({', '.join(place.said)})"
        raise ValueError(f"{given} must be 0 to {place.nodes - 1} of {place.nodes} nodes, not {place.index}")
    if place.head is None and place.nodes > 1:
        who = f" ({', '.join(place.said)} do not tell it)" if place.said else ""
        raise ValueError(f"--data-parallel-address is needed: the address of node 0{who}")
    return place


def _ask(variables: Variables) -> Place:
    present = [system for system in SYSTEMS if any(name in variables for name in system.marks)]
    if not present:
        raise ValueError(
            f"no system tells which node this is: {WORDS}, or start it by {', '.join(one.name for one in SYSTEMS)}"
        )
    place = present[0].read(variables)
    for system in present[1:]:
        try:
            other = system.read(variables)
        except ValueError:  # what that one says is of another kind of process, which has started the first one
            continue
        if other.nodes != place.nodes:
            raise ValueError(
                f"which node this is cannot be told: {present[0].name} counts {place.nodes} node(s) "
                f"({', '.join(place.said)}), {system.name} {other.nodes} ({', '.join(other.said)}); {WORDS}"
            )
    return place


def _ask_head(variables: Variables, nodes: int, index: int) -> Place:
    """The place as the command line has it, with the head that a system tells of."""
    try:
        found = _ask(variables)
    except ValueError:
        return Place(nodes, index, None)
    return Place(nodes, index, found.head if found.nodes == nodes else None)


# ---- the systems ----


def _worker_set(variables: Variables) -> Place:
    names = ("LWS_WORKER_INDEX", "LWS_GROUP_SIZE", "LWS_LEADER_ADDRESS")
    index, nodes = _number(variables, names[0], names), _number(variables, names[1], names)
    return Place(nodes, index, _text(variables, names[2], names), names)


def _torchrun(variables: Variables) -> Place:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
    rank, world = _number(variables, "RANK", names), _number(variables, "WORLD_SIZE", names)
    if "LOCAL_WORLD_SIZE" in variables:
        _one_per_node(variables, "LOCAL_WORLD_SIZE", names, "torchrun --nproc-per-node 1")
    return Place(world, rank, _text(variables, "MASTER_ADDR", names), names)


def _slurm(variables: Variables) -> Place:
    step = ("SLURM_NODEID", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NODELIST")
    if "SLURM_STEP_NODELIST" not in variables:
        job = ("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES")
        if _number(variables, job[1], job) == 1:
            return Place(1, 0, None, job)
        raise ValueError(
            f"SLURM_JOB_NUM_NODES is {variables[job[1]]}, and without SLURM_STEP_NODELIST this is no task of a step: "
            f"start one task per node with srun, or {WORDS}"
        )
    index, nodes = _number(variables, step[0], step), _number(variables, step[1], step)
    tasks = _number(variables, "SLURM_STEP_NUM_TASKS", ("SLURM_STEP_NUM_TASKS", *step))
    if tasks != nodes:
        raise ValueError(
            f"SLURM_STEP_NUM_TASKS is {tasks} and SLURM_STEP_NUM_NODES {nodes}: one process per node is needed "
            f"(srun --ntasks-per-node=1), or {WORDS}"
        )
    return Place(nodes, index, first_host(variables[step[2]]), step)


def _mpi(variables: Variables) -> Place:
    names = next(
        (names for names in _MPI_NAMES if names[0] in variables and names[1] in variables),
        next(names for names in _MPI_NAMES if names[0] in variables or names[1] in variables or "PMIX_RANK" in names),
    )
    rank, size, local = names
    place = Place(_number(variables, size, names[:2]), _number(variables, rank, names[:2]), None, names[:2])
    if local in variables:
        _one_per_node(variables, local, names, "mpirun --map-by ppr:1:node")
    return place


# Its rank, how many there are, and how many of them on this node.
_MPI_NAMES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    ("PMIX_RANK", "PMIX_SIZE", "PMIX_LOCAL_SIZE"),
)
SYSTEMS = (
    _System("LeaderWorkerSet", ("LWS_WORKER_INDEX", "LWS_GROUP_SIZE", "LWS_LEADER_ADDRESS"), _worker_set),
    _System("torchrun", ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"), _torchrun),
    _System("Slurm", ("SLURM_JOB_ID", "SLURM_STEP_NODELIST"), _slurm),
    _System("MPI", ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "PMIX_RANK"), _mpi),
)


def first_host(nodelist: str) -> str:
    """Of Slurm's short form of many names: of "gpu[07-09,12]-ib,login" it is "gpu07-ib"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist)
    assert first is not None  # it matches nothing at least
    name = re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0]).strip()
    if not name or "[" in name:
        raise ValueError(f"SLURM_STEP_NODELIST {nodelist!r} is no list of nodes; {WORDS}")
    return name


def _text(variables: Variables, name: str, names: tuple[str, ...]) -> str:
    value = variables.get(name, "").strip()
    if not value:
        there = [other for other in names if variables.get(other, "").strip()]
        beside = f" beside {', '.join(there)}" if there else ""
        raise ValueError(f"{name} is missing{beside}; {WORDS}")
    return value


def _number(variables: Variables, name: str, names: tuple[str, ...]) -> int:
    text = _text(variables, name, names)
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII):
        raise ValueError(f"{name} is {text!r}, which is no number of nodes; {WORDS}")
    return int(text)


def _one_per_node(variables: Variables, name: str, names: tuple[str, ...], how: str) -> None:
    if (count := _number(variables, name, names)) != 1:
        raise ValueError(f"{name} is {count}: one process per node is needed ({how}), or {WORDS}")
