"""Captured forward passes equal eager ones, over a fake of CUDA graphs that records operations and repeats them.

Legend: T tokens, D hidden size.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepseek_tiny
import drive
import hf_tiny
import pytest
import torch
from fake_cuda_graph import FakeCaptureError, FakeGraphLibrary
from fake_padded_lane import FakePaddedLane
from laid_out import LaidOut, Work
from msgspec.structs import replace
from torch import Tensor

from dbo.steps import Steps, drain
from engine.capture import Capture, GraphPolicy
from engine.prepared import GraphSize
from ep.parallel import Parallel
from eplb.placement import linear_placement
from layers.step import StepInput
from models.base import CausalLM
from models.graph_breaks import GraphBreaks
from models.registry import read_config
from native import Isa, isa, limit_isa

BLOCK_SIZE = 4
NUM_BLOCKS = 40
MAX_LEN = 32
FULL = GraphPolicy(full=(1, 2, 4, 8))
PIECEWISE = GraphPolicy(piecewise=(4, 8, 16, 32))


@pytest.fixture(scope="module", autouse=True)
def _plain_torch() -> Iterator[None]:
    """Native kernels are no operations of torch: the fake does not see them."""
    before = isa()
    limit_isa(Isa.NONE)
    yield
    limit_isa(before)


def padded(path: Path) -> Parallel:
    facts = read_config(path)
    placement = linear_placement(facts.num_moe_layers, facts.num_experts, 1)
    return Parallel(0, 1, placement, lambda num_slots, _: [FakePaddedLane(num_slots), FakePaddedLane(num_slots)])


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    path = hf_tiny.make_qwen3_moe(tmp_path_factory.mktemp("graphs")).path
    return drive.load_ours(path, padded(path))


@pytest.fixture(scope="module")
def ragged(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    return drive.load_ours(hf_tiny.make_qwen3_moe(tmp_path_factory.mktemp("ragged")).path)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    return drive.load_ours(hf_tiny.make_qwen3(tmp_path_factory.mktemp("dense")).path)


@dataclass
class Captured:
    """A model with graphs, and a twin of its cache that only eager steps touch."""

    model: CausalLM
    library: FakeGraphLibrary
    capture: Capture
    laid_out: LaidOut
    eager: drive.Cache
    scratch: int

    @staticmethod
    def of(model: CausalLM, policy: GraphPolicy, context_cost: float = 0.0) -> Captured:
        cache, eager = (drive.Cache.for_model(model, NUM_BLOCKS, BLOCK_SIZE) for _ in range(2))
        library = FakeGraphLibrary()
        scratch = cache.free[0].pop()
        assert scratch == eager.free[0].pop()

        def forward(step: StepInput, breaks: GraphBreaks, lane: int) -> Steps[Tensor]:
            return model.steps(step, cache.kv, lane, breaks)

        laid_out = LaidOut(cache, 8, MAX_LEN, scratch=scratch, context_cost=context_cost)
        capture = Capture(forward, library, policy, laid_out.buffers)
        with torch.inference_mode():
            capture.capture()
        return Captured(model, library, capture, laid_out, eager, scratch)

    def check(self, work: Work, num_ubatches: int = 1) -> int:
        """The step gives what an eager one does, and leaves the same cache. Returns how many graphs were replayed."""
        before = self.library.num_replays
        twin = drive.make_step(self.eager, work)
        with torch.inference_mode():
            ours = drain(self.capture.steps(self.laid_out.fill(work, num_ubatches, self.capture.choose)))
            expected = drain(self.model.steps(twin, self.eager.kv))
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)
        written = torch.tensor([slot for slot in range(NUM_BLOCKS * BLOCK_SIZE) if slot // BLOCK_SIZE != self.scratch])
        for mine, other in zip(self.laid_out.cache.kv.layers, self.eager.kv.layers, strict=True):
            for a, b in zip(mine, other, strict=True):
                torch.testing.assert_close(a[written], b[written], atol=1e-5, rtol=1e-4)
        return self.library.num_replays - before


def prompts(captured: Captured, lengths: list[int], seed: int = 0) -> list[tuple[int, list[int], int]]:
    draw = random.Random(seed)
    return [(b, [draw.randrange(hf_tiny.VOCAB) for _ in range(n)], 0) for b, n in enumerate(lengths)]


@pytest.mark.parametrize("num_ubatches", [1, 2])
def test_full_decode_graphs_equal_eager(moe: CausalLM, num_ubatches: int) -> None:
    """As sequences end the step shrinks: what stood in the rows of padding must not write to the cache any more. Parts
    are of equal work, so of unequal numbers of sequences."""
    captured = Captured.of(moe, replace(FULL, num_ubatches=num_ubatches), context_cost=1.0)
    lengths = [2, 1, 3, 5, 18, 2]
    work = sorted(prompts(captured, lengths), key=lambda item: len(item[1]) > 1)
    assert captured.check(work) == 0  # a prefill is none of theirs
    parts = set()
    for step, live in enumerate([6, 6, 3, 5, 5, 1, 1, 1, 2]):
        work = [(b, [7 * b + step], lengths[b]) for b in range(live)]
        for b in range(live):
            lengths[b] += 1
        split = num_ubatches if step != 2 else 1
        assert captured.check(work, split) == 1
        last = captured.laid_out.last
        parts.add(tuple(part.num_tokens for part in last.inputs))
    if num_ubatches == 2:
        assert any(abs(first - second) > 1 for first, second in (part for part in parts if len(part) == 2))
    else:
        assert captured.laid_out.num_advanced >= 4
    assert captured.capture.captured(True) == [1, 2, 4, 8] and captured.capture.captured(False) == []


def test_split_steps_that_no_graph_has(moe: CausalLM) -> None:
    """Prompts, too many rows, none at all, and parts that were not foreseen."""
    captured = Captured.of(moe, GraphPolicy((1, 2), (8,), num_ubatches=2))
    prompts_and_decodes: Work = [(0, [5], 3), (5, [1, 2, 3], 0)]
    for work, num_ubatches in (
        (prompts_and_decodes, 2), ([(b, [5], 3) for b in range(5)], 2), ([], 2), ([(b, [5], 3) for b in range(3)], 3),
    ):  # fmt: skip
        prepared = captured.laid_out.fill(work, num_ubatches, captured.capture.choose)
        assert list(prepared.graphs) == [None] * num_ubatches
    (one, none) = captured.laid_out.fill([(0, [5], 3)], 2, captured.capture.choose).graphs
    assert one == none == GraphSize(True, 1)


def test_dense_models_too(dense: CausalLM) -> None:
    captured = Captured.of(dense, GraphPolicy((1, 4), (16,)))
    captured.check(prompts(captured, [6, 9]))
    assert captured.check([(0, [3], 6), (1, [4], 9)]) == 1


@pytest.mark.parametrize("cut", [False, True], ids=["operations left out", "exchanges too"])
def test_piecewise_graphs_equal_eager(moe: CausalLM, cut: bool) -> None:
    captured = Captured.of(moe, replace(PIECEWISE, break_exchanges=cut))
    mixed = [(0, [1, 2, 3, 4, 5, 6, 7], 0), (1, [8] * 12, 0)]
    assert captured.check(mixed) > 1
    assert captured.check([(0, [9], 7), (1, [10], 12), (2, [11, 12, 13], 0)]) > 1  # decodes beside a prefill
    assert captured.check([(0, [9], 8)]) > 1
    assert (
        captured.check([(3, list(range(20)), 0), (4, list(range(13)), 0)]) == 0
    )  # more tokens than any graph has room for


def test_experts_that_count_on_the_host_are_left_out(ragged: CausalLM) -> None:
    with pytest.raises(RuntimeError, match=r"a step of 8 rows cannot be captured .*--cudagraph-mode none") as error:
        Captured.of(ragged, FULL)
    assert isinstance(error.value.__cause__, FakeCaptureError)
    captured = Captured.of(ragged, replace(PIECEWISE, break_exchanges=True))
    assert captured.check([(0, [1, 2, 3, 4, 5], 0), (1, [8] * 8, 0)]) > 1
    assert captured.check([(0, [5], 5), (1, [6], 8)]) > 1


@pytest.mark.parametrize("make", [deepseek_tiny.make_v3, deepseek_tiny.make_v32, deepseek_tiny.make_glm5])
def test_deepseek_piecewise(make: Callable[..., Any], tmp_path: Path) -> None:
    """Its attention in torch plans on the host; that is what the cut is for. With an indexer (of 8 keys) graphs must not
    know how many keys there were when they were captured."""
    model = drive.load_ours(make(tmp_path).path)
    captured = Captured.of(model, replace(PIECEWISE, break_exchanges=True))
    assert captured.check([(0, [1, 2, 3, 4, 5], 0), (1, [8] * 8, 0)]) > 1
    assert captured.check([(0, [5], 5), (1, [6], 8)]) > 1
    assert captured.check([(1, [7, 8, 9], 9)]) > 1


def test_a_step_without_tokens_runs_eager(moe: CausalLM) -> None:
    captured = Captured.of(moe, GraphPolicy((1, 2), (4,)))
    assert captured.check([]) == 0


def test_what_is_too_large_runs_eager(moe: CausalLM) -> None:
    captured = Captured.of(moe, GraphPolicy(full=(1, 2)))
    captured.check(prompts(captured, [3, 3, 3]))
    assert captured.check([(b, [5], 3) for b in range(3)]) == 0
    assert captured.check([(b, [5], 4) for b in range(2)]) == 1


def test_forgotten_graphs_are_not_replayed(moe: CausalLM) -> None:
    captured = Captured.of(moe, GraphPolicy(full=(1, 2)))
    captured.capture.forget()
    captured.check(prompts(captured, [3]))
    assert captured.check([(0, [5], 3)]) == 0
    with torch.inference_mode():
        captured.capture.capture()
    assert captured.check([(0, [6], 4)]) == 1
    assert captured.library.num_sessions == 2


def test_ranks_that_have_become_several_cut_out_the_experts(moe: CausalLM) -> None:
    """A server that began with one rank has grown: its plan has not asked whether the exchange can be captured."""
    captured = Captured.of(moe, GraphPolicy((1, 2), (4, 8), together=False))
    with torch.inference_mode():
        captured.capture.capture(num_ranks=2)
    assert captured.capture.captured(True) == [] and captured.capture.captured(False) == [4, 8]
    captured.check(prompts(captured, [3, 4]))
    assert captured.check([(0, [5], 3), (1, [6], 4)]) > 1


def test_decodes_prefer_the_full_graph(moe: CausalLM) -> None:
    captured = Captured.of(moe, GraphPolicy((1, 2), (4, 8)))
    captured.check(prompts(captured, [3, 4]))
    assert captured.check([(0, [5], 3), (1, [6], 4)]) == 1
