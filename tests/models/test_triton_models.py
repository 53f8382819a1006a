"""Whole models through the Triton forms of every room, in the interpreter, beside torch on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepseek_tiny import make_glm5, make_v3
from hf_tiny import VOCAB, chunked_logits, load_ours, make_fp8, make_qwen3_moe, relative_error, rewrite
from torch import Tensor
from triton_support import as_on_gpu

from cache.spec import bytes_per_token
from ep.moe import MoE
from models.deepseek.model import DeepseekForCausalLM
from moe_kernels.fp8_experts import Fp8Experts
from native import Isa, isa, limit_isa

pytestmark = pytest.mark.triton

TOKENS = [(5 * i) % VOCAB for i in range(14)]
CHUNKS = [11, 2, 1]  # a prompt, a prompt of few queries over a context, a decode


def in_torch(path: Path, dtype: torch.dtype, **choices: Any) -> Tensor:
    before = isa()
    limit_isa(Isa.NONE)
    try:
        return chunked_logits(load_ours(path, dtype=dtype, **choices), TOKENS, CHUNKS)
    finally:
        limit_isa(before)


def in_triton(path: Path, dtype: torch.dtype, **choices: Any) -> Tensor:
    with as_on_gpu():
        return chunked_logits(load_ours(path, dtype=dtype, **choices), TOKENS, CHUNKS)


def as_bfloat16(path: Path) -> None:
    """So that both dtypes have the same weights."""
    rewrite(path, lambda tensors: {key: tensor.bfloat16() for key, tensor in tensors.items()})


def mean_error(logits_TV: Tensor, exact_TV: Tensor) -> float:
    return float((logits_TV - exact_TV).abs().mean())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "deepseek"])
def test_bfloat16_errs_no_more_than_torch_does(tmp_path: Path, family: str) -> None:
    """The mean error of the logits, against float32 with the same weights. Every token goes to every expert: a choice that flips
    on a rounding would say nothing about the kernels."""
    if family == "qwen3":
        make_qwen3_moe(tmp_path, num_hidden_layers=2, num_experts_per_tok=8)
    else:
        make_v3(tmp_path, num_hidden_layers=2, num_experts_per_tok=16, n_group=1, topk_group=1)
    as_bfloat16(tmp_path)
    exact = in_torch(tmp_path, torch.float32)
    theirs = mean_error(in_torch(tmp_path, torch.bfloat16), exact)
    assert mean_error(in_triton(tmp_path, torch.bfloat16), exact) < 1.2 * theirs


FP8_SIZES = {"hidden_size": 128, "moe_intermediate_size": 128, "kv_lora_rank": 128, "num_hidden_layers": 2}


@pytest.mark.parametrize("fp8_cache", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_deepseek_v3_in_fp8(tmp_path: Path, fp8_cache: bool) -> None:
    """Experts in 128 x 128 blocks as the checkpoint has them, rows in FP8, and perhaps latents in FP8 in the cache: against float32 with
    the same weights, and no further from it than FP8 rounds."""
    make_fp8(make_v3(tmp_path, **FP8_SIZES, num_experts_per_tok=16, n_group=1, topk_group=1))
    exact = in_torch(tmp_path, torch.float32)
    ours = in_triton(tmp_path, torch.bfloat16, fp8_cache=fp8_cache)
    theirs = in_torch(tmp_path, torch.bfloat16, fp8_cache=fp8_cache)
    assert relative_error(ours, exact) < 0.1
    # Torch's rows stay in 16 bits, so its error is the smaller one; beyond rounding there is none.
    assert mean_error(ours, exact) < 4 * mean_error(theirs, exact)


def test_the_fp8_model_takes_the_fp8_kernels(tmp_path: Path) -> None:
    make_fp8(make_v3(tmp_path, **FP8_SIZES))
    with as_on_gpu():
        model = load_ours(tmp_path, dtype=torch.bfloat16, fp8_cache=True)
    assert isinstance(model, DeepseekForCausalLM)
    moe = model.decoders[1].mlp
    assert isinstance(moe, MoE) and isinstance(moe.experts.weights, Fp8Experts)
    assert moe.experts.weights.storage(0)[0].dtype is torch.float8_e4m3fn
    assert bytes_per_token(model.cache_spec()) == 2 * (128 + 4 + 2 * 6)


def test_qwen3_moe(tmp_path: Path) -> None:
    make_qwen3_moe(tmp_path, num_hidden_layers=2)
    assert relative_error(in_triton(tmp_path, torch.float32), in_torch(tmp_path, torch.float32)) < 1e-4


@pytest.mark.parametrize(
    "prefill", ["absorbed", *(pytest.param(way, marks=pytest.mark.slow) for way in ("naive", "auto"))]
)
def test_deepseek_v3(tmp_path: Path, prefill: str) -> None:
    make_v3(tmp_path, num_hidden_layers=2)
    ours = in_triton(tmp_path, torch.float32, mla_prefill=prefill)
    assert relative_error(ours, in_torch(tmp_path, torch.float32)) < 1e-4


@pytest.mark.slow
def test_sparse_attention_of_glm5(tmp_path: Path) -> None:
    """More tokens than are chosen, and a layer that shares a choice."""
    make_glm5(tmp_path, index_topk=6)
    assert relative_error(in_triton(tmp_path, torch.float32), in_torch(tmp_path, torch.float32)) < 1e-4
