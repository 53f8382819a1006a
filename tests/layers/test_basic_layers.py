"""Norms, rope, linears and the gated MLP: the roundings of transformers, and the plain formulas.

Legend: T tokens, D hidden size, R rope planes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding

from layers import reference
from layers.embed import Embedding
from layers.linear import Linear, MergedLinear, logits
from layers.mlp import GatedMLP
from layers.norm import RMSNorm
from layers.rope import Rope, apply_rope, inverse_frequencies
from layers.rope_parameters import RopeParameters

CPU = torch.device("cpu")


@pytest.mark.usefixtures("in_torch")  # the native kernel's sums are in another order (tests/native/test_rows.py)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_bitwise_that_of_transformers(dtype: torch.dtype) -> None:
    theirs = Qwen3RMSNorm(48, eps=1e-5).to(dtype)
    theirs.weight.data.copy_(torch.randn(48))
    ours = RMSNorm(48, 1e-5, dtype, CPU)
    ours.weight.copy_(theirs.weight)
    x, residual = torch.randn(7, 48).to(dtype), torch.randn(7, 48).to(dtype)
    with torch.inference_mode():
        assert torch.equal(ours(x), theirs(x))
        total = x + residual
        assert torch.equal(ours.add(x, residual), theirs(total))
        assert torch.equal(residual, total)
        assert ours(x[:0]).shape == (0, 48)


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 64}
ROPES: dict[str, tuple[dict[str, Any], RopeParameters]] = {
    "default": ({"rope_type": "default", "rope_theta": 1e6}, RopeParameters(32, 1e6)),
    "linear": (
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5},
        RopeParameters(32, 1e4, "linear", 2.5),
    ),
    "llama3": (
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        RopeParameters(32, 5e5, "llama3", 8.0, 64, low_freq_factor=1.0, high_freq_factor=4.0),
    ),
    "yarn": (YARN, RopeParameters(32, 1e4, "yarn", 40.0, 64)),
    "yarn-mscale": (
        {**YARN, "mscale": 1.0, "mscale_all_dim": 0.707, "beta_fast": 20.0, "beta_slow": 2.0},
        RopeParameters(32, 1e4, "yarn", 40.0, 64, beta_fast=20.0, beta_slow=2.0, mscale=1.0, mscale_all_dim=0.707),
    ),
    "yarn-equal-mscale": (
        {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        RopeParameters(32, 1e4, "yarn", 40.0, 64, mscale=1.0, mscale_all_dim=1.0),
    ),
    "yarn-attention-factor": (
        {**YARN, "attention_factor": 1.25, "truncate": False},
        RopeParameters(32, 1e4, "yarn", 40.0, 64, attention_factor=1.25, truncate=False),
    ),
}


@pytest.mark.parametrize("name", list(ROPES))
def test_cos_and_sin_equal_those_of_transformers(name: str) -> None:
    raw, parameters = ROPES[name]
    config = Qwen3Config(hidden_size=64, num_attention_heads=2, head_dim=32, rope_parameters=raw)
    positions = torch.tensor([0, 1, 17, 300, 2559])
    cos, sin = Qwen3RotaryEmbedding(config)(torch.zeros(1), positions[None])
    ours_cos, ours_sin = Rope(parameters, torch.float32, CPU)(positions)
    torch.testing.assert_close(ours_cos[:, 0], cos[0], atol=1e-6, rtol=0)
    torch.testing.assert_close(ours_sin[:, 0, 16:], sin[0, :, 16:], atol=1e-6, rtol=0)
    assert torch.equal(ours_sin[..., :16], -ours_sin[..., 16:])  # its sign is that of the term it multiplies


def test_rotation_is_a_complex_product() -> None:
    parameters = RopeParameters(8, 1e4)
    positions = torch.arange(5)
    cos, sin = Rope(parameters, torch.float32, CPU)(positions)
    wide = torch.randn(5, 6, 8)
    x = wide[:, 1:4]
    before = wide.clone()
    expected = reference.apply_rope(x, positions[:, None] * inverse_frequencies(parameters))
    torch.testing.assert_close(apply_rope(x, cos, sin), expected)
    assert torch.equal(wide, before)
    assert apply_rope(x[:0], cos[:0], sin[:0]).shape == (0, 3, 8)


def test_merged_linear_is_its_parts_side_by_side() -> None:
    merged = MergedLinear(6, {"q": 4, "k": 2}, True, torch.float32, CPU)
    parts = {name: Linear(6, size, True, torch.float32, CPU) for name, size in merged.parts.items()}
    for name, linear in parts.items():
        assert linear.bias is not None
        for tensor in (linear.weight, linear.bias):
            tensor.copy_(torch.randn(tensor.shape))
        merged.weight_of(name).copy_(linear.weight)
        merged.bias_of(name).copy_(linear.bias)
    x = torch.randn(3, 6)
    torch.testing.assert_close(merged(x), torch.cat([linear(x) for linear in parts.values()], -1))


def test_gated_mlp_and_head() -> None:
    mlp = GatedMLP(6, 10, torch.float32, CPU)
    for tensor in mlp.parameters():
        tensor.copy_(torch.randn(tensor.shape))
    x = torch.randn(3, 6)
    gate, up = x @ mlp.gate_up.weight_of("gate_proj").T, x @ mlp.gate_up.weight_of("up_proj").T
    torch.testing.assert_close(mlp(x), (torch.nn.functional.silu(gate) * up) @ mlp.down.weight.T)
    assert mlp(x[:0]).shape == (0, 6)
    embed = Embedding(9, 6, torch.bfloat16, CPU)
    embed.weight.copy_(torch.randn(9, 6))
    hidden = embed(torch.tensor([4, 4, 8]))
    assert hidden.dtype == torch.bfloat16 and torch.equal(hidden[0], embed.weight[4])
    assert torch.equal(logits(hidden, embed.weight), hidden @ embed.weight.T)
