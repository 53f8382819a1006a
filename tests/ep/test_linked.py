"""Few tokens between ranks of several machines, over connections of their own."""

from __future__ import annotations

import time

import pytest
import torch
from a2a_cases import CASES, Case, exchange
from linked_groups import on_machines
from torch import Tensor

import dbo.alive as alive
from dbo.steps import drain, weave
from ep.backends.dispatchers import PairedLane, StepState
from ep.backends.linked import LinkedAllToAll
from ep.protocol import AllToAll, PeerLost
from ep.table import make_lanes
from ep.transport.group import GlooGroup
from moe_kernels import TokenBatch
from native import Isa, best_isa, limit_isa

pytestmark = pytest.mark.skipif(best_isa() == Isa.NONE, reason="the native kernels were not built")

FEW = [case for case in CASES if "large" not in case.name and case.rows == "plain"]
TIMEOUT = 1.0


def lanes_of(group: GlooGroup, case: Case, count: int = 2, most: int = 16) -> list[AllToAll]:
    assert group.links is not None
    return [LinkedAllToAll(group.links, case.num_slots, case.hidden, case.dtype, most) for _ in range(count)]


@pytest.mark.parametrize("size", [2, 3])
def test_every_token_arrives_and_comes_back(size: int) -> None:
    def act(group: GlooGroup) -> int:
        for case in FEW:
            lanes = lanes_of(group, case)
            for _ in range(2):
                drain(exchange(lanes[0], case, group.rank, size))
            drain(weave(*(exchange(lane, case, group.rank, size) for lane in lanes)))
        return len(FEW)

    assert on_machines(size, act) == [len(FEW)] * size


@pytest.mark.parametrize("size", [2, 3])
def test_steps_go_by_their_size_with_the_same_sums(size: int) -> None:
    """Small steps over links, others by gloo; what comes out is the same, bit by bit."""
    case = Case("sums", (9, 4, 16), num_slots=8, top_k=6, hidden=70, dtype=torch.bfloat16)

    def sums(lane: AllToAll, rank: int) -> Tensor:
        x_TD, routing = case.inputs(rank, size)
        arrived = lane.dispatch(x_TD, routing).wait()
        batch = arrived.batch
        assert isinstance(batch, TokenBatch)
        here_NK = (batch.slot_TK >= batch.first_slot) & (batch.slot_TK < batch.first_slot + case.num_slots)
        # A token's rows, as an expert would give them.
        rows_NKD = (batch.x_TD[:, None].float() * (batch.slot_TK % 7 + 1)[:, :, None]).bfloat16()
        if batch.rows_PD is None:
            y = torch.zeros(batch.x_TD.shape)
            for k in range(case.top_k):
                y += (rows_NKD[:, k].float() * batch.weight_TK[:, k, None]).where(here_NK[:, k, None], 0)
            y = y.bfloat16()
        else:
            y = batch.rows_PD.copy_(rows_NKD[here_NK])
        return lane.combine(y, arrived.ticket, torch.empty_like(x_TD)).wait()

    def act(group: GlooGroup) -> bool:
        state = StepState()
        (lane,) = make_lanes("gloo", group, case.num_slots, case.hidden, case.dtype, few_tokens=16, state=state)
        assert isinstance(lane, PairedLane) and state.recorded_tokens == 16
        state.begin(16)
        linked = sums(lane, group.rank)
        state.begin(17)
        return torch.equal(linked, sums(lane, group.rank))

    assert on_machines(size, act) == [True] * size


def test_messages_longer_than_a_connection_holds() -> None:
    """Both ranks send before either receives."""
    case = Case("long", (512,), num_slots=2, top_k=2, hidden=6144)

    def act(group: GlooGroup) -> bool:
        drain(exchange(lanes_of(group, case, 1, 512)[0], case, group.rank, 2))
        return True

    assert on_machines(2, act) == [True, True]


@pytest.mark.parametrize("stage", ["dispatch", "combine"])
@pytest.mark.parametrize("how", ["leaves", "is silent"])
def test_a_rank_that_does_not_send(how: str, stage: str) -> None:
    case = FEW[0]

    def act(group: GlooGroup) -> object:
        (lane,) = lanes_of(group, case, 1)
        steps = exchange(lane, case, group.rank, 2)
        if group.rank == 1:
            if stage == "combine":
                next(steps)  # its tokens are on their way
            if how == "leaves":
                group.close()
            return "gone"
        began = time.monotonic()
        with pytest.raises(PeerLost):
            drain(steps)
        assert how == "leaves" or time.monotonic() - began >= TIMEOUT
        with pytest.raises(PeerLost):
            group.all_gather_ints([1])
        return "lost"

    assert on_machines(2, act, TIMEOUT) == ["lost", "gone"]


def test_without_native_kernels_somewhere_all_do_without() -> None:
    """What one rank cannot do no rank does."""
    limit_isa(Isa.NONE)
    try:
        assert on_machines(2, lambda group: group.links) == [None, None]
    finally:
        limit_isa(best_isa())


def test_a_wait_says_for_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others can be told which rank is late."""
    shown: list[int] = []
    monkeypatch.setattr(alive, "waits", lambda track, since, ranks: shown.append(ranks))
    case = FEW[0]

    def act(group: GlooGroup) -> object:
        (lane,) = lanes_of(group, case, 1)
        while group.rank > 0 and 0b110 not in shown:
            time.sleep(0.01)
        drain(exchange(lane, case, group.rank, 3))
        return "met"

    assert on_machines(3, act) == ["met"] * 3
