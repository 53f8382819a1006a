"""How tokens travel to their experts: the backends that ranks without GPUs can have, in pairs too, and the form of rows."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs
from test_resolve import MACHINE, MODEL

from cache.manager import PAGED
from cache.spec import CacheGroup, Field
from configs.cache import RESUMED_BYTES, with_resumed_steps
from configs.engine import EngineConfig
from configs.exchange import SHARED_HEAD_BYTES, with_dispatch, with_vocab_parallel
from configs.resolve import resolve
from configs.speculation import SpeculativeConfig


@pytest.mark.parametrize("asked", ["shm", "shm_padded", "gloo", "shm+shm_padded", "shm_padded+shm"])
def test_what_ranks_without_gpus_can_have(asked: str) -> None:
    plan = resolve(EngineConfig(data_parallel_size=2, all2all_backend=asked), MODEL, MACHINE)
    assert plan.all2all_backend == asked and plan.reasons["all2all_backend"] == "as asked"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("shm+pigeon", "'shm\\+pigeon' is unknown; one of auto, local, gloo, shm, shm_padded, or two as a\\+b"),
        ("shm+gloo", "join their ranks in different ways"),
        ("shm+shm+shm", "is unknown"),
        ("deepep_low_latency", "is unknown"),
        ("shm+local", "'local' serves one rank, but data_parallel_size is 2"),
    ],
)
def test_what_they_cannot(asked: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(EngineConfig(data_parallel_size=2, all2all_backend=asked), MODEL, MACHINE)


@pytest.mark.parametrize(
    ("config", "change", "rows"),
    [
        ({}, {}, "plain"),
        ({"dispatch_dtype": "fp8"}, {}, "fp8"),
        ({"dispatch_dtype": "bf16"}, {"device": "cuda", "expert_format": "fp8"}, "plain"),
        ({}, {"device": "cuda", "expert_format": "fp8"}, "fp8"),
        ({}, {"device": "cuda"}, "plain"),
        ({"dispatch_dtype": "fp8"}, {"all2all_backend": "local"}, "plain"),
    ],
)
def test_the_form_of_rows(config: dict[str, Any], change: dict[str, Any], rows: str) -> None:
    asked = EngineConfig(data_parallel_size=2, **config)
    plan = with_dispatch(structs.replace(resolve(asked, MODEL, MACHINE), dispatch_rows="plain", **change), asked)
    assert plan.dispatch_rows == rows and plan.reasons["dispatch_rows"]


LARGE = SHARED_HEAD_BYTES // 2  # weights of bfloat16


@pytest.mark.parametrize(
    ("asked", "weights", "change", "shared"),
    [
        ("auto", LARGE, {}, True),
        ("auto", LARGE - 1, {}, False),
        ("auto", LARGE, {"linear_format": "int8"}, False),
        ("auto", LARGE // 2, {"dtype": "float32"}, True),
        ("auto", LARGE, {"all2all_backend": "shm_padded+shm"}, True),
        ("auto", LARGE, {"all2all_backend": "local"}, True),
        ("auto", LARGE, {"all2all_backend": "gloo"}, False),
        ("auto", LARGE, {"num_experts": 0}, False),
        ("auto", LARGE, {"device": "cuda"}, False),
        ("auto", LARGE, {"speculation": SpeculativeConfig(method="mtp", num_speculative_tokens=1)}, False),
        ("auto", LARGE, {"speculation": SpeculativeConfig(method="ngram", num_speculative_tokens=1)}, True),
        ("on", 1, {"speculation": SpeculativeConfig(method="mtp", num_speculative_tokens=1)}, True),
        ("off", LARGE, {}, False),
    ],
)
def test_which_ranks_share_their_head(asked: str, weights: int, change: dict[str, Any], shared: bool) -> None:
    plan = structs.replace(resolve(EngineConfig(data_parallel_size=2, dtype="bfloat16"), MODEL, MACHINE), **change)
    plan = with_vocab_parallel(plan, asked, weights)
    assert plan.vocab_parallel is shared and plan.reasons["vocab_parallel"]


def test_a_head_that_cannot_be_shared_is_refused() -> None:
    plan = resolve(EngineConfig(data_parallel_size=2, all2all_backend="gloo"), MODEL, MACHINE)
    with pytest.raises(ValueError, match="vocab_parallel 'on': ranks that exchange by 'gloo' do not share"):
        with_vocab_parallel(plan, "on", LARGE)


@pytest.mark.parametrize(
    ("asked", "change", "resumes"),
    [
        ("auto", {"store_bytes": RESUMED_BYTES}, True),
        ("auto", {"store_bytes": RESUMED_BYTES - 1}, False),
        ("auto", {"store_bytes": 0, "rank_bytes": RESUMED_BYTES}, True),
        ("auto", {"store_bytes": RESUMED_BYTES, "device": "cuda"}, False),
        ("on", {"store_bytes": 1}, True),
        ("off", {"store_bytes": RESUMED_BYTES}, False),
    ],
)
def test_which_steps_are_resumed(asked: str, change: dict[str, Any], resumes: bool) -> None:
    plan = structs.replace(resolve(EngineConfig(data_parallel_size=2), MODEL, MACHINE), **change)
    plan = with_resumed_steps(plan, asked, PAGED)
    assert plan.resume_steps is resumes and plan.reasons["resume_steps"]


def test_steps_that_cannot_be_resumed() -> None:
    plan = structs.replace(resolve(EngineConfig(), MODEL, MACHINE), store_bytes=RESUMED_BYTES)
    states = (*PAGED, CacheGroup("state", (1,), (Field("state", (1,), "float32"),)))
    assert not with_resumed_steps(plan, "auto", states).resume_steps
    with pytest.raises(ValueError, match="resume_steps 'on': a step writes the states of linear attention as it goes"):
        with_resumed_steps(plan, "on", states)
    with pytest.raises(ValueError, match="resume_steps 'on': the cache of a rank with a GPU ends with the rank"):
        with_resumed_steps(structs.replace(plan, device="cuda"), "on", PAGED)
