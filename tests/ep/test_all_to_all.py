"""Every backend by name: rows arrive where they should, and come back weighted and summed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from a2a_cases import CASES, Case, exchange
from a2a_ranks import REMOTE, Results, run_ranks
from device_ranks import case_on, fitted
from puts_in_threads import fakes_for
from rank_threads import on_ranks

from dbo.steps import drain, weave
from ep.backends.mailbox import Mailbox
from ep.protocol import AllToAll
from ep.requirements import DEVICE_NAMES
from ep.table import make_lanes
from ep.transport.group import LocalGroup, MailboxGroup, MailboxWorld
from moe_kernels import Layout

by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
# Interpreted kernels that wait for each other take seconds; the cases that are left have every kind of row, and none.
OFTEN_ENOUGH = ("unequal", "nobody has tokens", "all to rank 0", "bfloat16, odd width", "rows in FP8, odd width")


def slow_between_devices(name: str, case: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] if name == "nvshmem_low_latency" and case not in OFTEN_ENOUGH else []


between_processes = pytest.mark.parametrize(
    "results",
    [
        pytest.param((name, size), id=f"{name} {size} ranks", marks=[pytest.mark.slow] if size > 2 else [])
        for name in ("shm", "gloo", REMOTE)
        for size in (2, 4)
    ],
    indirect=True,
)


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Results:
    """Processes take seconds to start: they run every case at once, for all tests."""
    return run_ranks(*request.param)


@torch.inference_mode()
@by_name
def test_local(case: Case) -> None:
    for lane in make_lanes("auto", LocalGroup(), case.num_slots, case.hidden, case.dtype, num_lanes=2):
        drain(exchange(lane, case, 0, 1))
        lane.close()


def mailboxes(size: int, case: Case, layout: Layout) -> tuple[MailboxWorld, list[list[AllToAll]]]:
    world = MailboxWorld(size)
    rows = case.rows if size > 1 else "plain"
    return world, [
        list(make_lanes("mailbox", group, case.num_slots, case.hidden, case.dtype, 2, layout, rows))
        for group in (MailboxGroup(world, rank) for rank in range(size))
    ]


@torch.inference_mode()
@by_name
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("layout", list(Layout), ids=lambda layout: layout.value)
def test_mailbox(case: Case, size: int, layout: Layout) -> None:
    if "large" in case.name and size > 1:
        pytest.skip("the size of a message means nothing to this backend")
    world, lanes = mailboxes(size, case, layout)
    for _ in range(2):
        drain(weave(*(exchange(lanes[rank][0], case, rank, size) for rank in range(size))))
    drain(weave(*(weave(*(exchange(lane, case, rank, size) for lane in lanes[rank])) for rank in range(size))))
    assert world.num_waiting == 0


def test_waiting_too_early_names_those_missing() -> None:
    world = MailboxWorld(3)
    case = CASES[0]
    x_TD, routing = case.inputs(1, 3)
    pending = Mailbox(world, 1, case.num_slots).dispatch(x_TD, routing)
    Mailbox(world, 2, case.num_slots).dispatch(*case.inputs(2, 3))
    with pytest.raises(AssertionError, match=r"rank 1 waits for .*dispatch.* rank\(s\) \[0\] have not posted"):
        pending.wait()


@between_processes
@by_name
def test_between_processes(case: Case, results: Results) -> None:
    assert_all_ok(results, case.name)


@between_processes
@pytest.mark.parametrize("what", ["moe", "gather", "parcels", "stall"])
def test_between_processes_also(what: str, results: Results) -> None:
    assert_all_ok(results, what)


@between_processes
def test_survivors_of_a_killed_rank_learn_of_it(results: Results) -> None:
    assert_all_ok(results, "death", num_dead=1)


@pytest.mark.fakes
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, fits, id=f"{name}-{fits.name}", marks=slow_between_devices(name, fits.name))
        for name in DEVICE_NAMES
        for fits in (fitted(case, name) for case in CASES)
        if fits is not None
    ],
)
def test_between_devices(name: str, size: int, case: Case, tmp_path: Path) -> None:
    """The libraries are fakes, NCCL is gloo, and the devices are threads with tensors of the CPU."""
    with fakes_for(name):
        on_ranks(tmp_path, size, lambda group: case_on(group, name, case))


def assert_all_ok(results: Results, what: str, num_dead: int = 0) -> None:
    size = 1 + max(rank for _, rank in results)
    for rank in range(size - num_dead):
        assert results[what, rank] == "ok", f"rank {rank}:\n{results[what, rank]}"
