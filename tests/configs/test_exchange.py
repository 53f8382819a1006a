"""How tokens travel to their experts: the backends that ranks without GPUs can have, in pairs too, and the form of rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from test_resolve import MACHINE, MODEL

from configs.engine import EngineConfig
from configs.exchange import with_dispatch
from configs.resolve import resolve


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
    plan = with_dispatch(dataclasses.replace(resolve(asked, MODEL, MACHINE), dispatch_rows="plain", **change), asked)
    assert plan.dispatch_rows == rows and plan.reasons["dispatch_rows"]
