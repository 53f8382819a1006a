"""Which node this is: flags before LeaderWorkerSet before torchrun before Slurm before MPI, and no guess in doubt."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.hosts import ranks_of
from launch.launchers.place import Place, find_place, first_host

pytestmark = pytest.mark.launchers
NAMES = st.from_regex(r"[a-z][a-z0-9]{0,5}", fullmatch=True)


def worker_set(nodes: int, index: int, head: str) -> dict[str, str]:
    return {"LWS_GROUP_SIZE": str(nodes), "LWS_WORKER_INDEX": str(index), "LWS_LEADER_ADDRESS": head}


def torchrun(nodes: int, index: int, head: str) -> dict[str, str]:
    return {
        "RANK": str(index), "LOCAL_RANK": "0", "GROUP_RANK": str(index), "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": str(nodes),
        "MASTER_ADDR": head, "MASTER_PORT": "29400", "TORCHELASTIC_RUN_ID": "none",
    }  # fmt: skip


def slurm(nodes: int, index: int, head: str) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "9", "SLURM_STEP_ID": "0", "SLURM_NODEID": str(index),
        "SLURM_PROCID": str(index), "SLURM_LOCALID": "0", "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_NUM_TASKS": str(nodes), "SLURM_STEP_NODELIST": f"{head},{head}x[1-9]",
    }  # fmt: skip


def mpi(nodes: int, index: int, head: str) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(index), "OMPI_COMM_WORLD_SIZE": str(nodes), "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    }  # fmt: skip


SYSTEMS = (worker_set, torchrun, slurm, mpi)


@given(st.integers(1, 40), st.data(), NAMES, st.sets(st.sampled_from(range(4)), min_size=1))
def test_the_outermost_system_says_it(nodes: int, data: st.DataObject, head: str, which: set[int]) -> None:
    variables = {"HOME": "/root", "SLURM_CONF": "/etc/slurm.conf"}
    indices = {}
    for system in sorted(which):
        indices[system] = data.draw(st.integers(0, nodes - 1))
        variables |= SYSTEMS[system](nodes, indices[system], f"{head}{system}")
    first = min(which)
    told = None if first == 3 else f"{head}{first}"
    if told is None and nodes > 1:
        with pytest.raises(ValueError, match=r"--data-parallel-address is needed.*OMPI_COMM_WORLD_RANK"):
            find_place(variables, None, None, None)
        told = "given"
    found = find_place(variables, None, None, told)
    assert (found.nodes, found.index, found.head) == (nodes, indices[first], told)
    assert set(found.said) <= variables.keys()


@given(st.integers(2, 9), st.data(), st.sampled_from(SYSTEMS))
def test_words_win(nodes: int, data: st.DataObject, system: object) -> None:
    index = data.draw(st.integers(0, nodes - 1))
    variables = system(nodes, index, "there")  # type: ignore[operator]
    other = data.draw(st.integers(0, nodes - 1))
    assert find_place(variables, nodes, other, "here") == Place(nodes, other, "here")
    assert find_place(variables, None, other, "here").index == other
    assert find_place(variables, nodes + 3, other, "here") == Place(nodes + 3, other, "here")
    if system is not mpi:
        assert find_place(variables, nodes, other, None).head == "there"


@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([(a, b) for a in range(4) for b in range(4) if a < b]))
def test_systems_that_count_differently_are_refused_by_their_variables(
    one: int, two: int, pair: tuple[int, int]
) -> None:
    first, second = (SYSTEMS[system] for system in pair)
    variables = first(one, 0, "a") | second(two, 0, "a")
    if one == two:
        assert find_place(variables, None, None, "a").nodes == one
        return
    with pytest.raises(ValueError, match="which node this is cannot be told") as refusal:
        find_place(variables, None, None, "a")
    for system in (first, second):
        assert any(name in str(refusal.value) for name in system(1, 0, "a"))
    assert "--nnodes and --node-rank" in str(refusal.value)


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.__name__)
def test_half_of_what_a_system_says_is_refused_by_name(system: object) -> None:
    whole = system(3, 1, "a")  # type: ignore[operator]
    for name in whole:
        rest = {other: text for other, text in whole.items() if other != name}
        try:
            assert find_place(rest, None, None, "a").index == 1
        except ValueError as error:
            assert re.search(r"[A-Z]+_?[A-Z_]+|no system tells", str(error))
        broken = whole | {name: "-1"}
        try:
            find_place(broken, None, None, "a")
        except ValueError as error:
            assert name in str(error)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "no system tells which node this is"),
        (torchrun(4, 1, "a") | {"LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE is 2: one process per node is needed"),
        (slurm(2, 1, "a") | {"SLURM_STEP_NUM_TASKS": "16"}, "SLURM_STEP_NUM_TASKS is 16 and SLURM_STEP_NUM_NODES 2"),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}, "start one task per node with srun"),
        (mpi(8, 1, "a") | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "OMPI_COMM_WORLD_LOCAL_SIZE is 4"),
        ({"PMIX_RANK": "3"}, "PMIX_SIZE is missing beside PMIX_RANK"),
        (worker_set(2, 5, "a"), "node rank (LWS_WORKER_INDEX"),
        (slurm(2, 0, "a") | {"SLURM_STEP_NODELIST": "["}, "SLURM_STEP_NODELIST '[' is no list of nodes"),
        ({"RANK": "1", "MASTER_ADDR": "a"}, "WORLD_SIZE is missing beside RANK, MASTER_ADDR"),
    ],
)
def test_what_is_refused(variables: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError) as refusal:
        find_place(variables, None, None, None)
    assert said in str(refusal.value)


def test_a_batch_shell_of_one_node_is_that_node() -> None:
    assert find_place({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}, None, None, None).nodes == 1


@given(NAMES, st.integers(0, 99), st.integers(1, 30), st.integers(1, 3), st.booleans())
def test_the_first_name_of_slurms_list(name: str, low: int, more: int, width: int, suffix: bool) -> None:
    end = "-ib" if suffix else ""
    first = f"{low:0{width}}"
    assert first_host(f"{name}[{first}-{low + more:0{width}}]{end},login") == f"{name}{first}{end}"
    assert first_host(f"{name}[{first},{low + more}]{end}") == f"{name}{first}{end}"
    assert first_host(f"{name}{first}") == f"{name}{first}" and first_host(f"{name},b[1-2]") == name


@pytest.mark.parametrize("text", ["gpu[07-09,12],login", "r[1-2]n[3-4]", "a-b-[0008-0010]", "one"])
def test_slurm_itself_expands_to_the_same_first_name(text: str, tmp_path: Path) -> None:
    if shutil.which("scontrol") is None:
        pytest.skip("there is no scontrol: apt-get install slurm-client")
    config = tmp_path / "slurm.conf"
    config.write_text("ClusterName=test\nSlurmctldHost=localhost\n")
    command = ["scontrol", "show", "hostnames", text]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "SLURM_CONF": str(config)})
    assert done.returncode == 0 and first_host(text) == done.stdout.split()[0]


@given(st.lists(st.integers(1, 8), min_size=1, max_size=6))
def test_ranks_are_next_to_each_other(counts: list[int]) -> None:
    parts = [ranks_of(len(counts), index, tuple(counts), None) for index in range(len(counts))]
    assert [rank for _, local, first in parts for rank in range(first, first + local)] == list(range(sum(counts)))
    assert {size for size, _, _ in parts} == {sum(counts)}


@pytest.mark.parametrize(
    ("nodes", "counts", "size", "said"),
    [
        (2, (), 3, "--data-parallel-size 3 cannot be divided among 2 nodes"),
        (2, (1, 2, 3), None, "--data-parallel-size-local has 3 numbers for 2 nodes"),
        (2, (0,), None, "--data-parallel-size-local must be at least 1, not 0"),
        (2, (2,), 3, "--data-parallel-size is 3, but 2 nodes have 4 ranks"),
    ],
)
def test_ranks_that_do_not_add_up(nodes: int, counts: tuple[int, ...], size: int | None, said: str) -> None:
    with pytest.raises(ValueError) as refusal:
        ranks_of(nodes, 0, counts, size)
    assert said in str(refusal.value)
