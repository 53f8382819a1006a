"""The way of a GPU through the whole engine, with tensors that claim to be on one (tests/claimed_gpu.py): no operation mixes host and
device, a step waits for nothing that it need not wait for, and the tokens are those of the CPU.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepseek_tiny
import hf_tiny
import pytest
import torch
from balanced import RESTLESS, placement_of
from claimed_gpu import GPU, GpuError, claimed_gpu, host
from overlapped import SPLIT
from rank_parts import Job, drive, mailbox_ranks, make_plan

from engine.build import build_rank
from engine.device import open_device
from ep.backends.local import LocalAllToAll
from ep.experts import WeightFormat
from ep.parallel import Parallel
from eplb.placement import linear_placement
from front.params import ReasoningBudget
from mla.protocol import PrefillMode
from models.registry import build, parse_config
from moesaic import LLM, SamplingParams
from native import isa, limit_isa

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "benchmarks"))
from gpu_models import TINY, Driver, make_model

pytestmark = pytest.mark.triton


@pytest.fixture(autouse=True)
def _without_native_kernels() -> Iterator[None]:
    """Ranks choose their own."""
    before = isa()
    yield
    limit_isa(before)


# ---- the device itself ----


def test_both_devices_do_not_mix() -> None:
    with claimed_gpu() as seen, torch.inference_mode():
        ours, theirs = torch.ones(3, 4, device="cuda"), torch.ones(3, 4)
        assert ours.device == GPU and (ours @ ours.T).device == GPU and ours[1:, :2].stride() == (4, 1)
        for wrong in (
            lambda: ours + theirs,
            lambda: torch.nn.functional.linear(ours, theirs),
            lambda: ours[torch.tensor([0])],
            lambda: ours.index_select(0, torch.tensor([0])),
            lambda: ours.to(torch.float8_e4m3fn) + 1,
        ):
            with pytest.raises(GpuError):
                wrong()
        with pytest.raises(TypeError, match=r"Use Tensor\.cpu"):
            ours.numpy()
        assert not seen.waits and not seen.uploads
        ours += theirs.to(GPU)
        ours[0] = torch.tensor([5.0], device=GPU) * 2
        assert host(ours).tolist() == [[10.0] * 4, [2.0] * 4, [2.0] * 4] and seen.uploads.total() == 2
        assert int(ours[0, 0]) == 10 and ours.cpu().shape == (3, 4) and seen.waits.total() == 2
    assert not torch.cuda.is_available()


def test_a_device_is_opened() -> None:
    with claimed_gpu():
        assert open_device("cuda", 0, 1) == GPU
        with pytest.raises(ValueError, match="which has 1"):
            open_device("cuda", 1, 2)


# ---- models ----


@pytest.mark.parametrize("form", [WeightFormat.PLAIN, WeightFormat.FP8])
@pytest.mark.parametrize("family", list(TINY))
def test_a_forward_pass_waits_for_nothing(family: str, form: WeightFormat) -> None:
    """Only the plans of prompts come from the host."""
    with claimed_gpu(numbers=False) as seen, torch.inference_mode():
        model = make_model(TINY[family], torch.bfloat16, GPU, form)
        driver = Driver(model, 4, 64, 16, GPU)
        for first, count, members in ((0, 19, 4), (19, 3, 4), (22, 1, 3), (23, 1, 0)):
            step = driver.step(range(members), first, count)
            seen.clear()
            hidden = driver.run(step)
            assert hidden.device == GPU and hidden.shape == (members * count, 256)
            assert not seen.waits, (seen.waits, count)
            assert count > 1 or not seen.uploads, seen.uploads
            assert model.greedy_tokens(hidden, 128).device == GPU


@pytest.mark.parametrize("prefill", ["naive", "absorbed", "auto"])
def test_latents_in_fp8_stay_on_the_device(prefill: PrefillMode) -> None:
    with claimed_gpu(numbers=False) as seen, torch.inference_mode():
        facts = parse_config(TINY["deepseek-v3"], "a made-up config")
        placement = linear_placement(facts.num_moe_layers, facts.num_experts, 1)
        parallel = Parallel(0, 1, placement, lambda slots, _: [LocalAllToAll(slots)])
        model = build(facts, parallel, torch.bfloat16, GPU, prefill, "auto", True)
        driver = Driver(model, 4, 64, 16, GPU)
        for first, count in ((0, 19), (19, 3), (22, 1)):
            step = driver.step(range(4), first, count)
            seen.clear()
            assert driver.run(step).device == GPU and not seen.waits
        assert "_decode_fp8_kernel" in seen.kernels


# ---- the engine ----

PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "top_p": 0.9, "prompt_logprobs": 1},
    {"temperature": 1.0, "top_k": 5, "min_p": 0.05, "logprobs": 3},
    {"logit_bias": {3: 2.0}, "repetition_penalty": 1.2, "presence_penalty": 0.3, "logprobs": 2},
    {"min_tokens": 3, "allowed_token_ids": [1, 2, 3, 9], "bad_words_token_ids": ((4, 5), (6,))},
    {"reasoning": ReasoningBudget(1, (), ((4, 5),)), "temperature": 0.8},
]
JOBS = [Job([1 + i, 2, 3, 4, 5 + i, 6, 7][: 7 - i % 3], 3, arrive=i % 2, params=p) for i, p in enumerate(PARAMS)]
SIZES = {
    "num_kv_blocks": 14, "max_num_seqs": 4, "max_num_batched_tokens": 10, "max_model_len": 32, "native_kernels": "none",
}  # fmt: skip
GRAPHS = {"cudagraph_mode": "full_and_piecewise", "cudagraph_capture_sizes": (2, 4)}


def qwen3(path: Path) -> None:
    hf_tiny.make_qwen3_moe(path, num_hidden_layers=2)


def deepseek(path: Path) -> None:
    deepseek_tiny.make_v3(path, num_hidden_layers=2)


def glm5(path: Path) -> None:
    """The second layer uses what the first has chosen."""
    deepseek_tiny.make_glm5(path, num_hidden_layers=2, indexer_types=["full", "shared"], index_topk=5)


@pytest.mark.parametrize(
    ("make", "choices"),
    [
        pytest.param(qwen3, {"async_scheduling": True}, id="qwen3 on a thread"),
        pytest.param(deepseek, {}, id="deepseek", marks=pytest.mark.slow),
        pytest.param(qwen3, GRAPHS, id="qwen3 in graphs", marks=pytest.mark.slow),
        pytest.param(deepseek, GRAPHS | {"async_scheduling": True}, id="deepseek in graphs", marks=pytest.mark.slow),
        pytest.param(glm5, {}, id="glm5", marks=pytest.mark.slow),
        pytest.param(glm5, GRAPHS | {"async_scheduling": True}, id="glm5 in graphs", marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")  # of rows that stay padding
def test_tokens_are_those_of_the_cpu(make: Callable[[Path], None], choices: dict[str, Any], tmp_path: Path) -> None:
    make(tmp_path)
    expected = drive([build_rank(make_plan(tmp_path, **SIZES))], JOBS)
    with claimed_gpu() as seen:
        rank = build_rank(make_plan(tmp_path, device="cuda", ranks_per_machine=1, **SIZES, **choices))
        assert not seen.waits, "loading waits for the device"
        ours = drive([rank], JOBS)
        rank.close()
    for got, wanted in zip(ours, expected, strict=True):
        assert got.tokens == wanted.tokens and got.finish_reason == wanted.finish_reason
    assert seen.pinned and {"_sample_kernel", "_gate_up_kernel", "_topk_kernel"} <= set(seen.kernels)


@pytest.mark.slow
@pytest.mark.parametrize(
    "choices", [{"slots_per_rank": 6, "eplb": RESTLESS}, {"dbo": SPLIT}], ids=["balanced", "split"]
)
def test_two_ranks_of_one_thread(choices: dict[str, Any], tmp_path: Path) -> None:
    """They exchange rows, and experts change hands; or their steps are split."""
    qwen3(tmp_path)
    jobs = [Job([1 + i, 2, 3], 12 if "eplb" in choices else 3) for i in range(4)]
    expected = drive(mailbox_ranks(tmp_path, 2, **SIZES, **choices), jobs)
    with claimed_gpu():
        ranks = mailbox_ranks(tmp_path, 2, device="cuda", ranks_per_machine=1, **SIZES, **choices)
        ours = drive(ranks, jobs)
        if "eplb" in choices:
            first = linear_placement(2, 8, 2, 6)
            assert (placement_of(ranks[0]).slot_to_expert != first.slot_to_expert).any(), "no expert has moved"
    assert [got.tokens for got in ours] == [got.tokens for got in expected]


@pytest.mark.slow
def test_an_llm_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """moesaic.LLM as a user calls it: what nvidia-smi says, the plan, the embedded model, its tokens."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, GPU-1, a claimed GPU, 9.0, 16384'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("configs.gpu.torch_version", lambda: "2.13.0")
    found = []
    params = SamplingParams(max_tokens=2, temperature=0.0)
    for device in ("cpu", "cuda"):
        options: dict[str, Any] = {"device": device, "dtype": "float32", "max_model_len": 64, "max_num_seqs": 2}
        options["max_num_batched_tokens"] = 16  # practice has as many, and the interpreter is slow
        mode = "none" if device == "cuda" else "auto"
        here = claimed_gpu() if device == "cuda" else contextlib.nullcontext()
        with here, LLM(**options, cudagraph_mode=mode) as llm:
            assert llm.plan.device == device and (llm.plan.async_scheduling or device == "cpu")
            found.append([output.outputs[0].token_ids for output in llm.generate(["Once upon", "The"], params)])
    assert found[0] == found[1]
