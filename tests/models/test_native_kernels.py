"""Whole models with the native kernels, on every instruction set here, beside torch alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from deepseek_tiny import make_v3
from hf_tiny import VOCAB, chunked_logits, load_ours, make_qwen3_moe, relative_error, rewrite
from isas import ISAS
from torch import Tensor

from native import Isa, isa, limit_isa

TOKENS = [(5 * i) % VOCAB for i in range(60)]

pytestmark = pytest.mark.skipif(not ISAS, reason="the native kernels are not there")


@pytest.fixture(autouse=True)
def same_isa_afterwards() -> Iterator[None]:
    before = isa()
    yield
    limit_isa(before)


def logits(path: Path, level: Isa, dtype: torch.dtype) -> Tensor:
    limit_isa(level)
    return chunked_logits(load_ours(path, dtype=dtype), TOKENS, [57, 2, 1]).float()


@pytest.fixture(params=["qwen3", "deepseek"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Every token goes to every expert: a choice that flips on a rounding would say nothing about the kernels. The weights are
    bfloat16 numbers, so that both dtypes have the same."""
    if request.param == "qwen3":
        make_qwen3_moe(tmp_path, num_experts_per_tok=8, hidden_size=96, moe_intermediate_size=40)
    else:
        make_v3(tmp_path, num_experts_per_tok=16, n_group=1, topk_group=1)
    rewrite(tmp_path, lambda tensors: {key: tensor.bfloat16() for key, tensor in tensors.items()})
    return tmp_path


def test_float32_is_exact(checkpoint: Path) -> None:
    expected_TV = logits(checkpoint, Isa.NONE, torch.float32)
    for level in ISAS:
        ours_TV = logits(checkpoint, level, torch.float32)
        assert relative_error(ours_TV, expected_TV) < 2e-5
        assert torch.equal(ours_TV.argmax(1), expected_TV.argmax(1))


def test_bfloat16_errs_no_more_than_torch_does(checkpoint: Path) -> None:
    """The mean error of the logits, against float32 with the same weights."""
    exact_TV = logits(checkpoint, Isa.NONE, torch.float32)
    theirs = (logits(checkpoint, Isa.NONE, torch.bfloat16) - exact_TV).abs().mean()
    assert theirs > 0
    for level in ISAS:
        assert (logits(checkpoint, level, torch.bfloat16) - exact_TV).abs().mean() < 1.1 * theirs
