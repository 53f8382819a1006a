"""Decode steps that are replayed on a CPU equal eager ones, and leave the same cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepseek_tiny
import drive
import hf_tiny
import pytest
import torch
from amounts import combined
from laid_out import LaidOut, Work
from torch import Tensor

from dbo.steps import Steps, drain
from engine.capture import Capture, GraphPolicy
from ep.experts import WeightFormat
from ep.protocol import PeerLost
from layers.step import StepInput
from layers.weights import Checkpoint
from models.base import CausalLM
from models.graph_breaks import GraphBreaks
from models.registry import build, read_config
from native import Isa, best_isa, isa, limit_isa
from native.tape import CpuGraphs

pytestmark = pytest.mark.skipif(best_isa() == Isa.NONE, reason="the native kernels were not built")
FORMS = [form for form in WeightFormat if form is not WeightFormat.INT4_INT8]  # which only files have
BLOCK_SIZE = 4
NUM_BLOCKS = 60
MAKERS: dict[str, Callable[..., Any]] = {
    "qwen3": hf_tiny.make_qwen3,
    "qwen3_moe": hf_tiny.make_qwen3_moe,
    "qwen3_next": hf_tiny.make_qwen3_next,
    "kimi_linear": hf_tiny.make_kimi_linear,
    "ling": hf_tiny.make_ling,
    "llama": hf_tiny.make_llama,
    "gpt_oss": hf_tiny.make_gpt_oss,
    "qwen2_moe": hf_tiny.make_qwen2_moe,
    "minimax": hf_tiny.make_minimax_m2,
    "glm": hf_tiny.make_glm4_moe,
    "ernie": hf_tiny.make_ernie,
    "deepseek_v2": deepseek_tiny.make_v2,
    "deepseek_v3": deepseek_tiny.make_v3,
    "deepseek_v3.2": deepseek_tiny.make_v32,
    "glm5": deepseek_tiny.make_glm5,
}


@dataclass
class Captured:
    """A model with graphs, and a twin of its cache that only eager steps touch."""

    model: CausalLM
    capture: Capture
    laid_out: LaidOut
    twin: drive.Cache

    @staticmethod
    def of(
        model: CausalLM, num_ranks: int = 1, watched: Callable[[], bool] = lambda: False, **choices: Any
    ) -> Captured:
        cache, twin = (drive.Cache.for_model(model, NUM_BLOCKS, BLOCK_SIZE) for _ in range(2))

        def forward(step: StepInput, breaks: GraphBreaks, lane: int) -> Steps[Tensor]:
            return model.steps(step, cache.kv, lane, breaks)

        laid_out = LaidOut(cache, 8, 16 * BLOCK_SIZE)
        policy = GraphPolicy(exact=4, **choices)
        capture = Capture(forward, CpuGraphs(), policy, laid_out.buffers, watched=watched)
        capture.capture(num_ranks)
        return Captured(model, capture, laid_out, twin)

    def step(self, work: Work, num_ubatches: int = 1) -> Tensor:
        return drain(self.capture.steps(self.laid_out.fill(work, num_ubatches, self.capture.choose)))

    @torch.inference_mode()
    def check(self, work: Work, num_ubatches: int = 1) -> None:
        ours = self.step(work, num_ubatches)
        assert torch.equal(ours, drain(self.model.steps(drive.make_step(self.twin, work), self.twin.kv)))
        for mine, other in zip(self.laid_out.cache.kv.layers, self.twin.kv.layers, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))

    def run(self) -> None:
        """Prompts, then decodes of fewer and more sequences, again and again."""
        lengths = [5, 1, 9, 3]
        self.check(
            [(b, [b + i for i in range(length)], 0) for b, length in sorted(enumerate(lengths), key=lambda x: x[1] > 1)]
        )
        for step, live in enumerate([4, 4, 4, 2, 2, 3, 1, 2, 4, 1, 3]):
            self.check([(b, [7 * b + step], lengths[b]) for b in range(live)])
            lengths[:live] = [length + 1 for length in lengths[:live]]
        assert self.laid_out.num_advanced == 3  # of the others the sequences were not those of the step before


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make(tmp_path_factory.mktemp(name)).path for name, make in MAKERS.items()}


@pytest.mark.parametrize(
    ("name", "dtype", "break_exchanges"), combined(list(MAKERS), [torch.bfloat16, torch.float32], [False, True])
)
def test_replayed_steps_equal_eager_ones(
    paths: dict[str, Path], name: str, dtype: torch.dtype, break_exchanges: bool
) -> None:
    captured = Captured.of(drive.load_ours(paths[name], dtype=dtype), break_exchanges=break_exchanges)
    captured.run()
    assert captured.capture.captured(True) == [1, 2, 3, 4] and not captured.capture.refused
    captured.capture.forget()
    assert captured.capture.captured(True) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.value)
def test_weights_of_fewer_bits(paths: dict[str, Path], form: WeightFormat, dtype: torch.dtype) -> None:
    path = paths["deepseek_v3"]
    model = build(read_config(path), drive.single_rank(path), dtype, torch.device("cpu"))
    model.keep_experts(form)
    model.keep_linears(form)
    with torch.inference_mode():
        model.load(Checkpoint(path))
    captured = Captured.of(model)
    captured.run()
    assert captured.capture.captured(True) == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_what_cannot_be_captured_runs_eager(paths: dict[str, Path], name: str) -> None:
    before = isa()
    try:
        limit_isa(Isa.NONE)
        captured = Captured.of(drive.load_ours(paths[name], dtype=torch.bfloat16))
        captured.run()
        assert captured.capture.captured(True) == [] and set(captured.capture.refused) == {1, 2, 3, 4}
        assert captured.capture.refused[1].startswith("torch computes aten")
    finally:
        limit_isa(before)


def test_while_somebody_watches_nothing_is_replayed(paths: dict[str, Path]) -> None:
    watched: list[bool] = []
    captured = Captured.of(drive.load_ours(paths["qwen3_moe"]), watched=lambda: bool(watched))
    captured.run()
    calls = []
    captured.model.decoders[0].mixer.out.register_forward_hook(lambda *_: calls.append(1))  # type: ignore[attr-defined]
    captured.check([(0, [1], 14)])
    written = len(calls)  # by the twin
    watched.append(True)
    captured.check([(0, [1], 15)])
    assert len(calls) == 3 * written


def test_prompts_and_many_sequences_are_not_captured(paths: dict[str, Path]) -> None:
    captured = Captured.of(drive.load_ours(paths["qwen3"]))
    captured.check([(b, [b], 0) for b in range(5)])
    captured.check([(0, [3], 1), (5, [1, 2, 3], 0)])
    with torch.inference_mode():
        assert captured.step([]).shape[0] == 0
    assert captured.capture.captured(True) == []


def test_parts_that_take_turns_have_memory_of_their_own(paths: dict[str, Path]) -> None:
    """As if there were other ranks: parts end at the exchanges. The second part reads what the first has written."""
    model = drive.load_ours(paths["qwen3_moe"])
    for _, moe in model.moe_layers:
        moe.lanes = (*moe.lanes, *moe.lanes)
    captured = Captured.of(model, num_ranks=2, num_ubatches=2)
    for turn in range(4):
        captured.check([(b, [3 * b + turn], turn) for b in range(4)], num_ubatches=2)
    assert captured.capture.captured(True, 0) == captured.capture.captured(True, 1) == [2]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_step_that_fails_leaves_nothing_behind(paths: dict[str, Path], num_ranks: int) -> None:
    """The thread records no longer, and the next try is captured like any other."""
    model = drive.load_ours(paths["qwen3_moe"])
    captured = Captured.of(model, num_ranks)
    captured.check([(0, [1, 2, 3], 0)])
    _, moe = model.moe_layers[1]
    failing = [True]

    def fail(*_: object) -> None:
        if failing:
            failing.clear()
            raise PeerLost((1,), "a test")

    hook = moe.router.register_forward_hook(fail)
    with torch.inference_mode(), pytest.raises(PeerLost):
        captured.step([(0, [4], 3)])
    assert torch.ones(2).add(1).sum() == 4 and captured.capture.captured(True) == [] and not captured.capture.refused
    captured.check([(0, [4], 3)])
    hook.remove()
    captured.check([(0, [5], 4)])
    assert captured.capture.captured(True) == [1]
