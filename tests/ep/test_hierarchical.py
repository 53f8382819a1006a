"""Few tokens between machines with several ranks each: through memory inside of one, over connections between them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from a2a_cases import CASES, Case, exchange
from linked_groups import on_machines

from dbo.steps import drain, weave
from ep.backends.dispatchers import PairedLane, StepState
from ep.backends.hierarchical import HierarchicalAllToAll
from ep.protocol import AllToAll, PeerLost
from ep.table import make_lanes
from ep.transport.group import GlooGroup
from moe_kernels import TokenBatch
from native import Isa, best_isa

pytestmark = pytest.mark.skipif(best_isa() == Isa.NONE, reason="the native kernels were not built")

FEW = [case for case in CASES if "large" not in case.name and case.rows == "plain"]


def places(folder: Path, *ranks: int) -> list[Path]:
    """ranks: of each machine."""
    found = [folder / f"machine-{machine}" for machine in range(len(ranks))]
    for place in found:
        place.mkdir()
    return [place for place, count in zip(found, ranks, strict=True) for _ in range(count)]


def lanes_of(group: GlooGroup, case: Case, count: int = 2) -> list[AllToAll]:
    return [HierarchicalAllToAll(group, case.num_slots, case.hidden, case.dtype, 16) for _ in range(count)]


@pytest.mark.parametrize("ranks", [(2, 2), (3, 3), (2, 2, 2)], ids=str)
def test_every_token_arrives_and_comes_back(ranks: tuple[int, ...], tmp_path: Path) -> None:
    size = sum(ranks)

    def act(group: GlooGroup) -> int:
        for case in FEW:
            lanes = lanes_of(group, case)
            for _ in range(2):
                drain(exchange(lanes[0], case, group.rank, size))
            drain(weave(*(exchange(lane, case, group.rank, size) for lane in lanes)))
        return len(FEW)

    assert on_machines(size, act, places=places(tmp_path, *ranks)) == [len(FEW)] * size


def test_a_token_goes_once_to_each_machine(tmp_path: Path) -> None:
    """Though each of its ranks has experts of it; and every rank of the machine has it then."""
    case = Case("all over", (3,), num_slots=2, top_k=8)

    def act(group: GlooGroup) -> tuple[int, int]:
        (lane,) = lanes_of(group, case, 1)
        assert isinstance(lane, HierarchicalAllToAll)
        x_TD, routing = case.inputs(group.rank, 4)
        arrived = lane.dispatch(x_TD, routing).wait()
        batch, outside = arrived.batch, arrived.ticket.batch  # type: ignore[attr-defined]
        assert isinstance(batch, TokenBatch)
        return outside.x_TD.shape[0], batch.x_TD.shape[0]

    assert on_machines(4, act, places=places(tmp_path, 2, 2)) == [(6, 12)] * 4


@pytest.mark.parametrize("ranks", [(2, 1), (4,), (1, 1)], ids=str)
def test_where_machines_are_not_alike_ranks_are_linked_each_with_each(ranks: tuple[int, ...], tmp_path: Path) -> None:
    case, size = FEW[0], sum(ranks)

    def act(group: GlooGroup) -> bool:
        state = StepState()
        (lane,) = make_lanes("gloo", group, case.num_slots, case.hidden, case.dtype, few_tokens=16, state=state)
        state.begin(16)
        drain(exchange(lane, case, group.rank, size))
        return isinstance(lane, PairedLane) and group.machine is None

    assert on_machines(size, act, places=places(tmp_path, *ranks)) == [True] * size


@pytest.mark.parametrize("stage", ["dispatch", "combine"])
def test_a_rank_that_leaves(stage: str, tmp_path: Path) -> None:
    """All others learn of it, those of its machine and those of the other one."""
    case = FEW[0]

    def act(group: GlooGroup) -> str:
        (lane,) = lanes_of(group, case, 1)
        steps = exchange(lane, case, group.rank, 4)
        if group.rank == 3:
            if stage == "combine":
                next(steps)
            group.close()
            return "left"
        with pytest.raises(PeerLost) as lost:
            drain(steps)
        assert not lost.value.ranks, "one that has left may have lost another"
        with pytest.raises(PeerLost):
            group.all_gather_ints([1])
        return "lost"

    assert on_machines(4, act, places=places(tmp_path, 2, 2)) == ["lost", "lost", "lost", "left"]


def test_sums_do_not_depend_on_who_serves(tmp_path: Path) -> None:
    """The same token on each rank: the same sum, bit by bit."""
    case = Case("sums", (1,), num_slots=4, top_k=8, hidden=70, dtype=torch.bfloat16)
    x_TD, routing = case.inputs(0, 4)

    def act(group: GlooGroup) -> list[float]:
        (lane,) = lanes_of(group, case, 1)
        arrived = lane.dispatch(x_TD, routing).wait()
        batch = arrived.batch
        assert isinstance(batch, TokenBatch) and batch.rows_PD is not None
        here_NK = (batch.slot_TK >= batch.first_slot) & (batch.slot_TK < batch.first_slot + case.num_slots)
        rows_NKD = (batch.x_TD[:, None].float() * (batch.slot_TK % 7 + 1)[:, :, None]).bfloat16()
        y_PD = batch.rows_PD.copy_(rows_NKD[here_NK])
        found: list[float] = lane.combine(y_PD, arrived.ticket, torch.empty_like(x_TD)).wait().flatten().tolist()
        return found

    first, *others = on_machines(4, act, places=places(tmp_path, 2, 2))
    assert others == [first] * 3
