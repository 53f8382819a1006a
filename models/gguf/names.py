"""What GGUF calls a weight, and what Hugging Face does."""

from __future__ import annotations

import re
from collections.abc import Mapping

from layers.gguf.header import GgufTensor
from models.fields import ConfigError

Place = tuple[str, int | None, int]  # name in the file, part along the first dimension, heads whose rows lie in pairs

_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_BIAS = "exp_probs_b.bias"
_SPLIT = ("attn_k_b", "attn_v_b")  # newer files of DeepSeek have these in the place of attn_kv_b
SKIPPED = ("rope_freqs.weight",)  # models/gguf/config.py reads it
_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")


def places(tensors: Mapping[str, GgufTensor], paired: Mapping[str, int], source: str) -> dict[str, Place]:
    """Every weight by its name of Hugging Face. paired: heads of the projections whose rows lie in pairs, by GGUF's
    name. Raises ConfigError for a tensor that no family here has."""
    found: dict[str, Place] = {}
    for name, tensor in tensors.items():
        if name in SKIPPED:
            continue
        if name in _OUTSIDE:
            found[_OUTSIDE[name]] = (name, None, 0)
            continue
        matched = _LAYER.fullmatch(name)
        layer, part, kind = matched.groups() if matched else ("", name, "")
        prefix = f"model.layers.{layer}."
        if part in _IN_LAYER:
            found[f"{prefix}{_IN_LAYER[part]}.{kind}"] = (name, None, paired.get(part, 0))
        elif part in _EXPERTS and kind == "weight":
            for expert in range(tensor.shape[0]):
                found[f"{prefix}mlp.experts.{expert}.{_EXPERTS[part]}.weight"] = (name, expert, 0)
        elif f"{part}.{kind}" == _BIAS:
            found[f"{prefix}mlp.gate.e_score_correction_bias"] = (name, None, 0)
        elif part in _SPLIT:
            raise ConfigError(f"{source}: {name}: latent attention is read of files that have attn_kv_b")
        else:
            raise ConfigError(f"{source}: {name}: no tensor of this name is known")
    return found
