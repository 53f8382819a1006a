"""The layer over N ranks equals the layer on one, and one layer as a plain sum over all experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from a2a_cases import HIDDEN, MOE_EXPERTS, moe_answer, moe_input, moe_placement, sharded_moe

from dbo.steps import Steps, drain, weave
from ep.backends.local import LocalAllToAll
from ep.backends.mailbox import Mailbox
from ep.moe import MoE
from ep.protocol import Pending, Routing
from ep.table import make_lanes
from ep.transport.group import LocalGroup, MailboxWorld
from eplb.load import ExpertLoad
from moe_kernels import Layout

TOKENS = (9, 0, 1, 4, 2, 7, 0, 3)


def mailbox_moes(size: int, num_extra: int, layout: Layout) -> tuple[MailboxWorld, list[MoE]]:
    world, placement = MailboxWorld(size), moe_placement(size, num_extra)
    return world, [
        sharded_moe(
            [Mailbox(world, rank, placement.slots_per_rank, lane, layout) for lane in range(2)],
            placement,
            rank,
        )
        for rank in range(size)
    ]


@torch.inference_mode()
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("num_tokens", [0, 1, 40])
def test_local_equals_the_plain_sum(num_tokens: int, shared: bool) -> None:
    lanes = list(make_lanes("local", LocalGroup(), MOE_EXPERTS, HIDDEN, torch.float32))
    x_TD = moe_input(0, num_tokens)
    kept_TD = x_TD.clone()
    out_TD = drain(sharded_moe(lanes, moe_placement(1, 0), 0, shared).steps(x_TD))
    torch.testing.assert_close(out_TD, moe_answer(x_TD, shared))
    assert torch.equal(x_TD, kept_TD)


@torch.inference_mode()
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("num_extra", [0, 2], ids=["no replicas", "replicas"])
@pytest.mark.parametrize("layout", list(Layout), ids=lambda layout: layout.value)
def test_mailbox_equals_unsharded(size: int, num_extra: int, layout: Layout) -> None:
    world, moes = mailbox_moes(size, num_extra, layout)
    inputs = [moe_input(rank, TOKENS[rank]) for rank in range(size)]
    for _ in range(3):  # replicas are chosen anew in every call
        outputs = drain(weave(*(moe.steps(x_TD) for moe, x_TD in zip(moes, inputs, strict=True))))
        for x_TD, out_TD in zip(inputs, outputs, strict=True):
            torch.testing.assert_close(out_TD, moe_answer(x_TD))
    assert world.num_waiting == 0


@torch.inference_mode()
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("num_extra", [0, 2], ids=["no replicas", "replicas"])
@pytest.mark.parametrize("layout", list(Layout), ids=lambda layout: layout.value)
def test_mailbox_of_two_lanes_equals_unsharded(size: int, num_extra: int, layout: Layout) -> None:
    def two_layers(moe: MoE, x_TD: torch.Tensor, lane: int) -> Steps[torch.Tensor]:
        x_TD = yield from moe.steps(x_TD, lane)
        return (yield from moe.steps(x_TD, lane))

    def halves(moe: MoE, x_TD: torch.Tensor) -> Steps[torch.Tensor]:
        cut = x_TD.shape[0] // 2
        return torch.cat((yield from weave(two_layers(moe, x_TD[:cut], 0), two_layers(moe, x_TD[cut:], 1))))

    world, moes = mailbox_moes(size, num_extra, layout)
    inputs = [moe_input(rank, TOKENS[rank]) for rank in range(size)]
    outputs = drain(weave(*(halves(moe, x_TD) for moe, x_TD in zip(moes, inputs, strict=True))))
    for x_TD, out_TD in zip(inputs, outputs, strict=True):
        torch.testing.assert_close(out_TD, moe_answer(moe_answer(x_TD)), rtol=1e-4, atol=1e-4)
    assert world.num_waiting == 0


class Told:
    """An exchange that says when it is waited for."""

    def __init__(self, log: list[str], kind: str, pending: Pending[Any]) -> None:
        self.log, self.kind, self.pending = log, kind, pending

    def wait(self) -> Any:
        self.log.append(f"wait for {self.kind}")
        return self.pending.wait()


class Telling(LocalAllToAll):
    """What is done in which order."""

    def __init__(self, num_slots: int, log: list[str]) -> None:
        super().__init__(num_slots)
        self.log = log

    def dispatch(self, x_TD: torch.Tensor, routing: Routing) -> Any:
        self.log.append("dispatch")
        return Told(self.log, "dispatch", super().dispatch(x_TD, routing))

    def combine(self, y: torch.Tensor, ticket: object, out_TD: torch.Tensor) -> Any:
        self.log.append("combine")
        return Told(self.log, "combine", super().combine(y, ticket, out_TD))


@torch.inference_mode()
@pytest.mark.parametrize("num_lanes", [1, 2])
def test_the_shared_expert_and_the_other_lane_fill_the_flight(num_lanes: int) -> None:
    """Split or not, nothing is waited for before there is nothing else to do."""
    log: list[str] = []
    placement = moe_placement(1, 0)
    moe = sharded_moe([Telling(placement.slots_per_rank, log) for _ in range(num_lanes)], placement, 0)
    moe.shared.register_forward_hook(lambda *_: log.append("shared"))
    drain(weave(*(moe.steps(moe_input(0, 3), lane) for lane in range(num_lanes))))
    one = [["dispatch", "shared"], ["wait for dispatch", "combine"], ["wait for combine"]]
    assert log == [what for turn in one for _ in range(num_lanes) for what in turn]


@torch.inference_mode()
def test_load_counts_logical_experts_whatever_the_placement() -> None:
    x_TD = moe_input(0, 30)
    windows = []
    for num_extra in (0, 3):
        placement = moe_placement(1, num_extra)
        load = ExpertLoad(num_layers=1, num_experts=MOE_EXPERTS)
        moe = sharded_moe([LocalAllToAll(placement.slots_per_rank)], placement, 0)
        moe.load = load.recorder(0)
        torch.testing.assert_close(drain(moe.steps(x_TD)), moe_answer(x_TD))
        windows.append(load.window())
    assert windows[0].sum() == 30 * 4
    assert (windows[0] == windows[1]).all()


@torch.inference_mode()
def test_a_rank_that_fails_takes_the_others_of_its_process_down_with_it() -> None:
    _, moes = mailbox_moes(2, 0, Layout.RAGGED)
    steps = [moe.steps(moe_input(rank, 3)) for rank, moe in enumerate(moes)]

    def failing() -> Steps[torch.Tensor]:
        yield
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        drain(weave(*steps, failing()))
    assert all(rank_steps.gi_frame is None for rank_steps in steps)
