"""Full decode graphs of ranks that exchange rows with each other, over the fakes of the libraries whose exchanges a graph can hold:
captured steps equal eager ones, also beside a rank whose step is in no graph, and in parts that take turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import drive
import hf_tiny
import pytest
import torch
from fake_cuda_graph import FakeGraphLibrary
from laid_out import LaidOut, Sequences, Work
from laid_out import TwoRankStep as Step
from puts_in_threads import fakes_for
from rank_threads import on_ranks
from torch import Tensor
from use_fakes import use_fakes

from dbo.steps import Steps, drain
from engine.capture import Capture, GraphPolicy
from ep.backends.dispatchers import StepState
from ep.parallel import Parallel
from ep.protocol import AllToAll, Routing
from ep.table import make_lanes
from ep.transport.device_group import DeviceGroup
from eplb.placement import linear_placement
from layers.step import StepInput
from models.graph_breaks import GraphBreaks
from models.registry import read_config
from moe_kernels import TokenBatch
from native import Isa, isa, limit_isa

pytestmark = pytest.mark.fakes

BLOCK_SIZE, NUM_BLOCKS, MAX_LEN = 4, 48, 32
FEW = 8  # tokens of a rank in a step, up to which it may be in a full graph
POLICY = GraphPolicy(full=(1, 4, FEW), few_tokens=FEW, num_ubatches=2)
BF16 = torch.bfloat16


STEPS = [
    Step((3, 7)),  # padded to 4 and to 8
    Step((1, 0)),  # one rank only serves
    Step((3, 5), (0, 2)),  # beside a prompt
    Step((2, 1), (20, 0)),  # too many tokens for either rank's graph
    Step((3, 7)),
    Step((3, 7), split=True),
    Step((2, 8), split=True),  # a part of one token
    Step((1, 5), split=True),  # and one of none
    Step((3, 5), (0, 2), split=True),
    Step((4, 8)),
]


@pytest.fixture(autouse=True)
def _plain_torch() -> Iterator[None]:
    """Native kernels are no operations of torch: the fake does not see them."""
    before = isa()
    limit_isa(Isa.NONE)
    yield
    limit_isa(before)


class Ours(Sequences):
    """One rank: a model with graphs, and a twin of its cache that only eager steps touch."""

    def __init__(self, path: Path, group: DeviceGroup, backend: str, rows: str) -> None:
        super().__init__(group.rank)
        facts = read_config(path)
        placement = linear_placement(facts.num_moe_layers, facts.num_experts, group.size)
        self.state = StepState()

        def lanes(num_slots: int, hidden_size: int) -> Sequence[AllToAll]:
            sizes = num_slots, hidden_size, BF16
            return make_lanes(backend, group, *sizes, 2, rows=rows, max_tokens=32, few_tokens=FEW, state=self.state)

        self.model = drive.load_ours(path, Parallel(group.rank, group.size, placement, lanes), BF16)
        self.cache, self.eager = (drive.Cache.for_model(self.model, NUM_BLOCKS, BLOCK_SIZE) for _ in range(2))
        scratch = self.cache.free[0].pop()
        assert self.eager.free[0].pop() == scratch
        self.library = FakeGraphLibrary()

        def forward(step: StepInput, breaks: GraphBreaks, lane: int) -> Steps[Tensor]:
            return self.model.steps(step, self.cache.kv, lane, breaks)

        self.laid_out = LaidOut(self.cache, 16, MAX_LEN, scratch=scratch)
        self.capture = Capture(forward, self.library, POLICY, self.laid_out.buffers, self.state)
        self.capture.capture(group.size)

    def run(self, work: Work, largest: int, split: bool) -> tuple[float, int]:
        """By how much the step differs from an eager one, and how many graphs were replayed."""
        before = self.library.num_replays
        self.state.begin(largest)
        prepared = self.laid_out.fill(work, 1 + split, self.capture.choose)
        ours = drain(self.capture.steps(prepared))
        self.state.confirm()
        self.state.begin(largest)
        expected = drain(self.model.steps(drive.make_step(self.eager, work), self.eager.kv))
        self.state.confirm()
        error = drive.relative_error(ours.float(), expected.float()) if len(expected) else 0.0
        return error, self.library.num_replays - before


@pytest.mark.parametrize(
    ("backend", "rows"),
    [
        pytest.param("deepep_low_latency", "plain", marks=pytest.mark.slow),
        ("deepep_low_latency", "fp8"),
        pytest.param("pplx", "plain", marks=pytest.mark.slow),
        ("deepep_high_throughput+deepep_low_latency", "plain"),
        pytest.param("nvshmem+nvshmem_low_latency", "fp8", marks=pytest.mark.slow),  # kernels in the interpreter
    ],
)
def test_captured_steps_equal_eager_ones(backend: str, rows: str, tmp_path: Path) -> None:
    """Rows of padding travel to experts like others: they take place that is kept for them, and change no other row."""
    path = hf_tiny.make_qwen3_moe(tmp_path / "model", hidden_size=2048, num_hidden_layers=2).path

    def act(group: DeviceGroup) -> list[tuple[float, int]]:
        ours = Ours(path, group, backend, rows)
        found = [ours.run(ours.prompts([3, 2, 5, 2, 2, 3, 2, 2]), 21, False)]
        for step in STEPS:
            found.append(ours.run(ours.work(step), max(step.tokens), step.split))
        return found

    with fakes_for(backend):
        by_rank = on_ranks(tmp_path, 2, act)
    for rank, found in enumerate(by_rank):
        assert isinstance(found, list)
        assert max(error for error, _ in found) < 0.02, found
        fits = [step.counts[rank] > 0 and not step.new[rank] and max(step.tokens) <= FEW for step in STEPS]
        assert [replays for _, replays in found] == [0, *map(int, fits)]


def test_ranks_agree_on_the_room_that_flashinfer_takes(tmp_path: Path) -> None:
    """One rank replays what was captured when it had 8 rows, the other one computes 2 rows as they are."""

    def act(group: DeviceGroup) -> float:
        state = StepState()
        [lane] = make_lanes(
            "flashinfer_nvlink_one_sided", group, 2, 2048, BF16, max_tokens=32, few_tokens=FEW, state=state
        )
        state.begin(3)
        num_rows = (8, 2)[group.rank]
        x_TD = torch.randn(num_rows, 2048).to(BF16)
        routing = Routing(torch.tensor([[0, 3]] * num_rows), torch.full((num_rows, 2), 0.5))
        arrived = lane.dispatch(x_TD, routing).wait()
        batch = arrived.batch
        assert isinstance(batch, TokenBatch)
        here_TK = (batch.slot_TK >= batch.first_slot) & (batch.slot_TK < batch.first_slot + 2)
        y_TD = torch.where(here_TK.any(1, keepdim=True), batch.x_TD * 0.5, 0)  # of experts that do nothing
        out_TD = lane.combine(y_TD, arrived.ticket, torch.empty_like(x_TD)).wait()
        return float((out_TD - x_TD).abs().max())

    with use_fakes():
        assert on_ranks(tmp_path, 2, act) == [0.0, 0.0]
