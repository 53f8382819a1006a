"""Decode steps whose exchanges with other ranks are on a CPU's graph equal eager ones: beside ranks whose step is in no graph, or that
have no tokens, and with replicas of experts; and a rank that is lost while one is replayed is named as it always is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import deepseek_tiny
import drive
import hf_tiny
import pytest
import torch
from amounts import combined
from laid_out import LaidOut, Sequences, Work
from laid_out import TwoRankStep as Step
from linked_groups import on_machines
from rank_threads import together
from torch import Tensor

from dbo.steps import Steps, drain
from engine.capture import Capture, GraphPolicy
from ep.backends.dispatchers import StepState
from ep.parallel import Parallel
from ep.protocol import AllToAll, PeerLost
from ep.table import make_lanes
from ep.transport.group import GlooGroup
from ep.transport.shm_group import ShmGroup, shm_group
from eplb.placement import linear_placement
from layers.step import StepInput
from models.graph_breaks import GraphBreaks
from models.registry import read_config
from native import Isa, isa
from native.tape import CpuGraphs, Late

pytestmark = pytest.mark.skipif(
    isa() == Isa.NONE, reason="graphs on a CPU are of native kernels, which are not there or not used"
)

BLOCK_SIZE, NUM_BLOCKS, MAX_LEN, MOST = 4, 128, 192, 4
MANY = 140  # more tokens than a recorded exchange has room for
MAKERS = {"qwen3_moe": hf_tiny.make_qwen3_moe, "deepseek_v3": deepseek_tiny.make_v3}


STEPS = [
    Step((3, 4)),
    Step((1, 0)),  # one rank only serves
    Step((3, 2), (0, 6)),  # beside a prompt
    Step((2, 1), (MANY, 0)),
    Step((3, 4)),
    Step((1, 0)),
    Step((0, 2)),
    Step((2, 1), (0, 9)),
    Step((1, 0)),
]


class Ours(Sequences):
    """One rank: a model with graphs, and a twin of its cache that only eager steps touch."""

    def __init__(
        self,
        path: Path,
        group: ShmGroup | GlooGroup,
        dtype: torch.dtype,
        extra: int = 0,
        backend: str = "auto",
        few: int = 64,
    ) -> None:
        super().__init__(group.rank % 2)  # of four ranks the last two have what the first two have
        facts = read_config(path)
        slots = -(-facts.num_experts // group.size) + extra
        placement = linear_placement(facts.num_moe_layers, facts.num_experts, group.size, slots if extra else None)
        self.state = StepState()

        def lanes(num_slots: int, hidden_size: int) -> Sequence[AllToAll]:
            sizes = num_slots, hidden_size, dtype
            return make_lanes(backend, group, *sizes, few_tokens=few, state=self.state)

        self.model = drive.load_ours(path, Parallel(group.rank, group.size, placement, lanes), dtype)
        self.cache, self.eager = (drive.Cache.for_model(self.model, NUM_BLOCKS, BLOCK_SIZE) for _ in range(2))
        self.waited: list[Late] = []

        def forward(step: StepInput, breaks: GraphBreaks, lane: int) -> Steps[Tensor]:
            return self.model.steps(step, self.cache.kv, lane, breaks)

        def wait(late: Late) -> None:
            self.waited.append(late)
            self.state.wait_late(late)

        self.laid_out = LaidOut(self.cache, 16, MAX_LEN, max_tokens=MAX_LEN)
        policy = GraphPolicy(exact=MOST)
        self.capture = Capture(forward, CpuGraphs(wait), policy, self.laid_out.buffers, self.state)
        self.capture.capture(group.size)

    def replayed(self, work: Work, largest: int) -> Tensor:
        self.state.begin(largest)
        prepared = self.laid_out.fill(work, 1, self.capture.choose)
        hidden_TD = drain(self.capture.steps(prepared))
        self.state.confirm()
        return hidden_TD

    def check(self, work: Work, largest: int) -> None:
        ours = self.replayed(work, largest).clone()
        self.state.begin(largest)
        assert torch.equal(ours, drain(self.model.steps(drive.make_step(self.eager, work), self.eager.kv)))
        self.state.confirm()

    def record(self, tokens: int) -> None:
        """Prompts, and two steps in which the first rank has so many tokens: the second is replayed."""
        self.check(self.prompts([3, 2]), 5)
        for _ in range(2):
            self.check(self.work(Step((tokens, 2))), 2)

    def forms(self) -> set[tuple[int, bool]]:
        """Rows of its graphs, and whether those hold exchanges."""
        return {(size.rows, size.exchanges) for _, size in self.capture._passes}


def on_two(folder: Path, act: Callable[[ShmGroup], object], timeout: float = 30.0) -> list[object]:
    def run(rank: int) -> object:
        group = shm_group(folder, rank, 2, timeout, "experts")
        try:
            return act(group)
        finally:
            group.close()

    return list(together(2, run))


@pytest.mark.parametrize(
    ("name", "dtype", "extra", "machines"),
    combined(list(MAKERS), [torch.float32, torch.bfloat16], [0, 2], [(2,), (1, 1), (2, 2)]),
)
def test_replayed_exchanges_equal_eager_ones(
    name: str, dtype: torch.dtype, extra: int, machines: tuple[int, ...], tmp_path: Path
) -> None:
    path = MAKERS[name](tmp_path / "model").path

    def act(group: ShmGroup | GlooGroup) -> set[tuple[int, bool]]:
        ours = Ours(path, group, dtype, extra)
        ours.check(ours.prompts([3, 2, 5, 2]), 12)
        for step in STEPS:
            ours.check(ours.work(step), max(step.tokens))
        assert not ours.capture.refused
        return ours.forms()

    # A prompt's step is in no graph; beside one of MANY tokens a decode leaves its exchanges out.
    expected = [
        {(3, True), (1, True), (0, True), (2, True)},
        {(4, True), (0, True), (1, False), (2, True)},
    ]
    if machines == (2,):
        assert on_two(tmp_path, act) == expected
    else:
        places = [tmp_path / str(machine) for machine, count in enumerate(machines) for _ in range(count)]
        for place in places:
            place.mkdir(exist_ok=True)
        found = on_machines(len(places), act, places=places)
        assert found == expected * (len(places) // 2)


@pytest.mark.parametrize(("backend", "recorded"), [("shm_padded+shm", True), ("shm+shm_padded", False)])
def test_graphs_hold_the_exchanges_that_all_ranks_make(backend: str, recorded: bool, tmp_path: Path) -> None:
    """Of two backends the one for few tokens is on a graph if it can be. A rank with decodes only, beside one with a prompt, takes
    the other, although what it sends itself would have found room in a recorded exchange."""
    path = MAKERS["qwen3_moe"](tmp_path / "model").path

    def act(group: ShmGroup) -> set[tuple[int, bool]]:
        ours = Ours(path, group, torch.float32, backend=backend, few=MOST)
        ours.check(ours.prompts([3, 2, 5, 2]), 12)
        for step in STEPS:
            ours.check(ours.work(step), max(step.tokens))
        return ours.forms()

    forms = on_two(tmp_path, act)
    if recorded:
        assert forms == [
            {(3, True), (1, True), (3, False), (0, True), (2, False)},
            {(4, True), (0, True), (1, False), (2, True)},
        ]
    else:  # padded rows are copied by Python
        assert forms == [{(3, False), (1, False), (2, False)}, {(4, False), (1, False), (2, False)}]


@pytest.mark.parametrize("how", ["aborts", "leaves"])
@pytest.mark.parametrize("tokens", [2, 0])
def test_a_rank_lost_while_a_step_is_replayed(how: str, tokens: int, tmp_path: Path) -> None:
    """The other one stops in the first exchange, waits in Python, and raises there; nothing hangs."""
    path = MAKERS["qwen3_moe"](tmp_path / "model").path

    def act(group: ShmGroup) -> object:
        ours = Ours(path, group, torch.float32)
        ours.record(tokens)
        if group.rank == 1:
            if how == "aborts":
                group.abort([1])
            return "gone"
        ours.waited.clear()
        with pytest.raises(PeerLost) as lost:
            ours.replayed(ours.work(Step((tokens, 2))), 2)
        assert (tokens, True) in ours.forms() and [late.reason for late in ours.waited] == [0]
        return lost.value.ranks

    assert on_two(tmp_path, act) == [(1,), "gone"]


@pytest.mark.parametrize("tokens", [2, 0])
def test_a_rank_of_another_machine_lost_while_a_step_is_replayed(tokens: int, tmp_path: Path) -> None:
    path = MAKERS["qwen3_moe"](tmp_path / "model").path

    def act(group: GlooGroup) -> object:
        ours = Ours(path, group, torch.float32)
        ours.record(tokens)
        if group.rank == 1:
            group.close()
            return "gone"
        ours.waited.clear()
        with pytest.raises(PeerLost, match="the connection to rank 1 is broken"):
            ours.replayed(ours.work(Step((tokens, 2))), 2)
        assert (tokens, True) in ours.forms() and [late.reason for late in ours.waited] == [0]
        return "lost"

    assert on_machines(2, act) == ["lost", "gone"]


def test_tokens_that_were_not_agreed_on_stop_the_step(tmp_path: Path) -> None:
    """A rank that sends more than a recorded exchange has room for overwrites nothing."""
    path = MAKERS["qwen3_moe"](tmp_path / "model").path

    def act(group: ShmGroup) -> object:
        ours = Ours(path, group, torch.float32)
        ours.check(ours.prompts([3, 2]), 5)
        ours.check(ours.work(Step((2, 2))), 2)
        if group.rank == 0:
            with pytest.raises(RuntimeError, match="more tokens than the ranks had agreed on"):
                ours.replayed(ours.work(Step((2, 2))), 2)
            group.abort([1])
        else:
            with pytest.raises(PeerLost):
                ours.replayed(ours.prompts([MANY]), MANY)
        return "stopped"

    assert on_two(tmp_path, act) == ["stopped", "stopped"]
