"""Full decode graphs over the Triton forms of every room, in the interpreter: nothing on that way reads the device from the host, and
what kernels take from the host may be a bound only."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepseek_tiny
import drive
import hf_tiny
import pytest
import torch
from fake_cuda_graph import FakeGraphLibrary, FakeLaunch
from laid_out import LaidOut
from triton.runtime.interpreter import InterpretedFunction
from triton_support import ROOT, as_on_gpu

from dbo.steps import Steps, drain
from engine.capture import Capture, GraphPolicy
from layers.step import StepInput
from models.graph_breaks import GraphBreaks

pytestmark = pytest.mark.triton

BLOCK_SIZE, NUM_BLOCKS, MAX_LEN = 4, 24, 64
FP8 = {"hidden_size": 128, "moe_intermediate_size": 128, "kv_lora_rank": 128}


@contextmanager
def launches_noted() -> Iterator[None]:
    """Within as_on_gpu: kernels that are launched from the host tell the graph that is being captured."""
    rooms = ("layers", "mla", "moe_kernels")
    modules = [
        importlib.import_module(f"{room}.triton.{path.stem}")
        for room in rooms
        for path in (ROOT / room / "triton").glob("[a-z]*.py")
    ]
    kernels = [
        (module, name, kernel)
        for module in modules
        for name, kernel in vars(module).items()
        if isinstance(kernel, InterpretedFunction) and name.endswith("_kernel")
    ]
    for module, name, kernel in kernels:
        setattr(module, name, FakeLaunch(kernel))
    try:
        yield
    finally:
        for module, name, kernel in kernels:
            setattr(module, name, kernel)


def fp8_model(path: Path) -> None:
    hf_tiny.make_fp8(deepseek_tiny.make_v3(path, num_hidden_layers=2, **FP8))


MODELS: dict[str, tuple[Callable[[Path], Any], dict[str, Any]]] = {
    "qwen3-moe": (lambda path: hf_tiny.make_qwen3_moe(path, num_hidden_layers=2), {}),
    "deepseek-v3": (lambda path: deepseek_tiny.make_v3(path, num_hidden_layers=2), {}),
    "deepseek-v3 fp8": (fp8_model, {"dtype": torch.bfloat16, "fp8_cache": True}),
}


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3-moe", "deepseek-v3")), "deepseek-v3 fp8"]
)
def test_full_decode_graphs_equal_eager(name: str, tmp_path: Path) -> None:
    make, choices = MODELS[name]
    make(tmp_path)
    library = FakeGraphLibrary()
    with as_on_gpu(), launches_noted(), torch.inference_mode():
        model = drive.load_ours(tmp_path, **choices)
        cache, eager = (drive.Cache.for_model(model, NUM_BLOCKS, BLOCK_SIZE) for _ in range(2))
        scratch = cache.free[0].pop()
        assert eager.free[0].pop() == scratch

        def forward(step: StepInput, breaks: GraphBreaks, lane: int) -> Steps[torch.Tensor]:
            return model.steps(step, cache.kv, lane, breaks)

        laid_out = LaidOut(cache, 2, MAX_LEN, scratch=scratch)
        capture = Capture(forward, library, GraphPolicy(full=(2,)), laid_out.buffers)
        capture.capture()
        lengths = [5, 2]
        steps = [[(b, [b + 1] * length, 0) for b, length in enumerate(lengths)]]
        for live in (2, 1, 2):
            steps.append([(b, [7 * b + live], lengths[b]) for b in range(live)])
            lengths = [length + (b < live) for b, length in enumerate(lengths)]
        for work in steps:
            ours = drain(capture.steps(laid_out.fill(work, choose=capture.choose)))
            expected = drain(model.steps(drive.make_step(eager, work), eager.kv))
            torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-3)
    assert library.num_replays == 3
