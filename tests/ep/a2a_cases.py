"""Cases for every all-to-all backend, with answers that any rank can work out alone.

Legend: T tokens of a rank, D hidden size, K experts per token, S slots of a rank, R rows arrived.
"""

from __future__ import annotations

import torch
from msgspec import Struct
from torch import Tensor

from dbo.steps import Steps, drain, weave
from ep.experts import Experts
from ep.moe import MoE
from ep.place import SlotTable
from ep.protocol import AllToAll, Routing
from ep.router import SoftmaxRouter
from ep.table import make_lanes
from ep.transport.group import Group
from eplb.placement import Placement, linear_placement
from moe_kernels import ExpertBatch, Layout, TokenBatch, dequantize_rows, quantize_rows

HIDDEN = 12


class Case(Struct, frozen=True):
    """tokens: of each rank (used cyclically); target: all choices fall on this rank, -1 for anywhere."""

    name: str
    tokens: tuple[int, ...]
    num_slots: int = 4
    top_k: int = 3
    target: int = -1
    dtype: torch.dtype = torch.float32
    hidden: int = HIDDEN
    rows: str = "plain"

    def tokens_of(self, rank: int) -> int:
        return self.tokens[rank % len(self.tokens)]

    def inputs(self, rank: int, size: int) -> tuple[Tensor, Routing]:
        """What `rank` brings."""
        num_tokens = self.tokens_of(rank)
        generator = torch.Generator().manual_seed(1000 * rank + num_tokens)
        x_TD = torch.randn(num_tokens, self.hidden, generator=generator).to(self.dtype)
        scores = torch.rand(num_tokens, size * self.num_slots, generator=generator)
        if self.target >= 0:
            first = (self.target % size) * self.num_slots
            scores[:, first : first + self.num_slots] += 1
        slot_TK = scores.topk(min(self.top_k, size * self.num_slots)).indices
        return x_TD, Routing(slot_TK, torch.rand(slot_TK.shape, generator=generator))

    def seen(self, x_TD: Tensor, size: int) -> Tensor:
        """What experts see of it."""
        return x_TD if size == 1 or self.rows == "plain" else dequantize_rows(*quantize_rows(x_TD), x_TD.dtype)


CASES = (
    Case("equal", (5,)),
    Case("one token", (1,)),
    Case("unequal", (7, 0, 3, 1)),
    Case("only the last rank has tokens", (0, 0, 0, 0, 0, 0, 0, 4)),
    Case("only rank 0 has tokens", (4, 0, 0, 0, 0, 0, 0, 0)),
    Case("nobody has tokens", (0,)),
    Case("all to rank 1", (6, 2), target=1),
    Case("all to rank 0", (6, 2), target=0),
    Case("one choice, one slot", (3, 2), num_slots=1, top_k=1),
    Case("odd width", (3, 5), hidden=7),
    Case("bfloat16", (5, 0, 9), dtype=torch.bfloat16),
    Case("bfloat16, odd width", (5, 2), dtype=torch.bfloat16, hidden=7),
    # More rows than a first message of the collective backend has room for, from some ranks and not from others.
    Case("large", (700, 3), num_slots=8, top_k=6, hidden=96),
    Case("rows in FP8", (5, 0, 9), hidden=300, rows="fp8"),
    Case("rows in FP8, odd width", (3, 5), hidden=7, rows="fp8", dtype=torch.bfloat16),
    Case("rows in FP8, large", (700, 3), num_slots=8, top_k=6, hidden=96, rows="fp8"),
)


def slot_answer(x: Tensor, slot: int) -> Tensor:
    """A stand-in for expert number `slot`: exact in float32, different for every slot."""
    return x * (slot + 1) + slot


def exchange(a2a: AllToAll, case: Case, rank: int, size: int) -> Steps[None]:
    """One dispatch and one combine of `rank`, everything checked on the way. Rows travel in the form that the case names,
    unless `size` is 1: then they do not travel."""
    x_TD, routing = case.inputs(rank, size)
    sent = a2a.dispatch(x_TD, routing)
    yield
    arrived = sent.wait()
    y = (
        tokens_done(arrived.batch, case, rank, size)
        if isinstance(arrived.batch, TokenBatch)
        else rows_done(arrived.batch, case, rank, size)
    )
    out_TD = torch.full_like(x_TD, float("nan"))
    back = a2a.combine(y, arrived.ticket, out_TD)
    yield
    assert back.wait() is out_TD
    torch.testing.assert_close(out_TD, answer(case, rank, size), **tolerance(case.dtype))


def rows_done(batch: ExpertBatch, case: Case, rank: int, size: int) -> Tensor:
    """Every row that should have arrived has, and nothing else; what its expert makes of it."""
    x = batch.x
    if batch.scale is not None:
        x = dequantize_rows(x, batch.scale, case.dtype)
    y = torch.full_like(x, float("nan"))
    start = 0
    for slot in range(case.num_slots):
        number = rank * case.num_slots + slot
        expected_RD = torch.cat([rows_for(case, peer, size, number) for peer in range(size)])
        count = int(batch.rows_S[slot])
        assert count == expected_RD.shape[0], (case.name, slot)
        if batch.layout is Layout.RAGGED:
            place: tuple[int | slice, ...] = (slice(start, start + count),)
        else:
            place = (slot, slice(0, count))
            assert x[slot, count:].isnan().all(), "padding must be poisoned"
        rows_RD = x[place]
        # Rows of a slot come in any order; random rows differ in their first number.
        assert torch.equal(rows_RD[rows_RD[:, 0].argsort()], expected_RD[expected_RD[:, 0].argsort()]), (
            case.name,
            slot,
        )
        y[place] = slot_answer(rows_RD, number)
        start += count
    if batch.layout is Layout.RAGGED:
        assert x.shape == (start, case.hidden)
    assert batch.rows_S.dtype == torch.int32 and batch.rows_S.shape == (case.num_slots,)
    return y


def tokens_done(batch: TokenBatch, case: Case, rank: int, size: int) -> Tensor:
    """Every token of which a slot is here has arrived, with its choices; the weighted sums of what the slots here make of
    them."""
    first, number = batch.first_slot, rank * case.num_slots
    assert first in (0, number) and batch.x_TD.dtype is case.dtype
    assert batch.slot_TK.shape == batch.weight_TK.shape and batch.slot_TK.shape[0] == batch.x_TD.shape[0]
    for slot in range(case.num_slots):
        expected_RD = torch.cat([rows_for(case, peer, size, number + slot) for peer in range(size)])
        rows_RD = batch.x_TD[(batch.slot_TK == first + slot).any(1)]
        assert rows_RD.shape == expected_RD.shape, (case.name, slot)
        assert torch.equal(rows_RD[rows_RD[:, 0].argsort()], expected_RD[expected_RD[:, 0].argsort()]), (
            case.name,
            slot,
        )
        assert int(batch.rows_of(case.num_slots)[slot]) == expected_RD.shape[0]
    here_TK = (batch.slot_TK >= first) & (batch.slot_TK < first + case.num_slots)
    # What stands where no token came, and the weights of slots that are elsewhere, may be anything.
    x_TD = batch.x_TD.double().masked_fill(~here_TK.any(1, keepdim=True), 0.0)
    x_TKD, slot_TK1 = x_TD.unsqueeze(1), batch.slot_TK.unsqueeze(2) + (number - first)
    weight_TK1 = batch.weight_TK.masked_fill(~here_TK, 0.0).unsqueeze(2)
    if batch.rows_PD is not None:
        assert batch.rows_PD.shape == (int(here_TK.sum()), case.hidden)
        return (x_TKD * (slot_TK1 + 1) + slot_TK1)[here_TK].to(case.dtype)
    return (weight_TK1 * (x_TKD * (slot_TK1 + 1) + slot_TK1)).sum(1).to(batch.sum_dtype)


def anything(batch: ExpertBatch | TokenBatch) -> Tensor:
    """Of the shape and dtype that combine wants."""
    if isinstance(batch, ExpertBatch):
        return batch.x
    if batch.rows_PD is not None:
        return torch.zeros_like(batch.rows_PD)
    return torch.zeros(batch.x_TD.shape, dtype=batch.sum_dtype)


def rows_for(case: Case, rank: int, size: int, slot: int) -> Tensor:
    """The tokens of `rank` that chose global slot `slot`, in order."""
    x_TD, routing = case.inputs(rank, size)
    return case.seen(x_TD, size)[(routing.slot_TK == slot).any(1)]


def answer(case: Case, rank: int, size: int) -> Tensor:
    x_TD, routing = case.inputs(rank, size)
    x_TKD = case.seen(x_TD, size).double().unsqueeze(1)
    slot_TK1 = routing.slot_TK.unsqueeze(2)
    return (routing.weight_TK.unsqueeze(2) * (x_TKD * (slot_TK1 + 1) + slot_TK1)).sum(1).to(case.dtype)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    # bfloat16: the row of each rank is rounded once, and the sum once more.
    return {"rtol": 1e-5, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 2**-6, "atol": 0.25}


MOE_EXPERTS = 12
MOE_WIDTH = 20


def moe_parts(shared: bool) -> tuple[SoftmaxRouter, Experts, torch.nn.Module | None]:
    """Router, all experts and shared expert of one small layer, the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    router = SoftmaxRouter(HIDDEN, MOE_EXPERTS, 4, True, torch.float32)
    experts = Experts(MOE_EXPERTS, HIDDEN, MOE_WIDTH, torch.float32)
    linear = torch.nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)
    for parameter in (*router.parameters(), *linear.parameters()):
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * HIDDEN**-0.5)
    shapes = ((MOE_WIDTH, HIDDEN), (MOE_WIDTH, HIDDEN), (HIDDEN, MOE_WIDTH))
    for slot in range(MOE_EXPERTS):
        experts.fill_slot(slot, *(torch.randn(shape, generator=generator) * HIDDEN**-0.5 for shape in shapes))
    return router, experts, linear if shared else None


def moe_placement(size: int, num_extra: int) -> Placement:
    return linear_placement(1, MOE_EXPERTS, size, -(-MOE_EXPERTS // size) + num_extra if num_extra else None)


def sharded_moe(lanes: list[AllToAll], placement: Placement, rank: int, shared: bool = True) -> MoE:
    router, every, shared_expert = moe_parts(shared)
    experts = Experts(placement.slots_per_rank, HIDDEN, MOE_WIDTH, torch.float32)
    for slot, expert in enumerate(placement.experts_of(0, rank)):
        weights = every.read_slot(max(expert, 0))
        experts.fill_slot(slot, *(weights if expert >= 0 else [w.clone().fill_(float("nan")) for w in weights]))
    return MoE(router, experts, lanes, SlotTable(placement, 0, rank), shared_expert)


def moe_input(rank: int, num_tokens: int) -> Tensor:
    return torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(rank))


def moe_answer(x_TD: Tensor, shared: bool = True) -> Tensor:
    """The layer as one sum over all experts, without any routing of rows."""
    router, experts, shared_expert = moe_parts(shared)
    expert_TK, weight_TK = router(x_TD)
    weight_TE = torch.zeros(x_TD.shape[0], MOE_EXPERTS).scatter_(1, expert_TK, weight_TK)
    out_TD = torch.zeros_like(x_TD) if shared_expert is None else shared_expert(x_TD)
    for expert in range(MOE_EXPERTS):
        gate_FD, up_FD, down_DF = experts.read_slot(expert)
        hidden_TF = torch.nn.functional.silu(x_TD @ gate_FD.T) * (x_TD @ up_FD.T)
        out_TD = out_TD + weight_TE[:, expert, None] * (hidden_TF @ down_DF.T)
    return out_TD


def check_moe(backend: str, group: Group, num_extra: int) -> None:
    """The layer over this backend, whole and woven, on the rank of `group`."""
    placement = moe_placement(group.size, num_extra)
    lanes = list(make_lanes(backend, group, placement.slots_per_rank, HIDDEN, torch.float32, num_lanes=2))
    moe = sharded_moe(lanes, placement, group.rank)
    for num_tokens in (6, 0, 1):
        x_TD = moe_input(group.rank, num_tokens if group.rank else 3)
        torch.testing.assert_close(drain(moe.steps(x_TD)), moe_answer(x_TD))
        half = x_TD.shape[0] // 2
        woven = drain(weave(moe.steps(x_TD[:half], 0), moe.steps(x_TD[half:], 1)))
        torch.testing.assert_close(torch.cat(woven), moe_answer(x_TD))
