"""A whole engine through the Triton forms of every room, in the interpreter: schedules, cache, sampling."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deepseek_tiny import make_v3
from hf_tiny import make_qwen3_moe
from rank_parts import Job, drive, make_plan
from triton_support import as_on_gpu

from engine.build import build_rank

pytestmark = pytest.mark.triton

JOBS = [
    Job([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], 4),
    Job([7, 8, 9], 4, arrive=2),
    Job([7, 8, 9, 1], 3, arrive=1, params={"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01}),
]


@pytest.mark.parametrize("make", [make_v3, pytest.param(make_qwen3_moe, marks=pytest.mark.slow)])  # test_claimed_gpu.py
def test_tokens_are_those_of_torch(tmp_path: Path, make: Callable[..., Any]) -> None:
    make(tmp_path, num_hidden_layers=2)
    plan = make_plan(tmp_path, max_num_batched_tokens=10)  # the first prompt comes in two parts
    expected = [got.tokens for got in drive([build_rank(plan)], JOBS)]
    with as_on_gpu():
        ours = [got.tokens for got in drive([build_rank(plan)], JOBS)]
    assert ours == expected and [len(tokens) for tokens in ours] == [4, 4, 3]
