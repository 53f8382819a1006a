"""Tiny DeepSeek checkpoints written by transformers, for the tests of models/deepseek."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from hf_tiny import HfModel, make_hf, rewrite

ATTENTION: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 12,
}
EXPERTS: dict[str, Any] = {
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
V2_YARN = {**YARN, "mscale": 0.707, "mscale_all_dim": 0.8}  # unequal, so that cos and sin are scaled as well


def make_v2(path: Path, **overrides: Any) -> HfModel:
    config = {**ATTENTION, **EXPERTS, "n_shared_experts": 2, **overrides}
    return make_hf(path, "DeepseekV2Config", "DeepseekV2ForCausalLM", **config)


def make_v3(path: Path, **overrides: Any) -> HfModel:
    config = {**ATTENTION, **EXPERTS, "n_shared_experts": 1, "num_mtp_layers": 0, **overrides}
    return make_hf(path, "DeepseekV3Config", "DeepseekV3ForCausalLM", **config)


def make_glm4_moe_lite(path: Path, **overrides: Any) -> HfModel:
    sizes = {name: value for name, value in EXPERTS.items() if name != "first_k_dense_replace"}
    return make_hf(
        path,
        "Glm4MoeLiteConfig",
        "Glm4MoeLiteForCausalLM",
        **{**ATTENTION, **sizes, "n_shared_experts": 1, **overrides},
    )


# 16 index heads or more: with few, relu makes scores of zero, and the last of the chosen are among equals.
INDEX: dict[str, Any] = {"index_topk": 8, "index_n_heads": 16, "index_head_dim": 10}


def make_v32(path: Path, **overrides: Any) -> HfModel:
    config = {**ATTENTION, **EXPERTS, **INDEX, "n_shared_experts": 1, **overrides}
    return make_hf(path, "DeepseekV32Config", "DeepseekV32ForCausalLM", **config)


def make_glm5(path: Path, **overrides: Any) -> HfModel:
    """Of three layers the second uses what the first has chosen."""
    config = {**ATTENTION, **EXPERTS, **INDEX, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, **overrides}
    kinds = {"indexer_types": ["full", "shared", "full"]} if "indexer_types" not in config else {}
    return make_hf(path, "GlmMoeDsaConfig", "GlmMoeDsaForCausalLM", **kinds, **config)


def make_kimi_k2(path: Path, **overrides: Any) -> HfModel:
    """Kimi-K2 is DeepSeek-V3 by another name, without groups."""
    hf = make_v3(path, n_group=1, topk_group=1, routed_scaling_factor=2.827, **overrides)
    rewrite(path, lambda tensors: tensors, architectures=["KimiK2ForCausalLM"], model_type="kimi_k2")
    return hf


def make_kimi_k25(path: Path, **overrides: Any) -> HfModel:
    """The same inside a model with vision."""
    hf = make_kimi_k2(path, **overrides)
    text = json.loads((path / "config.json").read_text())
    vision = {"vision_tower.patch_embed.proj.weight": torch.zeros(3, 4), "mm_projector.proj.0.weight": torch.zeros(2)}
    rewrite(path, lambda tensors: {**{f"language_model.{key}": value for key, value in tensors.items()}, **vision})
    wrapper = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": text}
    (path / "config.json").write_text(json.dumps(wrapper))
    return hf
