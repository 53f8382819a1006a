"""The backends for GPUs beyond moving rows: what they refuse, what is missing, who is lost, and MoE layers over them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from a2a_cases import CASES, HIDDEN, Case, anything, check_moe, exchange
from msgspec.structs import replace
from rank_threads import on_ranks
from shm_threads import team, together
from use_fakes import use_fakes

from dbo.steps import drain, weave
from ep.backends.deepep import DeepEpBuffer
from ep.backends.deepep_ll import LowLatency
from ep.backends.dispatchers import PairedLane, StepState
from ep.backends.local import LocalAllToAll
from ep.device import await_true
from ep.protocol import PeerLost, Routing
from ep.requirements import DEVICE_NAMES, Situation, best_on_devices, missing, not_captured, refusal, split_pair
from ep.table import explain, make_groups, make_lanes, make_parcels
from ep.transport.comm import Comm
from ep.transport.device_group import DeviceGroup
from ep.transport.group import LocalGroup, MailboxGroup, MailboxWorld
from moe_kernels import Layout, TokenBatch

SERVED = Situation(8, "cuda", hidden_size=7168, top_k=8, max_tokens=256, installed=lambda _: True)
BF16 = Case("bfloat16", (5, 0, 9), dtype=torch.bfloat16, hidden=2048)
fakes = pytest.mark.fakes


@pytest.mark.parametrize("name", DEVICE_NAMES)
def test_what_all_of_them_can_serve(name: str) -> None:
    assert refusal(name, SERVED) == "" and missing(name, SERVED) == ""
    assert "no CUDA device" in refusal(name, replace(SERVED, device="cpu"))
    assert "no other to exchange with" in refusal(name, replace(SERVED, ranks=1))


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("deepep_high_throughput", {"ranks": 6}, "on one node it serves 2, 4, 8 ranks; there are 6"),
        ("deepep_high_throughput", {"ranks": 40, "ranks_per_node": 8}, "there are 40 with 8 per node"),
        ("deepep_high_throughput", {"dtype": "float32"}, "computes in float32"),
        ("deepep_low_latency", {"hidden_size": 7000}, "must be one of 2048, 2560"),
        ("deepep_low_latency", {"max_tokens": 2048}, "at most 511 tokens to a step, not 2048; use it as the second"),
        ("deepep_low_latency", {"top_k": 12}, "at most 11 experts, not 12"),
        (
            "deepep_high_throughput+deepep_low_latency",
            {"num_ubatches": 3},
            "holds 2 results at a time, and each of 3 parts",
        ),
        ("deepep_low_latency", {"rows": "fp8", "hidden_size": 1000}, "multiple of 512, not 1000"),
        ("deepep_low_latency", {"ranks": 12}, "fewer than 8 ranks or a multiple of them; there are 12"),
        ("deepep_low_latency", {"no_rdma": "there is no port"}, "also on one node (IBGDA): there is no port"),
        ("deepep_low_latency", {"no_ibgda": "no gdrdrv"}, "also on one node (IBGDA): no gdrdrv"),
        (
            "deepep_v2",
            {"ranks": 16, "ranks_per_node": 8, "no_rdma": "there is no port"},
            "through InfiniBand: there is no",
        ),
        ("flashinfer_nvlink_one_sided", {"top_k": 5}, "one of 1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 22 experts, not 5"),
        ("deepep_v2", {"hidden_size": 2176}, "multiple of 256"),
        ("deepep_v2", {"top_k": 33}, "at most 32 experts"),
        ("flashinfer_nvlink_one_sided", {"ranks": 72}, "at most 64 ranks; there are 72"),
        ("nvshmem", {"ranks": 16, "ranks_per_node": 8}, "16 ranks with 8 per node do not"),
        ("shm", {"device": "cuda"}, "memory is the host's"),
        ("gloo", {"device": "cpu", "ranks_per_node": 4}, "on one machine"),
        ("shm+deepep_low_latency", {}, "join their ranks in different ways"),
        ("deepep_high_throughput+deepep_low_latency", {"hidden_size": 7000, "max_tokens": 8192}, "must be one of 2048"),
    ],
)
def test_what_they_refuse(name: str, change: dict[str, object], reason: str) -> None:
    assert reason in refusal(name, replace(SERVED, **change))  # type: ignore[arg-type]


def test_the_best_between_gpus() -> None:
    pair = "deepep_high_throughput+deepep_low_latency"
    assert best_on_devices(replace(SERVED, max_tokens=8192)) == pair and split_pair(pair) == tuple(pair.split("+"))
    assert best_on_devices(replace(SERVED, hidden_size=2304)) == "deepep_v2"
    assert best_on_devices(replace(SERVED, no_rdma="no port", no_ibgda="no port")) == "deepep_v2"
    assert best_on_devices(replace(SERVED, ranks=16, ranks_per_node=8, no_rdma="no port", no_ibgda="no port")) == (
        "deepep_high_throughput"
    )
    assert refusal("deepep_low_latency", replace(SERVED, ranks=5)) == ""
    assert best_on_devices(replace(SERVED, installed=lambda module: module == "nvshmem")) == "nvshmem"
    assert best_on_devices(replace(SERVED, installed=lambda _: False)) == "nccl"
    missed = missing(pair, replace(SERVED, installed=lambda _: False))
    assert missed == "deep_ep is not installed (pip install 'moesaic[deepep]')"
    assert "CUDA graph cannot hold it" in not_captured("deepep_high_throughput") and not not_captured("pplx")
    assert explain(8, SERVED)["nccl"] == "ok" and "one rank" in explain(8, SERVED)["local"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("deepep_high_throughput", r"deep_ep cannot be imported .*pip install 'moesaic\[deepep\]'"),
        ("deepep_v2", r"deep_ep cannot be imported .*sgl-deep-ep"),
        ("flashinfer_nvlink_one_sided", r"flashinfer.comm cannot be imported .*pip install 'moesaic\[flashinfer\]'"),
        ("pplx", r"pplx_kernels cannot be imported .*pip install git"),
        ("nvshmem", r"nvshmem.core cannot be imported .*pip install 'moesaic\[nvshmem\]'"),
    ],
)
def test_what_is_missing_is_named(name: str, says: str) -> None:
    world = MailboxWorld(2)
    group = DeviceGroup(MailboxGroup(world, 0), torch.device("cpu"), 1.0)
    with pytest.raises(ValueError, match=says):
        make_lanes(name, group, 4, 2048, torch.bfloat16, max_tokens=64)


def test_lanes_refuse_what_the_backend_cannot() -> None:
    group = DeviceGroup(MailboxGroup(MailboxWorld(2), 0), torch.device("cpu"), 1.0)
    with pytest.raises(ValueError, match="'deepep_low_latency': the hidden size must be one of"):
        make_lanes("deepep_low_latency", group, 4, 64, torch.bfloat16)
    with pytest.raises(ValueError, match="'nccl' gives experts ragged rows only"):
        make_lanes("nccl", group, 4, 64, torch.bfloat16, layout=Layout.PADDED)
    with pytest.raises(ValueError, match="a pair needs to be told the size of every step"):
        make_lanes("shm+shm_padded", group, 4, 64, torch.bfloat16)
    with pytest.raises(ValueError, match="'shm' cannot use a DeviceGroup"):
        make_lanes("shm", group, 4, 64, torch.bfloat16)
    assert [lane.layout for lane in make_lanes("deepep_v2", LocalGroup(), 4, 64, torch.bfloat16)] == [Layout.RAGGED]


def test_the_ranks_as_a_communicator(tmp_path: Path) -> None:
    """Objects of any size; as Split, bcast and barrier as the libraries ask for them."""

    def act(rank: int) -> list[object]:
        comm = Comm(groups[rank])
        assert (comm.Get_rank(), comm.Get_size()) == (rank, 3)
        comm.barrier()
        assert comm.Split(0, rank).bcast({"root": rank}, 1) == {"root": 1}
        value = (None, 1.5, -(1 << 40), "text", [bytearray(b"handle"), (True, b"")])
        assert repr(comm.allgather(value)) == repr([value] * 3)
        with pytest.raises(TypeError):
            comm.allgather(object())
        return comm.allgather([bytes([rank]) * 3000 * rank, rank])

    groups = team(tmp_path, 3)
    expected = [[bytes([rank]) * 3000 * rank, rank] for rank in range(3)]
    assert together(3, act) == [expected] * 3


@fakes
@pytest.mark.parametrize("name", ["nccl", "nvshmem"])
@pytest.mark.parametrize("num_extra", [0, 2])
def test_moe_layers_over_them(name: str, num_extra: int, tmp_path: Path) -> None:
    def act(group: DeviceGroup) -> None:
        check_moe(name, group, num_extra)

    with use_fakes():
        on_ranks(tmp_path, 2, act)


@fakes
def test_high_throughput_and_low_latency_take_turns(tmp_path: Path) -> None:
    """They share one buffer, which is cleaned between; every rank takes the same one in the same step."""
    name = "deepep_high_throughput+deepep_low_latency"
    large = Case("large step", (70, 3), dtype=torch.bfloat16, hidden=2048)

    def act(group: DeviceGroup) -> list[Layout]:
        state = StepState()
        lanes = make_lanes(
            name, group, 4, 2048, torch.bfloat16, num_lanes=2, max_tokens=1024, few_tokens=16, state=state
        )
        taken = []
        for case in (BF16, large, BF16, BF16, large):
            state.begin(max(case.tokens_of(rank) for rank in range(group.size)))
            taken.append(lanes[0].layout)
            drain(weave(*(exchange(lane, case, group.rank, group.size) for lane in lanes)))
            state.confirm()
        return taken

    few, many = Layout.PADDED, Layout.RAGGED
    with use_fakes():
        assert on_ranks(tmp_path, 2, act) == [[few, many, few, few, many]] * 2


@fakes
def test_a_step_that_forgot_to_clean_is_caught(tmp_path: Path) -> None:
    """Unlike the real kernels, which would compute something."""

    def act(group: DeviceGroup) -> None:
        lanes = make_lanes(
            "deepep_high_throughput+deepep_low_latency",
            group,
            4,
            2048,
            torch.bfloat16,
            max_tokens=1024,
            few_tokens=16,
            state=(state := StepState()),
        )
        state.begin(100)
        drain(exchange(lanes[0], BF16, group.rank, group.size))
        state._largest = 5  # not by `begin`
        drain(exchange(lanes[0], BF16, group.rank, group.size))

    with use_fakes(), pytest.raises(AssertionError, match="cleaned before"):
        on_ranks(tmp_path, 2, act)


@fakes
@pytest.mark.parametrize(("high_throughput", "few"), [(True, 16), (True, 0), (False, 16)])
def test_queue_pairs_between_nodes(high_throughput: bool, few: int, tmp_path: Path) -> None:
    """With few experts on each of 16 ranks a queue pair per expert is too few for the normal kernels, which trap."""

    def act(group: DeviceGroup) -> int:
        return int(DeepEpBuffer(group, 2048, 4, high_throughput, few).buffer._qps)

    with use_fakes():
        assert set(on_ranks(tmp_path, 16, act)) == {20 if high_throughput else 4}


@fakes
def test_a_masked_rank_is_lost(tmp_path: Path) -> None:
    """The low-latency kernels leave it out and say nothing; `confirm` does."""

    def act(group: DeviceGroup) -> str:
        state = StepState()
        lane = make_lanes("deepep_low_latency", group, 4, 2048, torch.bfloat16, max_tokens=64, state=state)[0]
        assert isinstance(lane, LowLatency)
        state.begin(9)
        drain(exchange(lane, BF16, group.rank, group.size))
        state.confirm()
        group.all_gather_ints([0]).wait()
        if group.rank == 1:
            lane._shared.buffer.world.kill(1)
            return "gone"
        x_TD, routing = BF16.inputs(0, 2)
        arrived = lane.dispatch(x_TD, routing).wait()
        assert torch.isfinite(lane.combine(torch.zeros_like(arrived.batch.x), arrived.ticket, x_TD).wait()).all()
        with pytest.raises(PeerLost, match="has masked them") as lost:
            state.confirm()
        assert lost.value.ranks == (1,)
        return "noticed"

    with use_fakes():
        assert on_ranks(tmp_path, 2, act) == ["noticed", "gone"]


@fakes
def test_the_elastic_buffer_without_the_host(tmp_path: Path) -> None:
    """In small steps there are rows for the worst case, most of them unwritten: what a CUDA graph could hold."""

    def act(group: DeviceGroup) -> list[int]:
        state = StepState()
        lanes = make_lanes("deepep_v2", group, 4, 2048, torch.bfloat16, max_tokens=100, few_tokens=9, state=state)
        rows = []
        for case in (BF16, Case("large step", (70, 3), dtype=torch.bfloat16, hidden=2048)):
            state.begin(max(case.tokens_of(rank) for rank in range(group.size)))
            drain(exchange(lanes[0], case, group.rank, group.size))
            x_TD, routing = case.inputs(group.rank, group.size)
            arrived = lanes[0].dispatch(x_TD, routing).wait()
            assert isinstance(arrived.batch, TokenBatch)
            rows.append(arrived.batch.x_TD.shape[0])
            lanes[0].combine(torch.zeros_like(arrived.batch.x_TD), arrived.ticket, x_TD).wait()
            state.confirm()
        return rows

    with use_fakes():
        found = on_ranks(tmp_path, 2, act)
    assert all(isinstance(rows, list) and rows[0] == 2 * 16 and 60 < rows[1] <= 73 for rows in found), found


def test_groups_of_ranks_with_devices(tmp_path: Path) -> None:
    """Where they agree, and where tokens travel; a pair joins them once."""
    pairs = together(2, lambda rank: make_groups("nccl+deepep_v2", tmp_path, rank, 2, 20.0))
    assert not any(isinstance(pair, PeerLost) for pair in pairs)

    def act(rank: int) -> list[list[int]]:
        pair = pairs[rank]
        assert not isinstance(pair, PeerLost) and isinstance(pair[1], DeviceGroup)
        assert pair[1].device.type == "cuda" and (pair[1].rank, pair[1].size) == (rank, 2)
        gathered = pair[0].all_gather_ints([rank]).wait() + pair[1].all_gather_ints([10 + rank]).wait()
        parcels = make_parcels(pair[1], 64)
        sizes_GG = np.array([[0, 3], [3, 0]])
        arrived = parcels.send(sizes_GG, {1 - rank: [torch.full((3,), rank, dtype=torch.uint8)]}).wait()
        assert arrived[1 - rank].tolist() == [1 - rank] * 3
        parcels.release()
        for group in pair:
            group.close()
        return gathered

    assert together(2, act) == [[[0], [1], [10], [11]]] * 2


@pytest.mark.parametrize("together_they_leave", [True, False])
def test_what_is_held_together_is_given_back_together(together_they_leave: bool, tmp_path: Path) -> None:
    """Libraries free their buffers with a barrier, which nobody enters who may be alone in it."""
    freed: list[int] = []

    def act(rank: int) -> None:
        group = DeviceGroup(groups[rank], torch.device("cpu"), 20.0)
        group.at_end(lambda: freed.append(rank))
        assert group.once("thing", object) is group.once("thing", object)
        group.check()
        group.comm.barrier()
        if not together_they_leave and rank == 1:
            group.control.close()  # as when its process ends
            return
        if not together_they_leave:
            await_true(group.left, 10.0, lambda: False, lambda: False, lambda: ())
            with pytest.raises(PeerLost, match="has left its group, or another has"):
                group.check()
        group.close()
        group.close()

    groups = team(tmp_path, 2)
    together(2, act)
    assert sorted(freed) == ([0, 1] if together_they_leave else [])


def test_waits_for_devices_end() -> None:
    def never() -> bool:
        return False

    await_true(lambda: True, 0.0, never, never, lambda: (1,))
    with pytest.raises(PeerLost, match=r"nothing came for 0\.05 s") as late:
        await_true(never, 0.05, never, never, lambda: (1,))
    assert late.value.ranks == (1,)
    with pytest.raises(PeerLost, match="a rank left"):
        await_true(never, 60.0, never, lambda: True, lambda: (2,))
    with pytest.raises(PeerLost, match="left during an exchange"):
        await_true(never, 60.0, lambda: True, never, lambda: ())


@fakes
@pytest.mark.parametrize("name", ["nccl", "nvshmem"])
def test_who_leaves_is_noticed(name: str, tmp_path: Path) -> None:
    def act(group: DeviceGroup) -> str:
        group.timeout = 2.0
        lane = make_lanes(name, group, 4, HIDDEN, torch.float32)[0]
        drain(exchange(lane, CASES[0], group.rank, group.size))
        if group.rank == 1:
            group.close()
            with contextlib.suppress(PeerLost):
                lane.dispatch(*CASES[0].inputs(1, 2))
                raise AssertionError("it has left")
            return "gone"
        with pytest.raises(PeerLost):
            x_TD, routing = CASES[0].inputs(0, 2)
            arrived = lane.dispatch(x_TD, routing).wait()
            lane.combine(anything(arrived.batch), arrived.ticket, torch.empty_like(x_TD)).wait()
        return "noticed"

    with use_fakes():
        assert on_ranks(tmp_path, 2, act) == ["noticed", "gone"]


@pytest.mark.parametrize("rows", ["plain", "fp8"])
def test_pairs_on_the_host(rows: str, tmp_path: Path) -> None:
    """Ragged rows for large steps and padded ones for small; the results are those of one backend alone."""

    def act(rank: int) -> list[Layout]:
        state = StepState()
        pair = make_lanes(
            "shm+shm_padded", groups[rank], 4, 300, torch.float32, 2, rows=rows, few_tokens=8, state=state
        )
        assert isinstance(pair[0], PairedLane)
        taken = []
        for tokens in ((3, 8), (9, 0), (0, 0), (2, 40)):
            case = Case("pair", tokens, hidden=300, rows=rows)
            state.begin(max(tokens))
            taken.append(pair[0].layout)
            drain(weave(*(exchange(lane, case, rank, 2) for lane in pair)))
            state.confirm()
        return taken

    groups = team(tmp_path, 2)
    few, many = Layout.PADDED, Layout.RAGGED
    assert together(2, act) == [[few, many, few, many]] * 2


def test_a_pair_outside_of_a_step_refuses() -> None:
    """It has no way of knowing which of the two its peers take; the last step's size is another step's."""
    state = StepState()
    inner: list[Any] = [LocalAllToAll(4), LocalAllToAll(4)]
    pair = PairedLane(state, *inner, few=8)
    step = torch.zeros(3, 16), Routing(torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2))
    with pytest.raises(RuntimeError, match="has not been told of this step"):
        pair.dispatch(*step)
    state.begin(3)
    pair.dispatch(*step).wait()
    state.seal()()
    with pytest.raises(RuntimeError, match="has not been told of this step"):
        pair.dispatch(*step)
    state.begin(3)
    state.forget()
    with pytest.raises(RuntimeError, match="has not been told of this step"):
        pair.dispatch(*step)


@fakes
def test_lanes_of_flashinfer_do_not_share_a_workspace(tmp_path: Path) -> None:
    """The library gives objects that agree in all numbers the same one."""

    def act(group: DeviceGroup) -> bool:
        name = "flashinfer_nvlink_one_sided"
        lanes = make_lanes(name, group, 4, 2048, torch.bfloat16, num_lanes=2, max_tokens=16)
        drain(weave(*(exchange(lane, BF16, group.rank, group.size) for lane in lanes)))
        return True

    with use_fakes():
        assert on_ranks(tmp_path, 2, act) == [True, True]
