"""Models with linear attention equal Hugging Face transformers in float32: logits of every token however a prompt is cut, and
greedy tokens; on one rank and on several."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from amounts import examples
from drive import generate_on_ranks, mailbox_models, prompts_of
from hf_tiny import (
    VOCAB,
    HfModel,
    chunked_logits,
    generate_greedy,
    load_ours,
    make_kimi_linear,
    make_qwen3_5,
    make_qwen3_5_moe,
    make_qwen3_next,
    partial_rope,
    relative_error,
    rewrite,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.base import CausalLM
from models.registry import read_config

pytestmark = pytest.mark.parity
torch.set_num_threads(1)

Make = Callable[..., HfModel]
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
CASES: dict[str, tuple[Make, dict[str, Any]]] = {
    "next": (make_qwen3_next, {}),
    "next-tied-bias": (make_qwen3_next, {"tie_word_embeddings": True, "attention_bias": True}),
    "next-dense-first": (make_qwen3_next, {"mlp_only_layers": [0], "norm_topk_prob": False}),
    "next-yarn": (make_qwen3_next, {"rope_parameters": partial_rope(0.5, **YARN), "head_dim": 16}),
    "qwen3.5-moe": (make_qwen3_5_moe, {}),
    "qwen3.5": (make_qwen3_5, {}),
    "kimi-linear": (make_kimi_linear, {}),
    "kimi-linear-query-latent": (make_kimi_linear, {"q_lora_rank": 14, "n_group": 4, "topk_group": 2}),
}


@pytest.fixture(scope="module", params=list(CASES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[HfModel, CausalLM]:
    make, overrides = CASES[request.param]
    hf = make(tmp_path_factory.mktemp(request.param), **overrides)
    return hf, load_ours(hf.path)


def tokens_of(seed: int, count: int) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_logits_do_not_depend_on_how_a_prompt_is_cut(pair: tuple[HfModel, CausalLM]) -> None:
    """Cuts within the convolution's taps, at the ends of chunks and in their middle."""
    hf, ours = pair
    tokens = tokens_of(1, 150)
    expected = hf.logits(tokens)
    for chunks in ([150], [64, 64, 22], [2, 1, 67, 80], [1] * 150):
        assert relative_error(chunked_logits(ours, tokens, chunks), expected) < 1e-4


def test_greedy_tokens_are_identical(pair: tuple[HfModel, CausalLM]) -> None:
    hf, ours = pair
    prompts = [tokens_of(2, 9), tokens_of(3, 1), tokens_of(4, 70), tokens_of(5, 30)]
    expected = [hf.greedy(prompt, 32) for prompt in prompts]
    assert generate_greedy(ours, prompts, 32, num_blocks=128) == expected


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, Any]:
    layers = draw(st.integers(1, 3))
    kinds = draw(st.lists(st.sampled_from(["linear_attention", "full_attention"]), min_size=layers, max_size=layers))
    key_heads, kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    return {
        "num_hidden_layers": layers + 1,
        "layer_types": [*kinds, "full_attention"],
        "hidden_size": draw(st.sampled_from([24, 30, 33])),
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * draw(st.integers(1, 3)),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * draw(st.integers(1, 3)),
        "linear_key_head_dim": draw(st.sampled_from([8, 16, 33])),
        "linear_value_head_dim": draw(st.sampled_from([12, 16, 35])),  # norms of few numbers multiply roundings
        "linear_conv_kernel_dim": draw(st.integers(2, 5)),
        "tie_word_embeddings": draw(st.booleans()),
    }


@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(shapes(), st.sampled_from([make_qwen3_next, make_qwen3_5_moe, make_qwen3_5]), st.integers(1, 69))
def test_whatever_the_shape(shape: dict[str, Any], make: Make, cut: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        hf = make(Path(folder), **shape)
        ours, tokens = load_ours(hf.path), tokens_of(7, 70)
        expected = hf.logits(tokens)
        for chunks in ([70], [cut, 70 - cut]):
            assert relative_error(chunked_logits(ours, tokens, chunks), expected) < 1e-4


@settings(max_examples=examples(15), deadline=None, derandomize=True)
@given(
    kinds=st.lists(st.sampled_from(["linear_attention", "full_attention"]), min_size=2, max_size=2),
    heads=st.integers(1, 4),
    width=st.sampled_from([9, 16, 35]),
    others=st.fixed_dictionaries(
        {
            "hidden_size": st.sampled_from([24, 33]),
            "kv_lora_rank": st.sampled_from([8, 12]),
            "qk_nope_head_dim": st.sampled_from([5, 8]),
            "qk_rope_head_dim": st.sampled_from([2, 6]),
            "v_head_dim": st.sampled_from([5, 8]),
            "linear_conv_kernel_dim": st.integers(2, 5),
            "n_shared_experts": st.sampled_from([1, 2]),
        }
    ),
    cut=st.integers(1, 69),
)
def test_whatever_the_shape_of_kimi_linear(
    kinds: list[str], heads: int, width: int, others: dict[str, Any], cut: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"layer_types": [*kinds, "full_attention"], "linear_num_heads": heads, "linear_head_dim": width}
        hf = make_kimi_linear(Path(folder), **sizes, **others)
        ours, tokens = load_ours(hf.path), tokens_of(7, 70)
        expected = hf.logits(tokens)
        for chunks in ([70], [cut, 70 - cut]):
            assert relative_error(chunked_logits(ours, tokens, chunks), expected) < 1e-4


def test_the_fields_of_a_real_kimi_linear(tmp_path: Path) -> None:
    """Layers are counted from 1, in a section of their own."""
    hf = make_kimi_linear(tmp_path)
    raw = read_raw(tmp_path)
    for name in ("layer_types", "mlp_layer_types", "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"):
        del raw[name]
    linear = {
        "full_attn_layers": [2],
        "kda_layers": [1, 3],
        "num_heads": 3,
        "head_dim": 10,
        "short_conv_kernel_size": 4,
    }
    real = {
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "mla_use_nope": True,
        "moe_router_activation_func": "sigmoid",
    }
    (tmp_path / "config.json").write_text(json.dumps({**raw, **real, "linear_attn_config": linear, "rope_theta": 1e4}))
    tokens = tokens_of(1, 30)
    assert relative_error(chunked_logits(load_ours(tmp_path), tokens, [30]), hf.logits(tokens)) < 1e-4


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("make", [make_qwen3_next, make_kimi_linear])
def test_experts_spread_over_ranks(make: Make, size: int, tmp_path: Path) -> None:
    hf = make(tmp_path)
    prompts = [prompts_of(rank, VOCAB) for rank in range(size)]
    ours = generate_on_ranks(mailbox_models(hf.path, size), prompts, 16)
    assert ours == [[hf.greedy(prompt, 16) for prompt in own] for own in prompts]


def test_the_language_model_of_one_with_vision(tmp_path: Path) -> None:
    """Its other tensors, and those that predict further tokens, are left alone."""
    hf = make_qwen3_5_moe(tmp_path)

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        names = {name: name.replace("model.", "model.language_model.", 1) for name in tensors}
        wrapped = {
            names[name].replace("language_model.language_model", "language_model"): x for name, x in tensors.items()
        }
        return {**wrapped, "model.visual.patch_embed.proj.weight": torch.zeros(3), "mtp.fc.weight": torch.zeros(2)}

    text = read_raw(tmp_path)
    rope = {**text["rope_parameters"], "mrope_section": [1, 1, 1], "mrope_interleaved": True}
    rewrite(tmp_path, change)
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": {**text, "rope_parameters": rope}}
        )
    )
    tokens = tokens_of(1, 30)
    assert relative_error(chunked_logits(load_ours(tmp_path), tokens, [30]), hf.logits(tokens)) < 1e-4
    assert "model.visual." in read_config(tmp_path).key_names.skipped


def read_raw(path: Path) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((path / "config.json").read_text())
    return raw
