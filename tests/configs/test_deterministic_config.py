"""What `--deterministic` decides, and what it cannot be had with."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs
from test_resolve import MACHINE, MODEL

from configs.engine import EngineConfig
from configs.resolve import resolve

pytestmark = pytest.mark.deterministic
NATIVE = structs.replace(MACHINE, native_kernels="avx512")


def test_prompts_and_rows_take_the_ways_of_decodes() -> None:
    plan = resolve(EngineConfig(deterministic=True, data_parallel_size=2), MODEL, NATIVE)
    assert (plan.deterministic, plan.mla_prefill, plan.reasons["deterministic"] != "") == (True, "absorbed", True)
    assert not resolve(EngineConfig(), MODEL, NATIVE).deterministic


@pytest.mark.parametrize(
    ("choices", "machine", "named"),
    [
        ({}, {"device": "cuda"}, "deterministic works on a CPU"),
        ({}, {"native_kernels": "none"}, "deterministic needs the native kernels"),
        ({"kv_cache_dtype": "fp8"}, {}, "kv_cache_dtype 'fp8'"),
        ({"mla_prefill": "naive"}, {}, "mla_prefill 'naive'"),
    ],
)
def test_refused(choices: dict[str, Any], machine: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        resolve(EngineConfig(deterministic=True, **choices), MODEL, structs.replace(NATIVE, **machine))
