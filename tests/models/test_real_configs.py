"""The config.json of real models, whose numbers transformers has as the defaults of their classes: accepted, and priced
as they should be."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from models.registry import parse_config, read_config

DOTS = {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1}
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
    "scale_fmt": "ue8m0",
}
KIMI = {"num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384, "n_group": 1, "topk_group": 1, "vocab_size": 163840,
        "routed_scaling_factor": 2.827, "first_k_dense_replace": 1, "quantization_config": FP8}  # fmt: skip
GLM5 = {"index_topk_freq": 4, "quantization_config": FP8}
# Class of the config, architecture, fields that are not defaults, billions of parameters in routed experts.
MODELS: dict[str, tuple[str, str, dict[str, Any], float]] = {
    "DeepSeek-V3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", {}, 653.9),
    "Kimi-K2": ("DeepseekV3Config", "KimiK2ForCausalLM", KIMI, 1014.7),
    "DeepSeek-V3.2": ("DeepseekV32Config", "DeepseekV32ForCausalLM", {}, 653.9),
    "GLM-5-FP8": ("GlmMoeDsaConfig", "GlmMoeDsaForCausalLM", GLM5, 724.8),  # in bfloat16 it is too large for 16 H200
    "GLM-4.5-Air": ("Glm4MoeConfig", "Glm4MoeForCausalLM", {"head_dim": 128}, 99.7),
    "GLM-4.7-Flash": ("Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM", {}, 27.8),
    "MiniMax-M2": ("MiniMaxM2Config", "MiniMaxM2ForCausalLM", {}, 224.7),
    "dots1": ("Dots1Config", "Dots1ForCausalLM", DOTS, 152.0),
    "Mixtral-8x7B": ("MixtralConfig", "MixtralForCausalLM", {}, 45.1),
    "Qwen1.5-MoE-A2.7B": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", {}, 12.5),
    "Qwen3-Next-80B-A3B": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {}, 77.3),
    "Qwen3.5-35B-A3B": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", {}, 32.2),
    "Qwen3.5-9B": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {}, 0.0),
    "Kimi-Linear-48B-A3B": ("KimiLinearConfig", "KimiLinearForCausalLM", {}, 47.1),
    "gpt-oss-120b": ("GptOssConfig", "GptOssForCausalLM", {}, 114.7),
    "gpt-oss-20b": ("GptOssConfig", "GptOssForCausalLM", {"num_hidden_layers": 24, "num_local_experts": 32}, 19.1),
    "ERNIE-4.5-21B": ("Ernie4_5_MoeConfig", "Ernie4_5_MoeForCausalLM", {}, 20.4),
}


def config_of(name: str) -> dict[str, Any]:
    class_name, architecture, changes, _ = MODELS[name]
    config = getattr(transformers, class_name)(**changes).to_dict()
    return {**config, "architectures": [architecture]}


@pytest.mark.parametrize("name", MODELS)
def test_they_are_accepted(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of(name), default=str))
    facts: Any = read_config(tmp_path)
    experts = 3 * facts.hidden_size * facts.moe_intermediate_size * facts.num_experts * facts.num_moe_layers
    assert experts / 1e9 == pytest.approx(MODELS[name][3], abs=0.06)


def test_the_text_part_of_a_model_with_vision() -> None:
    text = {**config_of("Kimi-K2"), "model_type": "kimi_k2"}
    wrapper = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": text, "vision_config": {}}
    facts = parse_config(wrapper, "c")
    assert facts.num_experts == 384
    names = facts.key_names
    assert names("language_model.model.layers.3.mlp.gate.weight") == "model.layers.3.mlp.gate.weight"
    assert names("language_model.lm_head.weight") == "lm_head.weight"
    assert names("vision_tower.blocks.0.weight") is None


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_explain_prices_them(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of(name), default=str))
    command = [sys.executable, "-m", "moesaic", "explain", str(tmp_path), "--world", "16", "--device", "cuda"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert "experts (" in result.stdout or not MODELS[name][3]
