"""config.json of DeepSeek models: both spellings, and one-line errors that name file, field and expectation."""

from __future__ import annotations

import math
from typing import Any

import pytest

from cache.spec import bytes_per_token
from models.deepseek.config import DeepseekConfig, parse
from models.fields import ConfigError

V3: dict[str, Any] = {  # as published, fields that matter
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}  # fmt: skip
V2_LITE: dict[str, Any] = {
    **{k: v for k, v in V3.items() if k not in ("quantization_config", "num_nextn_predict_layers")},
    "architectures": ["DeepseekV2ForCausalLM"],
    "first_k_dense_replace": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "rope_scaling": {**V3["rope_scaling"], "mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
}


def read(raw: dict[str, Any], **changes: Any) -> DeepseekConfig:
    return parse({**raw, **changes}, "some/config.json")


def test_v3_as_published() -> None:
    config = read(V3)
    assert (config.num_layers, config.num_moe_layers, config.num_experts, config.num_mtp_layers) == (61, 58, 256, 1)
    assert config.router is not None and config.router.method == "noaux_tc"
    assert bytes_per_token(config.cache_spec("bfloat16")) == 61 * 576 * 2
    mscale = 0.1 * math.log(40) + 1
    assert config.attention_scale == pytest.approx(192**-0.5 * mscale * mscale)
    assert config.rope.scale == 1.0
    assert config.rope_interleave


def test_v2_lite_as_published() -> None:
    config = read(V2_LITE)
    assert config.q_lora_rank == 0
    assert config.router is not None
    assert (config.router.method, config.router.num_groups, config.router.norm_topk_prob) == ("greedy", 1, False)


def test_transformers_5_spelling() -> None:
    new = {k: v for k, v in V3.items() if k not in ("rope_scaling", "rope_theta", "num_nextn_predict_layers")}
    new["rope_parameters"] = {**V3["rope_scaling"], "rope_type": "yarn", "rope_theta": 10000.0}
    del new["rope_parameters"]["type"]
    new["num_mtp_layers"] = 1
    new["num_local_experts"] = new.pop("n_routed_experts")
    assert read(new) == read(V3)


def test_dense_model() -> None:
    for changes in ({"n_routed_experts": None}, {"first_k_dense_replace": 61}):
        config = read(V3, **changes)
        assert (config.num_experts, config.num_moe_layers, config.router) == (0, 0, None)
        assert config.moe_layers == ()


@pytest.mark.parametrize(
    ("base", "field", "value"),
    [
        (V3, "hidden_size", None),
        (V3, "kv_lora_rank", "512"),
        (V3, "num_hidden_layers", 0),
        (V3, "qk_rope_head_dim", 63),
        (V3, "hidden_act", "gelu"),
        (V3, "moe_layer_freq", 2),
        (V3, "scoring_func", "softmax"),
        (V3, "topk_method", "greedy"),
        (V3, "n_group", 7),
        (V3, "topk_group", 9),
        (V3, "num_experts_per_tok", 129),
        (V3, "num_key_value_heads", 8),
        (V3, "attention_bias", "no"),
        (V3, "rope_interleave", 1),
        (V3, "quantization_config.quant_method", "bitnet"),
        (V3, "quantization_config.weight_block_size", [64, 64]),
        (V3, "rope_scaling.type", "su"),
        (V3, "rope_scaling.factor", -1),
        (V2_LITE, "topk_method", "noaux_tc"),
        (V2_LITE, "scoring_func", "sigmoid"),
        (V2_LITE, "norm_topk_prob", True),
        (V2_LITE, "moe_intermediate_size", None),
    ],
)
def test_refusals_name_the_field(base: dict[str, Any], field: str, value: object) -> None:
    raw: dict[str, Any] = {**base}
    outer, _, inner = field.partition(".")
    raw[outer] = {**raw[outer], inner: value} if inner else value
    with pytest.raises(ConfigError) as error:
        parse(raw, "some/config.json")
    message = str(error.value)
    assert message.startswith(f"some/config.json: {field}: expected ")
    assert "\n" not in message
