"""Models with linear attention equal Hugging Face transformers in float32: logits of every token however a prompt is cut, and
greedy tokens. Varied shapes, and ranks: test_varied_configs.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_tiny import (
    VOCAB,
    HfModel,
    chunked_logits,
    generate_greedy,
    load_ours,
    make_kimi_linear,
    make_ling,
    make_qwen3_5,
    make_qwen3_5_moe,
    make_qwen3_next,
    partial_rope,
    relative_error,
    rewrite,
)
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
    "ling-3": (make_ling, {}),
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
    for chunks in ([150], [64, 64, 22], [2, 1, 67, 80], [*[1] * 70, 65, *[1] * 15]):
        assert relative_error(chunked_logits(ours, tokens, chunks), expected) < 1e-4


def test_greedy_tokens_are_identical(pair: tuple[HfModel, CausalLM]) -> None:
    hf, ours = pair
    prompts = [tokens_of(2, 9), tokens_of(3, 1), tokens_of(4, 70), tokens_of(5, 30)]
    found = generate_greedy(ours, prompts, 32, num_blocks=128)
    assert found == hf.continued(prompts, found)


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
