"""`--deterministic`: tokens and log-probabilities have the same bits alone and in any company, in BF16 too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import deepseek_tiny
import hf_tiny
import pytest
import torch
from amounts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from isas import EVERY_ISA
from rank_parts import Got, Job, drive, mailbox_ranks, make_plan
from test_equality import MAX_LEN, jobs_strategy, settings_strategy

from engine.build import build_rank
from models.tiny import CHECKPOINT
from native import Choice, Isa, choose

pytestmark = pytest.mark.deterministic
torch.set_num_threads(1)

Bits = list[tuple[int, object]]


@pytest.fixture(autouse=True)
def _given_back() -> Iterator[None]:
    yield
    choose(Choice())


@pytest.fixture(scope="session")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_tiny.make_qwen3_moe(tmp_path_factory.mktemp("qwen3_moe")).path


def plan_of(dtype: str, isa: Isa = Isa.AMX, **choices: object) -> dict[str, object]:
    """Of a rank with fixed orders; `resolve` sets the first two."""
    fixed = {"deterministic": True, "mla_prefill": "absorbed", "max_model_len": MAX_LEN}
    return {**fixed, "dtype": dtype, "native_kernels": isa.name.lower(), **choices}


def bits(got: Got) -> Bits:
    """Tokens and their log-probabilities; equal texts have equal numbers."""
    logprobs = [repr(one) for output in got.outputs for one in output.logprobs or ()]
    return list(zip(got.tokens, logprobs, strict=True))


def told(jobs: Sequence[Job]) -> list[Job]:
    return [Job(job.prompt, job.max_tokens, job.arrive, job.abort, {**job.params, "logprobs": 2}) for job in jobs]


def alone(path: Path, jobs: Sequence[Job], plan: dict[str, object]) -> list[Bits]:
    """Each job by itself, its prompt whole, nothing kept between them, no graphs."""
    simple = {**plan, "enable_prefix_caching": False, "cudagraph_mode": "none"}
    rank = build_rank(make_plan(path, **simple))
    try:
        return [bits(drive([rank], [Job(job.prompt, job.max_tokens, params=job.params)])[0]) for job in jobs]
    finally:
        rank.close()


def check(path: Path, jobs: Sequence[Job], plan: dict[str, object], choices: dict[str, object], size: int) -> None:
    jobs = told(jobs)
    wanted = alone(path, jobs, plan)
    ranks = mailbox_ranks(path, size, **plan, **choices)
    try:
        for job, own, expected in zip(jobs, drive(ranks, jobs), wanted, strict=True):
            if own.finish_reason == "length":
                assert bits(own) == expected
            else:
                assert job.abort is not None
                assert bits(own) == expected[: len(own.tokens)]
    finally:
        for rank in ranks:
            rank.close()


CHOICES = settings_strategy().map(lambda drawn: {k: v for k, v in drawn.items() if k != "max_model_len"})
SIZES = st.sampled_from([1, 2, 4])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@settings(max_examples=examples(12), deadline=None)
@given(jobs=jobs_strategy(), choices=CHOICES, size=SIZES)
def test_grouped_heads(grouped: Path, dtype: str, jobs: list[Job], choices: dict[str, object], size: int) -> None:
    check(grouped, jobs, plan_of(dtype), choices, size)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@settings(max_examples=examples(6), deadline=None)
@given(jobs=jobs_strategy(), choices=CHOICES, size=SIZES)
def test_latents(dtype: str, jobs: list[Job], choices: dict[str, object], size: int) -> None:
    check(CHECKPOINT, jobs, plan_of(dtype), choices, size)


LONG = [Job([5 + (7 * i + j) % 80 for j in range(length)], 6) for i, length in enumerate([3, 30, 17, 1, 33, 8, 26, 12])]
COMPANY = {"max_num_seqs": 6, "max_num_batched_tokens": 23, "block_size": 4, "num_kv_blocks": 64}


@pytest.mark.parametrize("isa", EVERY_ISA)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("form", ["plain", "int8", "fp8"])
def test_every_instruction_set(grouped: Path, isa: Isa, dtype: str, form: str) -> None:
    plan = plan_of(dtype, isa, expert_format=form, linear_format=form)
    check(grouped, LONG, plan, COMPANY, 2)


FAMILIES = [
    hf_tiny.make_qwen3, hf_tiny.make_qwen2, hf_tiny.make_llama, hf_tiny.make_mixtral, hf_tiny.make_qwen2_moe,
    hf_tiny.make_minimax_m2, hf_tiny.make_glm4_moe, hf_tiny.make_dots1, hf_tiny.make_ernie, hf_tiny.make_deepseek_moe,
    hf_tiny.make_gpt_oss, hf_tiny.make_qwen3_next, hf_tiny.make_kimi_linear, deepseek_tiny.make_v32, deepseek_tiny.make_glm5,
]  # fmt: skip


@pytest.mark.parametrize("make", FAMILIES, ids=lambda make: make.__name__.removeprefix("make_"))
def test_every_family(tmp_path: Path, make: Callable[[Path], hf_tiny.HfModel]) -> None:
    check(make(tmp_path).path, LONG, plan_of("bfloat16", threads_per_rank=2), COMPANY, 1)
