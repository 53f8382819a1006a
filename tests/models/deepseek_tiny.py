"""Tiny DeepSeek checkpoints written by transformers, for the tests of models/deepseek."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_tiny import HfModel, make_hf

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
