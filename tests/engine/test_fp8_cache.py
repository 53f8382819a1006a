"""An engine whose latents are kept in FP8 (`kv_cache_dtype`), on the CPU; and backends that cannot run there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from deepseek_tiny import make_v3
from hf_tiny import make_qwen3_moe
from rank_parts import Job, drive, make_plan

from engine.build import build_rank

JOBS = [Job([1, 2, 3, 4, 5], 12), Job([7, 8, 9], 12, arrive=3)]


def test_it_generates_over_rows_of_bytes(tmp_path: Path) -> None:
    make_v3(tmp_path, kv_lora_rank=64)
    got = {}
    for cache in ("auto", "fp8"):
        rank = build_rank(make_plan(tmp_path, dtype="bfloat16", kv_cache_dtype=cache))
        got[cache] = drive([rank], JOBS)
        (rows,) = rank._runner._kv.layers[0]
        assert rows.dtype is (torch.uint8 if cache == "fp8" else torch.bfloat16)
    assert [len(row.tokens) for row in got["fp8"]] == [12, 12]
    assert [row.tokens[0] for row in got["fp8"]] == [row.tokens[0] for row in got["auto"]]


def test_what_cannot_run_here_says_why(tmp_path: Path) -> None:
    make_qwen3_moe(tmp_path)
    with pytest.raises(ValueError, match="kv_cache_dtype fp8: Qwen3MoeForCausalLM has no latent cache"):
        build_rank(make_plan(tmp_path, kv_cache_dtype="fp8"))
    with pytest.raises(ValueError, match="experts backend 'deepgemm': needs an NVIDIA GPU"):
        build_rank(make_plan(tmp_path, moe_backend="deepgemm"))
    make_v3(tmp_path / "v3")
    with pytest.raises(ValueError, match="mla backend 'flashmla': needs an NVIDIA GPU"):
        build_rank(make_plan(tmp_path / "v3", attention_backend="flashmla"))
