"""Logits and greedy tokens equal Hugging Face transformers', for every family of models/gqa."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepseek_tiny import make_v3
from hf_tiny import (
    VOCAB,
    HfModel,
    chunked_logits,
    generate_greedy,
    load_ours,
    make_deepseek_moe,
    make_dots1,
    make_ernie,
    make_glm4_moe,
    make_gpt_oss,
    make_kimi_linear,
    make_llama,
    make_minimax_m2,
    make_mistral,
    make_mixtral,
    make_qwen2,
    make_qwen2_moe,
    make_qwen3,
    make_qwen3_5_moe,
    make_qwen3_moe,
    make_qwen3_next,
    partial_rope,
    relative_error,
)
from torch import Tensor

from models.base import CausalLM
from models.registry import read_config

pytestmark = pytest.mark.parity

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0}

Make = Callable[..., HfModel]
CASES: dict[str, tuple[Make, dict[str, Any]]] = {
    "qwen3": (make_qwen3, {}),
    "qwen3-tied-bias": (make_qwen3, {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3-yarn": (make_qwen3, {"rope_parameters": YARN, "num_key_value_heads": 4}),
    "moe-norm": (make_qwen3_moe, {}),
    "moe-plain-weights": (make_qwen3_moe, {"norm_topk_prob": False, "tie_word_embeddings": True}),
    "moe-sparse-step-2": (make_qwen3_moe, {"decoder_sparse_step": 2, "num_hidden_layers": 4}),
    "moe-mlp-only-0": (make_qwen3_moe, {"mlp_only_layers": [0]}),
    "qwen2": (make_qwen2, {}),
    "qwen2-tied": (make_qwen2, {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama3-rope": (make_llama, {"rope_parameters": LLAMA3}),
    "llama-biases": (make_llama, {"attention_bias": True, "mlp_bias": True, "rope_parameters": LINEAR}),
    "mistral": (make_mistral, {"head_dim": 16}),
    "mixtral": (make_mixtral, {}),
    "qwen2-moe": (make_qwen2_moe, {}),
    "qwen2-moe-norm": (make_qwen2_moe, {"norm_topk_prob": True, "qkv_bias": False, "decoder_sparse_step": 2}),
    "minimax-m2": (make_minimax_m2, {}),
    "minimax-m2-whole-heads": (make_minimax_m2, {"rope_parameters": partial_rope(1.0), "num_key_value_heads": 4}),
    "glm": (make_glm4_moe, {}),
    "glm-air": (make_glm4_moe, {"use_qk_norm": False, "attention_bias": True, "n_shared_experts": 2}),
    "glm-groups": (make_glm4_moe, {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 2, "head_dim": 16}),
    "glm-yarn": (make_glm4_moe, {"rope_parameters": partial_rope(0.5, **YARN), "head_dim": 16}),
    "dots1": (make_dots1, {}),
    "dots1-bias": (make_dots1, {"attention_bias": True, "norm_topk_prob": False, "n_shared_experts": 2}),
    "deepseek-moe": (make_deepseek_moe, {}),
    "ernie": (make_ernie, {}),
    "ernie-some-layers": (make_ernie, {"tie_word_embeddings": False, "moe_layer_interval": 2}),
    "mistral-window": (make_mistral, {"head_dim": 16, "sliding_window": 24}),
    "mixtral-window": (make_mixtral, {"sliding_window": 5}),
    "qwen2-window": (make_qwen2, {"use_sliding_window": True, "sliding_window": 17, "max_window_layers": 1}),
    "qwen3-window": (make_qwen3, {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}),
    "qwen2-moe-window": (make_qwen2_moe, {"use_sliding_window": True, "sliding_window": 7, "num_hidden_layers": 4}),
    "qwen3-moe-window": (make_qwen3_moe, {"use_sliding_window": True, "sliding_window": 12}),
    "dots1-window": (make_dots1, {"sliding_window": 10, "max_window_layers": 1}),
    "gpt-oss": (make_gpt_oss, {}),
    "gpt-oss-one-key-head": (make_gpt_oss, {"num_key_value_heads": 1, "tie_word_embeddings": True, "hidden_size": 40}),
    "gpt-oss-no-bias": (make_gpt_oss, {"attention_bias": False, "sliding_window": 2}),
    "ernie-biases": (make_ernie, {"use_bias": True}),
    "ernie-biases-own-head": (make_ernie, {"use_bias": True, "tie_word_embeddings": False}),
    "ernie-no-shared": (make_ernie, {"moe_num_shared_experts": 0, "moe_layer_end_index": 1}),
}


@pytest.fixture(scope="module", params=list(CASES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[HfModel, CausalLM]:
    make, overrides = CASES[request.param]
    hf = make(tmp_path_factory.mktemp(request.param), **overrides)
    return hf, load_ours(hf.path)


@pytest.mark.parametrize("make", [make_qwen3, make_qwen3_moe, make_v3])
def test_a_context_beyond_max_position_embeddings(make: Make, tmp_path: Path) -> None:
    """Yarn's factor times the original context may be asked for."""
    hf = make(tmp_path, rope_parameters=YARN, max_position_embeddings=32)
    assert read_config(tmp_path).context_limit == 128
    tokens = tokens_of(4, 127)
    error = relative_error(chunked_logits(load_ours(hf.path), tokens, [60, 40, 27]), hf.logits(tokens))
    assert error < 1e-4


def test_attention_factor(tmp_path: Path) -> None:
    hf = make_qwen3(tmp_path, rope_parameters={**YARN, "attention_factor": 0.7}, num_key_value_heads=4)
    tokens = tokens_of(5, 50)
    assert relative_error(chunked_logits(load_ours(hf.path), tokens, [50]), hf.logits(tokens)) < 1e-4


def test_a_window_of_the_whole_context_is_none(tmp_path: Path) -> None:
    make_mistral(tmp_path, head_dim=16, sliding_window=512)
    assert [group.kind for group in read_config(tmp_path).cache_spec("float32")] == ["paged"]


def tokens_of(seed: int, count: int) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_logits_do_not_depend_on_how_a_prompt_is_cut(pair: tuple[HfModel, CausalLM]) -> None:
    hf, ours = pair
    tokens = tokens_of(1, 90)
    expected = hf.logits(tokens)
    for chunks in ([90], [70, 20], [7, 67, 16], [*[1] * 15, 60, *[1] * 15]):
        assert relative_error(chunked_logits(ours, tokens, chunks), expected) < 1e-4


def test_greedy_tokens_are_identical(pair: tuple[HfModel, CausalLM]) -> None:
    hf, ours = pair
    prompts = [tokens_of(2, 9), tokens_of(3, 1), tokens_of(4, 70), tokens_of(5, 30)]
    found = generate_greedy(ours, prompts, 32, num_blocks=128)
    assert found == hf.continued(prompts, found)


@pytest.mark.parametrize("make", [make_qwen3, make_qwen3_moe, make_qwen3_next, make_qwen3_5_moe, make_kimi_linear])
def test_bfloat16_is_as_near_to_float32_as_that_of_transformers(tmp_path: Path, make: Make) -> None:
    """By the median token: where two experts are nearly tied, rounding picks another, and that token is far off."""
    hf = make(tmp_path)
    tokens = tokens_of(6, 80)
    exact = hf.logits(tokens)
    ours = chunked_logits(load_ours(tmp_path, dtype=torch.bfloat16), tokens, [70, 10])
    theirs = HfModel(hf.model.bfloat16(), tmp_path).logits(tokens)

    def error(logits: Tensor) -> float:
        return float(((logits - exact).norm(dim=-1) / exact.norm(dim=-1)).median())

    assert error(ours) < 1.5 * error(theirs)
