"""From a GGUF file's metadata to the config.json of the same model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from layers.gguf.header import GgufHeader
from models.fields import ConfigError

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "deepseek2": "DeepseekV3ForCausalLM",
}
_SIGMOID = 2  # expert_gating_func
_TOKENS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}


class Metadata:
    """The fields of one architecture, with errors that name the file and the field."""

    def __init__(self, metadata: Mapping[str, object], source: str) -> None:
        self._all, self.source = metadata, source
        self.architecture = self.text("general.architecture")
        if self.architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise self.error("general.architecture", f"one of {known}")

    def error(self, name: str, expected: str) -> ConfigError:
        got = f"got {str(self._all[name])[:80]!r}" if name in self._all else "it is missing"
        return ConfigError(f"{self.source}: {name}: expected {expected}, {got}")

    def raw(self, name: str) -> object:
        return self._all.get(name)

    def text(self, name: str, default: str | None = None) -> str:
        value = self._all.get(name, default)
        if not isinstance(value, str):
            raise self.error(name, "a text")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Of the architecture."""
        value = self._all.get(f"{self.architecture}.{name}", default)
        if not isinstance(value, int | float):
            raise self.error(f"{self.architecture}.{name}", "a number")
        return value

    def has(self, name: str) -> bool:
        return f"{self.architecture}.{name}" in self._all

    def whole(self, name: str, default: int | None = None) -> int:
        return int(self.number(name, default))

    def texts(self, name: str) -> list[str]:
        value = self._all.get(name)
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise self.error(name, "an array of texts")
        return value

    def numbers(self, name: str) -> list[float]:
        value = self._all.get(name)
        if not isinstance(value, list) or not all(isinstance(number, int | float) for number in value):
            raise self.error(name, "an array of numbers")
        return value


def config_json(header: GgufHeader, meta: Metadata, rope_factors: list[float] | None) -> dict[str, Any]:
    """rope_factors: what `rope_freqs.weight` has, of Llama 3."""
    heads = meta.whole("attention.head_count")
    if meta.has("expert_count") and meta.architecture == "llama":
        raise meta.error("llama.expert_count", "none: Mixtral is not read from GGUF")
    vocab = header.tensors.get("token_embd.weight")
    if vocab is None:
        raise ConfigError(f"{meta.source}: missing tensor token_embd.weight")
    raw: dict[str, Any] = {
        "architectures": [ARCHITECTURES[meta.architecture]],
        "torch_dtype": "bfloat16",
        "vocab_size": vocab.shape[0],
        "hidden_size": meta.whole("embedding_length"),
        "num_hidden_layers": meta.whole("block_count"),
        "intermediate_size": meta.whole("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.whole("attention.head_count_kv", heads),
        "max_position_embeddings": meta.whole("context_length"),
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": meta.number("rope.freq_base", 10000.0),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    for name, key in _TOKENS.items():
        token = meta.raw(f"tokenizer.ggml.{key}")
        if isinstance(token, int):
            raw[name] = token
    ends = [raw.get("eos_token_id"), meta.raw("tokenizer.ggml.eot_token_id"), meta.raw("tokenizer.ggml.eom_token_id")]
    raw["eos_token_id"] = list(dict.fromkeys(token for token in ends if isinstance(token, int)))
    if meta.architecture == "deepseek2":
        raw |= _latent(meta)
    elif meta.has("attention.key_length"):
        raw["head_dim"] = meta.whole("attention.key_length")
    if meta.architecture == "qwen3moe":
        raw |= _experts(meta) | {"decoder_sparse_step": 1, "mlp_only_layers": []}
    scaling = _rope_scaling(meta, rope_factors)
    return raw | ({"rope_scaling": scaling} if scaling else {})


def _experts(meta: Metadata) -> dict[str, Any]:
    return {
        "num_experts": meta.whole("expert_count"),
        "num_experts_per_tok": meta.whole("expert_used_count"),
        "moe_intermediate_size": meta.whole("expert_feed_forward_length"),
        "norm_topk_prob": bool(meta.number("expert_weights_norm", 1)),
    }


def _latent(meta: Metadata) -> dict[str, Any]:
    """DeepSeek-V2 and V3."""
    sigmoid = meta.whole("expert_gating_func", 1) == _SIGMOID
    rope, latent = meta.whole("rope.dimension_count"), meta.has("attention.key_length_mla")
    experts = _experts(meta)
    experts["n_routed_experts"] = experts.pop("num_experts")
    grouped = {"n_group": meta.whole("expert_group_count", 1), "topk_group": meta.whole("expert_group_used_count", 1)}
    return {
        "architectures": ["DeepseekV3ForCausalLM" if sigmoid else "DeepseekV2ForCausalLM"],
        "num_key_value_heads": meta.whole("attention.head_count"),
        "q_lora_rank": meta.whole("attention.q_lora_rank") if meta.has("attention.q_lora_rank") else None,
        "kv_lora_rank": meta.whole("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": meta.whole(f"attention.key_length{'_mla' if latent else ''}") - rope,
        "v_head_dim": meta.whole(f"attention.value_length{'_mla' if latent else ''}"),
        **experts,
        "norm_topk_prob": bool(meta.number("expert_weights_norm", 0)),
        "n_shared_experts": meta.whole("expert_shared_count"),
        "routed_scaling_factor": meta.number("expert_weights_scale", 1.0),
        "first_k_dense_replace": meta.whole("leading_dense_block_count", 0),
        "moe_layer_freq": 1,
        **(grouped if sigmoid or grouped["n_group"] > 1 else {}),
        "topk_method": "noaux_tc" if sigmoid else "group_limited_greedy" if grouped["n_group"] > 1 else "greedy",
        "scoring_func": "sigmoid" if sigmoid else "softmax",
        "attention_bias": False,
    }


def _rope_scaling(meta: Metadata, factors: list[float] | None) -> dict[str, Any] | None:
    if factors is not None:  # all files of Llama 3.1 to 3.3 are made with these
        return {
            "rope_type": "llama3", "factor": max(factors), "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }  # fmt: skip
    kind = meta.text(f"{meta.architecture}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise meta.error(f"{meta.architecture}.rope.scaling.type", "none, linear or yarn")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": meta.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = meta.whole("rope.scaling.original_context_length")
    if meta.has("rope.scaling.yarn_log_multiplier"):
        scaling["mscale"] = scaling["mscale_all_dim"] = 10 * meta.number("rope.scaling.yarn_log_multiplier")
    return scaling
