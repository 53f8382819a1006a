"""Configurations of every family, varied within what it allows, equal transformers: logits of a prompt cut somewhere, and
tokens of ranks that share the experts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepseek_tiny
import drive
import hf_tiny
import pytest
from amounts import examples
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from models.registry import read_config

# Of layers without shared experts transformers makes tensors without numbers.
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")]

Draw = Callable[[st.SearchStrategy[Any]], Any]
QUICK = settings(
    max_examples=examples(15),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=(Phase.explicit, Phase.generate),  # a smaller failure is not worth a minute
)


ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 1e6},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32},
    {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32,
     "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "yarn", "rope_theta": 3e5, "factor": 2.5, "original_max_position_embeddings": 20,
     "beta_fast": 12.0, "beta_slow": 0.5, "truncate": False, "attention_factor": 0.8},
]  # fmt: skip


def rope(draw: Draw) -> dict[str, Any]:
    kind = draw(st.sampled_from([None, *ROPES]))
    return {} if kind is None else {"rope_parameters": dict(kind)}


def attention(draw: Draw, head_dim: bool = True) -> dict[str, Any]:
    """Heads, groups, odd widths, rotary positions."""
    kv_heads, group = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 5]))
    sizes: dict[str, Any] = {"num_attention_heads": kv_heads * group, "num_key_value_heads": kv_heads}
    dim = 2 * draw(st.integers(1, 11))
    if head_dim:
        sizes |= {"head_dim": dim, "hidden_size": draw(st.sampled_from([17, 30, 33]))}
    else:
        sizes["hidden_size"] = kv_heads * group * dim
    tied, layers = draw(st.booleans()), draw(st.integers(1, 4))
    width = draw(st.sampled_from([9, 32, 41]))
    return {
        **sizes, **rope(draw), "tie_word_embeddings": tied, "num_hidden_layers": layers, "intermediate_size": width,
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5])), "seed": draw(st.integers(0, 99)),
    }  # fmt: skip


def window(draw: Draw) -> dict[str, Any]:
    return {"sliding_window": draw(st.one_of(st.none(), st.integers(2, 30)))}


def qwen_window(draw: Draw) -> dict[str, Any]:
    return {
        "use_sliding_window": draw(st.booleans()),
        "sliding_window": draw(st.integers(2, 30)),
        "max_window_layers": draw(st.integers(0, 4)),
    }


def experts(draw: Draw, num: str = "num_experts", least: int = 1) -> dict[str, Any]:
    count = draw(st.integers(least, 9))
    return {num: count, "num_experts_per_tok": draw(st.integers(1, min(4, count)))}


def width(draw: Draw) -> dict[str, Any]:
    return {"moe_intermediate_size": draw(st.sampled_from([5, 16, 35]))}


def grouped(draw: Draw, layers: int) -> dict[str, Any]:
    """DeepSeek-V3's routing, shared experts, and how many layers are dense."""
    groups = draw(st.sampled_from([1, 2, 4]))
    kept, size = draw(st.integers(1, groups)), draw(st.integers(2, 3))
    return {
        "n_group": groups,
        "topk_group": kept,
        "n_routed_experts": groups * size,
        "num_experts_per_tok": draw(st.integers(1, min(4, kept * size))),
        "n_shared_experts": draw(st.integers(0, 2)),
        "first_k_dense_replace": draw(st.integers(0, layers)),
        "norm_topk_prob": draw(st.booleans()),
        "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5])),
        **width(draw),
    }


def rope_part(draw: Draw, head_dim: int) -> dict[str, Any]:
    rotated = 2 * draw(st.integers(1, head_dim // 2))
    kind = draw(st.sampled_from(ROPES))
    return {"rope_parameters": {**kind, "partial_rotary_factor": rotated / head_dim}}


def vary_qwen3(draw: Draw) -> dict[str, Any]:
    return {**attention(draw), **qwen_window(draw), "attention_bias": draw(st.booleans())}


def vary_qwen3_moe(draw: Draw) -> dict[str, Any]:
    sizes = attention(draw)
    layers = range(sizes["num_hidden_layers"])
    which = {
        "decoder_sparse_step": draw(st.integers(1, 2)),
        "mlp_only_layers": [l for l in layers if draw(st.booleans())],
    }
    slides = {name: value for name, value in qwen_window(draw).items() if name != "max_window_layers"}
    norm = {"norm_topk_prob": draw(st.booleans()), "attention_bias": draw(st.booleans())}
    return {**sizes, **experts(draw), **width(draw), **which, **slides, **norm}


def vary_qwen2(draw: Draw) -> dict[str, Any]:
    return {**attention(draw, head_dim=False), **qwen_window(draw)}


def vary_qwen2_moe(draw: Draw) -> dict[str, Any]:
    sizes = attention(draw, head_dim=False)
    only = {"mlp_only_layers": [l for l in range(sizes["num_hidden_layers"]) if draw(st.booleans())]}
    more = {"qkv_bias": draw(st.booleans()), "norm_topk_prob": draw(st.booleans())}
    shared = {"shared_expert_intermediate_size": draw(st.sampled_from([0, 3, 20]))}
    return {**sizes, **experts(draw), **width(draw), **qwen_window(draw), **only, **more, **shared}


def vary_llama(draw: Draw) -> dict[str, Any]:
    sizes = attention(draw)
    sizes["hidden_size"] = sizes["num_attention_heads"] * draw(st.integers(2, 5))  # transformers wants a multiple
    return {**sizes, "attention_bias": draw(st.booleans()), "mlp_bias": draw(st.booleans())}


def vary_mistral(draw: Draw) -> dict[str, Any]:
    return {**attention(draw), **window(draw)}


def vary_mixtral(draw: Draw) -> dict[str, Any]:
    return {**attention(draw), **window(draw), **experts(draw, "num_local_experts")}


def vary_minimax(draw: Draw) -> dict[str, Any]:
    sizes = attention(draw)
    return {**sizes, **experts(draw, "num_local_experts", 2), **rope_part(draw, sizes["head_dim"])}


def vary_glm(draw: Draw) -> dict[str, Any]:
    sizes = attention(draw)
    flags = {"use_qk_norm": draw(st.booleans()), "attention_bias": draw(st.booleans())}
    return {**sizes, **grouped(draw, sizes["num_hidden_layers"]), **rope_part(draw, sizes["head_dim"]), **flags}


def vary_dots(draw: Draw) -> dict[str, Any]:
    sizes = attention(draw)
    slides = {**window(draw), "max_window_layers": draw(st.integers(0, 4))}
    return {**sizes, **grouped(draw, sizes["num_hidden_layers"]), **slides, "attention_bias": draw(st.booleans())}


def vary_ernie(draw: Draw) -> dict[str, Any]:
    sizes = attention(draw, head_dim=False)
    count = draw(st.integers(1, 9))
    return {
        **sizes, **width(draw), "moe_num_experts": count, "moe_k": draw(st.integers(1, min(4, count))),
        "moe_num_shared_experts": draw(st.integers(0, 2)), "moe_layer_start_index": draw(st.integers(0, 2)),
        "moe_layer_interval": draw(st.integers(1, 2)), "use_bias": draw(st.booleans()),
    }  # fmt: skip


def vary_gpt_oss(draw: Draw) -> dict[str, Any]:
    sizes = attention(draw)
    types = [draw(st.sampled_from(["sliding_attention", "full_attention"])) for _ in range(sizes["num_hidden_layers"])]
    more = {"layer_types": types, "sliding_window": draw(st.integers(2, 30)), "attention_bias": draw(st.booleans())}
    return {**sizes, **experts(draw, "num_local_experts"), **more, "swiglu_limit": draw(st.sampled_from([0.5, 7.0]))}


STATE_KINDS = ["linear_attention", "full_attention"]


def vary_next(draw: Draw) -> dict[str, Any]:
    """Which layers keep a state, its heads and widths; norms of few numbers multiply roundings."""
    sizes = {**attention(draw), **experts(draw), **width(draw)}
    layers = sizes["num_hidden_layers"]
    kinds = [draw(st.sampled_from(STATE_KINDS)) for _ in range(layers - 1)]
    key_heads, where = draw(st.integers(1, 3)), draw(st.integers(0, layers - 1))
    return {
        **sizes, **rope_part(draw, sizes["head_dim"]), "attention_bias": draw(st.booleans()),
        "layer_types": [*kinds[:where], "full_attention", *kinds[where:]],
        "linear_num_key_heads": key_heads, "linear_num_value_heads": key_heads * draw(st.integers(1, 4)),
        "linear_key_head_dim": draw(st.sampled_from([8, 16, 33, 64])),
        "linear_value_head_dim": draw(st.sampled_from([12, 16, 35, 64])),
        "linear_conv_kernel_dim": draw(st.integers(2, 6)),
        "shared_expert_intermediate_size": draw(st.sampled_from([0, 3, 20])),
        "decoder_sparse_step": draw(st.integers(1, 2)), "norm_topk_prob": draw(st.booleans()),
        "mlp_only_layers": [l for l in range(layers) if draw(st.booleans())],
    }  # fmt: skip


def vary_qwen3_5(draw: Draw) -> dict[str, Any]:
    """Every layer has experts, or none."""
    names = ("decoder_sparse_step", "norm_topk_prob", "mlp_only_layers")
    return {name: value for name, value in vary_next(draw).items() if name not in names}


def vary_qwen3_5_dense(draw: Draw) -> dict[str, Any]:
    of_experts = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
    return {name: value for name, value in vary_qwen3_5(draw).items() if name not in of_experts}


def vary_kimi_linear(draw: Draw) -> dict[str, Any]:
    sizes = vary_mla(draw)
    layers = sizes["num_hidden_layers"]
    kinds = [draw(st.sampled_from(STATE_KINDS)) for _ in range(layers - 1)]
    where = draw(st.integers(0, layers - 1))
    del sizes["first_k_dense_replace"]
    return {
        **sizes, "layer_types": [*kinds[:where], "full_attention", *kinds[where:]],
        "num_local_experts": sizes.pop("n_routed_experts"),
        "mlp_layer_types": [draw(st.sampled_from(["dense", "sparse"])) for _ in range(layers)],
        "linear_num_heads": draw(st.integers(1, 4)), "linear_head_dim": draw(st.sampled_from([9, 16, 35, 64])),
        "linear_conv_kernel_dim": draw(st.integers(2, 6)),
    }  # fmt: skip


def vary_ling(draw: Draw) -> dict[str, Any]:
    sizes, safe = vary_kimi_linear(draw), draw(st.booleans())
    size = {"head_dim": sizes.pop("linear_head_dim"), "short_conv_kernel_size": sizes.pop("linear_conv_kernel_dim")}
    more = {**size, **rope(draw), "kda_safe_gate": safe, "kda_lower_bound": draw(st.sampled_from([-5.0, -0.5]))}
    del sizes["linear_num_heads"], sizes["q_lora_rank"]
    return {**sizes, **more, "attention_bias": draw(st.booleans())}


def vary_mla(draw: Draw) -> dict[str, Any]:
    heads, layers = draw(st.sampled_from([1, 3, 4])), draw(st.integers(1, 3))
    return {
        "num_attention_heads": heads, "num_key_value_heads": heads, "hidden_size": heads * draw(st.integers(4, 9)),
        "q_lora_rank": draw(st.sampled_from([None, 11, 24])), "kv_lora_rank": draw(st.sampled_from([8, 19])),
        "qk_nope_head_dim": 2 * draw(st.integers(1, 7)), "qk_rope_head_dim": 2 * draw(st.integers(1, 4)),
        "v_head_dim": draw(st.integers(3, 13)), "num_hidden_layers": layers,
        "tie_word_embeddings": draw(st.booleans()), **grouped(draw, layers), "seed": draw(st.integers(0, 99)),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5])),
    }  # fmt: skip


MLA_ROPES = [None, deepseek_tiny.YARN, deepseek_tiny.V2_YARN]


def vary_v3(draw: Draw) -> dict[str, Any]:
    rope = draw(st.sampled_from(MLA_ROPES))
    more = {"attention_bias": draw(st.booleans()), "rope_interleave": draw(st.booleans())}
    return {**vary_mla(draw), **more, **({} if rope is None else {"rope_parameters": rope})}


def vary_kimi_k2(draw: Draw) -> dict[str, Any]:
    fixed = ("n_group", "topk_group", "routed_scaling_factor")
    sizes = {name: value for name, value in vary_v3(draw).items() if name not in fixed}
    return {**sizes, "num_experts_per_tok": 2, "n_routed_experts": 2 * draw(st.integers(1, 5))}


def vary_glm_lite(draw: Draw) -> dict[str, Any]:
    sizes = vary_mla(draw)
    del sizes["first_k_dense_replace"]
    kinds = [draw(st.sampled_from(["dense", "sparse"])) for _ in range(sizes["num_hidden_layers"])]
    return {**sizes, "mlp_layer_types": kinds, "attention_bias": draw(st.booleans())}


def vary_deepseek_moe(draw: Draw) -> dict[str, Any]:
    """Its first layer is dense (hf_tiny.make_deepseek_moe)."""
    sizes = {**attention(draw, head_dim=False), "num_hidden_layers": draw(st.integers(2, 4))}
    return {
        **sizes,
        "num_experts_per_tok": draw(st.integers(1, 8)),
        "num_key_value_heads": sizes["num_attention_heads"],
    }


def vary_v2(draw: Draw) -> dict[str, Any]:
    method = draw(st.sampled_from(["greedy", "group_limited_greedy"]))
    sizes = {
        **vary_mla(draw),
        "kv_lora_rank": 2 * draw(st.integers(3, 10)),
    }  # transformers cannot rotate behind an odd one
    return {**sizes, "topk_method": method, "norm_topk_prob": False}


# By architecture, which is how docs/models.md names them (test_models_table.py).
FAMILIES: dict[str, tuple[Callable[..., hf_tiny.HfModel], Callable[[Draw], dict[str, Any]]]] = {
    "Qwen3ForCausalLM": (hf_tiny.make_qwen3, vary_qwen3),
    "Qwen3MoeForCausalLM": (hf_tiny.make_qwen3_moe, vary_qwen3_moe),
    "Qwen2ForCausalLM": (hf_tiny.make_qwen2, vary_qwen2),
    "Qwen2MoeForCausalLM": (hf_tiny.make_qwen2_moe, vary_qwen2_moe),
    "LlamaForCausalLM": (hf_tiny.make_llama, vary_llama),
    "MistralForCausalLM": (hf_tiny.make_mistral, vary_mistral),
    "MixtralForCausalLM": (hf_tiny.make_mixtral, vary_mixtral),
    "MiniMaxM2ForCausalLM": (hf_tiny.make_minimax_m2, vary_minimax),
    "Glm4MoeForCausalLM": (hf_tiny.make_glm4_moe, vary_glm),
    "Dots1ForCausalLM": (hf_tiny.make_dots1, vary_dots),
    "Ernie4_5_MoeForCausalLM": (hf_tiny.make_ernie, vary_ernie),
    "GptOssForCausalLM": (hf_tiny.make_gpt_oss, vary_gpt_oss),
    "DeepseekV2ForCausalLM": (deepseek_tiny.make_v2, vary_v2),
    "DeepseekV3ForCausalLM": (deepseek_tiny.make_v3, vary_v3),
    "KimiK2ForCausalLM": (deepseek_tiny.make_kimi_k2, vary_kimi_k2),
    "KimiK25ForConditionalGeneration": (deepseek_tiny.make_kimi_k25, vary_kimi_k2),
    "Glm4MoeLiteForCausalLM": (deepseek_tiny.make_glm4_moe_lite, vary_glm_lite),
    "DeepseekForCausalLM": (hf_tiny.make_deepseek_moe, vary_deepseek_moe),
    "Qwen3NextForCausalLM": (hf_tiny.make_qwen3_next, vary_next),
    "Qwen3_5MoeForCausalLM": (hf_tiny.make_qwen3_5_moe, vary_qwen3_5),
    "Qwen3_5ForCausalLM": (hf_tiny.make_qwen3_5, vary_qwen3_5_dense),
    "KimiLinearForCausalLM": (hf_tiny.make_kimi_linear, vary_kimi_linear),
    "BailingHybridForCausalLM": (hf_tiny.make_ling, vary_ling),
}
LONGEST = dict.fromkeys(
    ("Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM", "KimiLinearForCausalLM", "BailingHybridForCausalLM"), 80
)


@pytest.mark.parametrize("family", list(FAMILIES))
@QUICK
@given(data=st.data())
def test_equal_to_transformers(family: str, tmp_path: Path, data: st.DataObject) -> None:
    make, vary = FAMILIES[family]
    hf = make(tmp_path, **vary(data.draw))
    tokens = [
        (11 * i + 3) % hf_tiny.VOCAB for i in range(data.draw(st.integers(2, LONGEST.get(family, 50)), label="length"))
    ]
    first = data.draw(st.integers(1, len(tokens) - 1), label="first chunk")
    ours = drive.load_ours(tmp_path)
    expected = hf.logits(tokens)
    for chunks in ([len(tokens)], [first, len(tokens) - first], [first, *[1] * (len(tokens) - first)]):
        assert drive.relative_error(drive.chunked_logits(ours, tokens, chunks), expected) < 1e-4


DENSE = {"Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM", "Qwen3_5ForCausalLM"}
RANKED = [family for family in FAMILIES if family not in DENSE]


@pytest.mark.parametrize("family", RANKED)
def test_ranks_give_the_tokens_of_transformers(family: str, tmp_path: Path) -> None:
    hf = FAMILIES[family][0](tmp_path)
    assert read_config(tmp_path).num_experts
    prompts = [drive.prompts_of(rank, hf_tiny.VOCAB) for rank in range(4)]
    ours = {
        size: drive.generate_on_ranks(drive.mailbox_models(tmp_path, size), prompts[:size], 8) for size in (1, 2, 4)
    }
    expected = [hf.continued(own, tokens) for own, tokens in zip(prompts, ours[4], strict=True)]
    assert ours == {size: expected[:size] for size in ours}
