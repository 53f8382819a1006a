"""Whole models with experts by DeepGEMM and FlashInfer and attention by FlashInfer and FlashMLA (fakes of them), beside float32 in
torch with the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from deepseek_tiny import make_v3
from hf_tiny import (
    CPU,
    VOCAB,
    chunked_logits,
    load_ours,
    make_fp8,
    make_qwen3_moe,
    relative_error,
    rewrite,
    single_rank,
)
from torch import Tensor
from use_fakes import use_fakes

from ep.moe import MoE
from layers.weights import Checkpoint
from mla.backend import make_backend
from mla.flashinfer import FlashInferMla
from mla.flashmla import FlashMla
from mla.protocol import MlaShape
from models.base import CausalLM
from models.deepseek.model import DeepseekForCausalLM
from models.registry import build, read_config
from moe_kernels import WeightFormat
from moe_kernels.deepgemm import DeepGemm
from moe_kernels.expert_storage import ExpertWeights
from moe_kernels.flashinfer import FlashInferExperts
from moe_kernels.fp8_experts import Fp8Experts
from moe_kernels.weights import PlainExperts

pytestmark = pytest.mark.fakes

BF16 = torch.bfloat16
TOKENS, CHUNKS = [(7 * i) % VOCAB for i in range(70)], [66, 3, 1]
Make = Callable[[int, int, int], ExpertWeights]  # slots, hidden size, width


@pytest.fixture(autouse=True)
def fakes() -> Iterator[None]:
    with use_fakes():
        yield


def deepgemm(form: WeightFormat, psum: bool) -> Make:
    library = DeepGemm((9, 0), psum)
    if form is WeightFormat.FP8:
        return lambda *sizes: Fp8Experts(*sizes, BF16, CPU, library.run_experts_fp8)
    return lambda *sizes: PlainExperts(*sizes, BF16, CPU, library.run_experts)


def makers(form: WeightFormat) -> dict[str, Make]:
    return {
        "deepgemm": deepgemm(form, False),
        "deepgemm psum": deepgemm(form, True),
        "flashinfer": lambda *sizes: FlashInferExperts(*sizes, BF16, CPU, form),
    }


def logits(path: Path, make: Make | None, attend: str = "torch") -> Tensor:
    model: CausalLM = build(read_config(path), single_rank(path), BF16, CPU)
    for module in model.modules() if isinstance(model, torch.nn.Module) else ():
        if isinstance(module, MoE) and make is not None:
            module.experts.weights = make(module.experts.num_slots, module.experts.hidden_size, module.experts.width)
    if attend != "torch":
        assert isinstance(model, DeepseekForCausalLM)
        shape, scale = MlaShape(*model.config.mla_dims), model.config.attention_scale
        flash = FlashInferMla(shape, scale, BF16, CPU) if attend == "flashinfer" else None
        model.mla = flash or FlashMla(shape, scale, make_backend(shape, scale, "auto", BF16, CPU))
    checkpoint = Checkpoint(path)
    with torch.inference_mode():
        model.load(checkpoint)
    checkpoint.finish()
    return chunked_logits(model, TOKENS, CHUNKS, num_blocks=8, block_size=64)


def exact(path: Path) -> Tensor:
    return chunked_logits(load_ours(path), TOKENS, CHUNKS, num_blocks=8, block_size=64)


@pytest.mark.parametrize("name", ["deepgemm", "deepgemm psum", "flashinfer"])
def test_qwen3_moe(tmp_path: Path, name: str) -> None:
    """Every token goes to every expert: a choice that flips on a rounding would say nothing."""
    make_qwen3_moe(
        tmp_path, num_hidden_layers=2, num_experts_per_tok=8, hidden_size=128, head_dim=32, moe_intermediate_size=128
    )
    rewrite(tmp_path, lambda tensors: {key: tensor.bfloat16() for key, tensor in tensors.items()})
    assert relative_error(logits(tmp_path, makers(WeightFormat.PLAIN)[name]), exact(tmp_path)) < 0.03


@pytest.mark.parametrize(
    ("experts", "attend"),
    [("deepgemm", "flashinfer"), ("deepgemm psum", "flashmla"), ("flashinfer", "torch"), (None, "flashinfer")],
)
def test_deepseek_v3_in_fp8(tmp_path: Path, experts: str | None, attend: str) -> None:
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    make_fp8(make_v3(tmp_path, **sizes, num_hidden_layers=2, num_experts_per_tok=16, n_group=1, topk_group=1))
    ours = logits(tmp_path, makers(WeightFormat.FP8)[experts] if experts else None, attend)
    assert relative_error(ours, exact(tmp_path)) < 0.06
