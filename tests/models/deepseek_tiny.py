"""Tiny DeepSeek checkpoints written by transformers, for the tests of models/deepseek."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from hf_tiny import HfModel, make_hf
from safetensors.torch import load_file, save_file
from torch import Tensor

from layers.weights import BLOCK

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


def quantize_checkpoint(hf: HfModel, path: Path) -> HfModel:
    """Write the model with FP8 weights as DeepSeek does, and give it the weights that reading them back yields."""
    tensors = load_file(hf.path / "model.safetensors")
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or any(part in name for part in ("norm", "embed", "lm_head", "mlp.gate.")):
            stored[name] = tensor
            continue
        weight, scale = quantize_blocks(tensor)
        stored[name], stored[f"{name}_scale_inv"] = weight, scale
        tensors[name] = dequantized(weight, scale)
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((hf.path / "config.json").read_text())
    config["quantization_config"] = {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK],
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    reference_path = path / "dequantized"
    reference_path.mkdir()
    save_file(tensors, reference_path / "model.safetensors", metadata={"format": "pt"})
    (reference_path / "config.json").write_text((hf.path / "config.json").read_text())
    model = type(hf.model).from_pretrained(
        reference_path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    return HfModel(model.eval(), path)


def quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Each block of 128 x 128 is divided by its largest magnitude / 448, the largest e4m3 number."""
    rows, columns = -(-weight.shape[0] // BLOCK), -(-weight.shape[1] // BLOCK)
    scale = torch.empty(rows, columns)
    quantized = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for r in range(rows):
        for c in range(columns):
            block = (slice(r * BLOCK, (r + 1) * BLOCK), slice(c * BLOCK, (c + 1) * BLOCK))
            scale[r, c] = weight[block].abs().max() / 448
            quantized[block] = (weight[block] / scale[r, c]).to(torch.float8_e4m3fn)
    return quantized, scale


def dequantized(weight: Tensor, scale: Tensor) -> Tensor:
    spread = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return weight.float() * spread[: weight.shape[0], : weight.shape[1]]
