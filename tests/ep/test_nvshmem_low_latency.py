"""Kernels that put rows into other ranks' memory: beyond what all backends must do (test_all_to_all.py)."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from a2a_cases import CASES, HIDDEN, Case, exchange, moe_answer, moe_input, moe_placement, sharded_moe
from amounts import examples
from claimed_gpu import claimed_gpu, host
from fake_cuda_graph import FakeGraphLibrary
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from puts_in_threads import putting
from rank_threads import on_ranks
from triton_support import _Recorder, compiling, report
from use_fakes import use_fakes

import ep.backends.nvshmem
import ep.backends.triton_put
from dbo.steps import drain, weave
from ep.backends.dispatchers import PairedLane, StepState
from ep.backends.nvshmem_ll import FUNCTIONS, NvshmemLowLatency, PutKernels
from ep.protocol import Arrived, PeerLost, Pending, Ready, Routing
from ep.requirements import PUT_TOP_K, Situation, best_on_devices, missing, not_captured, refusal
from ep.table import make_lanes
from ep.transport.device_group import DeviceGroup
from ep.transport.group import LocalGroup
from moe_kernels import ExpertBatch, Layout

NAME = "nvshmem_low_latency"
SERVED = Situation(8, "cuda", hidden_size=7168, top_k=8, max_tokens=256, installed=lambda _: True)
fakes = pytest.mark.fakes

# In the place of NVSHMEM's library for devices, which is 31 MB and comes with torch for CUDA.
STUB = """
target triple = "nvptx64-nvidia-cuda"
define i32 @nvshmemx_putmem_signal_block(i64 %to, i64 %from, i64 %bytes, i64 %word, i64 %value, i32 %act, i32 %rank) {
  call void asm sideeffect "// put", "l,l,l,l,l,r,r,~{memory}"(
      i64 %to, i64 %from, i64 %bytes, i64 %word, i64 %value, i32 %act, i32 %rank)
  ret i32 0
}
"""


# ---- who chooses it, and who refuses it ----


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"top_k": 17}, "at most 16 experts, not 17"),
        ({"max_tokens": 2048}, "at most 512 tokens to a step, not 2048; use it as the second of a pair"),
        ({"ranks": 16, "ranks_per_node": 8}, ""),
    ],
)
def test_what_it_refuses(change: dict[str, Any], reason: str) -> None:
    found = refusal(NAME, replace(SERVED, **change))
    assert reason in found and bool(reason) == bool(found)


def test_where_it_pays() -> None:
    """Steps with few tokens, where there is no DeepEP; the host's puts, or NCCL, carry the others."""
    without = replace(SERVED, max_tokens=8192, installed=lambda module: module != "deep_ep")
    assert best_on_devices(without) == f"nvshmem+{NAME}"
    assert best_on_devices(replace(without, ranks=16, ranks_per_node=8)) == f"nccl+{NAME}"
    lacking = replace(without, installed=lambda module: module == "nvshmem")
    assert best_on_devices(lacking) == "nvshmem"
    assert "torch_nvshmem is not installed (torch's Triton functions of NVSHMEM: pip install" in missing(NAME, lacking)
    assert not not_captured(NAME) and "the host waits" in not_captured("nvshmem")


@fakes
def test_what_torch_lacks_is_named() -> None:
    group = DeviceGroup(LocalGroup(), torch.device("cpu"), 1.0)
    with pytest.raises(ValueError, match=r"nvshmem.core cannot be imported .*pip install 'moesaic\[nvshmem\]'"):
        PutKernels(group)
    try:
        with (
            use_fakes(),
            pytest.raises(ValueError, match=r"no functions for this machine; .*pip install 'torch>=2.11'"),
        ):
            PutKernels(group)
    finally:
        group.close()


def test_both_homes_of_cuda_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """nvshmem4py 0.1.3 wants a release in which it is an experiment."""
    early, late = ModuleType("cuda.core"), ModuleType("cuda.core.experimental")
    vars(late)["Device"] = vars(late)["Buffer"] = object
    for module in (ModuleType("cuda"), early, late):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert ep.backends.nvshmem._cuda() is late
    vars(early)["Device"] = object
    assert ep.backends.nvshmem._cuda() is early


# ---- exchanges ----


def lanes_of(group: DeviceGroup, case: Case, num_lanes: int = 1, state: StepState | None = None) -> list[Any]:
    sizes = case.num_slots, case.hidden, case.dtype
    return list(make_lanes(NAME, group, *sizes, num_lanes, rows=case.rows, max_tokens=9, state=state))


@fakes
@pytest.mark.triton
@pytest.mark.slow
@settings(max_examples=examples(6), deadline=None)
@given(
    tokens=st.lists(st.integers(0, 9), min_size=3, max_size=3),
    num_slots=st.integers(1, 5),
    top_k=st.integers(1, 15),
    rows=st.sampled_from(["plain", "fp8"]),
)
def test_any_step(tokens: list[int], num_slots: int, top_k: int, rows: str, tmp_path_factory: Any) -> None:
    case = Case("any", tuple(tokens), num_slots, top_k, hidden=140, rows=rows)

    def act(group: DeviceGroup) -> None:
        lane = lanes_of(group, case)[0]
        for _ in range(3):
            drain(exchange(lane, case, group.rank, group.size))

    with putting():
        on_ranks(tmp_path_factory.mktemp("any"), 3, act)


@fakes
@pytest.mark.triton
def test_moe_layers_over_it(tmp_path: Path) -> None:
    def act(group: DeviceGroup) -> None:
        placement = moe_placement(group.size, 0)
        lanes = list(
            make_lanes(NAME, group, placement.slots_per_rank, HIDDEN, torch.float32, num_lanes=2, max_tokens=6)
        )
        moe = sharded_moe(lanes, placement, group.rank)
        x_TD = moe_input(group.rank, 6 if group.rank else 3)
        torch.testing.assert_close(drain(moe.steps(x_TD)), moe_answer(x_TD))
        half = x_TD.shape[0] // 2
        woven = drain(weave(moe.steps(x_TD[:half], 0), moe.steps(x_TD[half:], 1)))
        torch.testing.assert_close(torch.cat(woven), moe_answer(x_TD))

    with putting():
        on_ranks(tmp_path, 2, act)


@fakes
@pytest.mark.triton
def test_choices_of_nothing_and_rows_apart(tmp_path: Path) -> None:
    """A choice of slot -1 goes nowhere; outputs may be rows of something wider."""
    case = CASES[0]

    def act(group: DeviceGroup) -> None:
        lane = lanes_of(group, case)[0]
        x_TD, routing = case.inputs(group.rank, group.size)
        slot_TK = routing.slot_TK.masked_fill(torch.arange(3) == 1, -1)
        arrived = lane.dispatch(x_TD, Routing(slot_TK, routing.weight_TK)).wait()
        assert arrived.batch.rows_S.sum() == sum(
            ((slots // case.num_slots) == group.rank).sum() for slots in all_slots()
        )
        out = torch.full((x_TD.shape[0], 2, case.hidden), float("nan"))
        lane.combine(arrived.batch.x, arrived.ticket, out[:, 0]).wait()
        weight_T = routing.weight_TK[:, [0, 2]].sum(1, keepdim=True)
        torch.testing.assert_close(out[:, 0], weight_T * x_TD)
        assert out[:, 1].isnan().all()

    def all_slots() -> list[torch.Tensor]:
        return [case.inputs(rank, 2)[1].slot_TK[:, [0, 2]] for rank in range(2)]

    with putting():
        on_ranks(tmp_path, 2, act)


@fakes
@pytest.mark.triton
def test_puts_of_the_host_and_of_kernels_take_turns(tmp_path: Path) -> None:
    few, many = Case("few", (3, 5), hidden=140), Case("many", (20, 3), hidden=140)

    def act(group: DeviceGroup) -> list[Layout]:
        state = StepState()
        name = f"nvshmem+{NAME}"
        lanes = make_lanes(name, group, 4, 140, torch.float32, num_lanes=2, max_tokens=64, few_tokens=5, state=state)
        assert isinstance(lanes[0], PairedLane)
        taken = []
        for case in (few, many, few):
            state.begin(max(case.tokens_of(rank) for rank in range(group.size)))
            taken.append(lanes[0].layout)
            drain(weave(*(exchange(lane, case, group.rank, group.size) for lane in lanes)))
            state.confirm()
        return taken

    with putting():
        assert on_ranks(tmp_path, 2, act) == [[Layout.PADDED, Layout.RAGGED, Layout.PADDED]] * 2


@fakes
@pytest.mark.triton
def test_who_does_not_come_is_lost(tmp_path: Path) -> None:
    """The kernels give up after a while, leave it out and say nothing; `confirm` does."""
    case = CASES[0]

    def act(group: DeviceGroup) -> str:
        state = StepState()
        lane = lanes_of(group, case, state=state)[0]
        state.begin(5)
        drain(exchange(lane, case, group.rank, group.size))
        state.confirm()
        group.all_gather_ints([0]).wait()
        if group.rank == 1:
            return "gone"
        group.once("puts", lambda: None).looks = 50
        x_TD, routing = case.inputs(0, 2)
        for _ in range(2):
            arrived = lane.dispatch(x_TD, routing).wait()
            assert arrived.batch.rows_S.sum() == (routing.slot_TK < case.num_slots).sum()
            assert torch.isfinite(lane.combine(torch.zeros_like(arrived.batch.x), arrived.ticket, x_TD).wait()).all()
        with pytest.raises(PeerLost, match="their rows did not come") as lost:
            state.confirm()
        assert lost.value.ranks == (1,)
        return "noticed"

    with putting():
        assert on_ranks(tmp_path, 2, act) == ["noticed", "gone"]


@fakes
@pytest.mark.triton
def test_who_leaves_waits_no_longer(tmp_path: Path) -> None:
    """The host knows of a loss long before the kernels have looked often enough."""
    case = CASES[0]

    def act(group: DeviceGroup) -> str:
        state = StepState()
        lane = lanes_of(group, case, state=state)[0]
        if group.rank == 1:
            group.control.close()  # as when its process ends
            return "gone"
        sent = lane.dispatch(*case.inputs(0, 2))
        leaving = threading.Timer(0.1, group.close)
        leaving.start()
        sent.wait()
        leaving.join()
        with pytest.raises(PeerLost, match="the group was left"):
            state.confirm()
        return "left"

    with putting():
        assert on_ranks(tmp_path, 2, act) == ["left", "gone"]


@fakes
@pytest.mark.triton
@pytest.mark.parametrize("rows", ["plain", "fp8"])
def test_a_graph_holds_its_exchanges(rows: str, tmp_path: Path) -> None:
    """Captured once by all ranks, replayed with other tokens and other routings."""
    cases = [Case("captured", (4,), hidden=140, rows=rows), Case("replayed", (4, 4), target=1, hidden=140, rows=rows)]

    def act(group: DeviceGroup) -> None:
        lane = lanes_of(group, cases[0])[0]
        x_TD, routing = cases[0].inputs(group.rank, group.size)
        out_TD = torch.empty_like(x_TD)
        graph = FakeGraphLibrary().new()
        graph.begin()
        arrived = lane.dispatch(x_TD, routing).wait()
        captured = _Captured(arrived, lane.combine(given_back(arrived.batch), arrived.ticket, out_TD))
        captured.back.wait()
        graph.end()
        for case in (cases[1], cases[0], cases[1]):
            new_TD, new = case.inputs(group.rank, group.size)
            x_TD.copy_(new_TD)
            routing.slot_TK.copy_(new.slot_TK)
            routing.weight_TK.copy_(new.weight_TK)
            graph.replay()
            expected_TD = case.seen(x_TD, group.size) * new.weight_TK.sum(1, keepdim=True)
            torch.testing.assert_close(out_TD, expected_TD)

    with putting():
        on_ranks(tmp_path, 2, act)


@dataclass(frozen=True)
class _Captured:
    arrived: Arrived
    back: Pending[torch.Tensor]


def given_back(batch: Any) -> torch.Tensor:
    """What the rows are, without a look at how many there are."""
    assert isinstance(batch, ExpertBatch)
    if batch.scale is None:
        return batch.x.clone()
    scale = batch.scale.repeat_interleave(128, -1, output_size=128 * batch.scale.shape[-1])
    return batch.x.float() * scale[..., : batch.x.shape[-1]]


# ---- compiled for GPUs that are not here ----


@dataclass
class OneOfSixteen:
    """A group in which nobody else is."""

    rank: int = 3
    size: int = 16

    def all_gather_ints(self, values: Sequence[int]) -> Ready[list[list[int]]]:
        return Ready([list(values)] * self.size)

    def close(self) -> None: ...


@pytest.mark.triton
@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("hidden", [2048, 7168])
def test_kernels_compile(capability: int, hidden: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's own functions, and a stub of one line in the place of NVSHMEM's library."""
    (tmp_path / "libnvshmem_device.bc").write_text(STUB)
    monkeypatch.setenv("NVSHMEM_LIB_DIR", str(tmp_path))
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)  # else torch's file defines nothing
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", None)
    monkeypatch.delitem(sys.modules, FUNCTIONS, raising=False)
    importlib.import_module(FUNCTIONS)
    device = torch.device("meta")
    group = DeviceGroup(OneOfSixteen(), device, 60.0)
    group.once(
        "nvshmem",
        lambda: SimpleNamespace(
            bytetensor=lambda shape, dtype: torch.empty(shape, dtype=dtype, device=device),
            SignalOp=SimpleNamespace(SIGNAL_ADD=10),
        ),
    )
    shared = PutKernels(group)
    triton.knobs.runtime.jit_post_compile_hook = None  # torch's starts NVSHMEM in a module that has been loaded
    with compiling(capability, ep.backends.triton_put) as found:
        shared.send, shared.give_back = (
            _Recorder(kernel, found, capability) for kernel in (shared.send, shared.give_back)
        )
        for fp8 in (True, False):
            lane = NvshmemLowLatency(shared, 16, hidden, torch.bfloat16, 256, fp8)
            exchange_of(lane, 64, hidden)
    report(found)
    assert len(found) == 6, "one form of each, whatever the numbers"
    assert all(item.spills == 0 and item.registers <= 128 for item in found)
    assert {item.kernel for item in found} == {
        "send_rows_kernel", "take_rows_kernel", "return_rows_kernel", "sum_rows_kernel"
    }  # fmt: skip
    monkeypatch.delitem(sys.modules, FUNCTIONS)


def exchange_of(lane: NvshmemLowLatency, num_tokens: int, hidden: int) -> None:
    x_TD = torch.empty(num_tokens, hidden, dtype=torch.bfloat16, device="meta")
    slot_TK = torch.empty(num_tokens, 8, dtype=torch.int64, device="meta")
    arrived = lane.dispatch(x_TD, Routing(slot_TK, slot_TK.float())).wait()
    assert isinstance(arrived.batch, ExpertBatch) and arrived.batch.x.shape == (16, 16 * 256, hidden)
    y = torch.empty(arrived.batch.x.shape, dtype=torch.bfloat16, device="meta")
    lane.combine(y, arrived.ticket, x_TD).wait()


def test_the_room_in_a_message() -> None:
    assert ep.backends.triton_put.CHOICES == PUT_TOP_K and ep.backends.triton_put.ROW_AT % 16 == 0


def test_who_leaves_ends_kernels_that_wait_without_another_kernel() -> None:
    """Programs that spin may have taken all places where a kernel could run: a copy engine writes, from pinned memory."""
    with claimed_gpu(numbers=False) as seen:
        shared = object.__new__(PutKernels)
        shared.lost_G = torch.zeros(2, dtype=torch.int32, device="cuda")
        shared._all_lost_G = torch.empty(2, dtype=torch.int32, pin_memory=True).fill_(1)
        seen.clear()
        shared._give_up()
        assert (seen.uploads["copy_"], seen.pinned, seen.waits.total()) == (1, 1, 0)
        assert host(shared.lost_G).tolist() == [1, 1]
