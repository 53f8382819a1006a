"""Logits and greedy tokens of DeepSeek-V2 and V3 equal Hugging Face transformers'."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from deepseek_tiny import (
    V2_YARN,
    YARN,
    make_glm4_moe_lite,
    make_glm5,
    make_kimi_k2,
    make_kimi_k25,
    make_v2,
    make_v3,
    make_v32,
)
from drive import chunked_logits, generate_greedy, load_ours, relative_error
from hf_tiny import VOCAB, HfModel, make_fp8
from safetensors.torch import load_file

Make = Callable[..., HfModel]
pytestmark = pytest.mark.parity

CASES: dict[str, tuple[Make, dict[str, Any]]] = {
    "v2-greedy": (make_v2, {"topk_method": "greedy", "n_group": None, "topk_group": None}),
    "v2-no-q-lora": (make_v2, {"topk_method": "greedy", "q_lora_rank": None, "routed_scaling_factor": 1.5}),
    "v2-groups-yarn": (
        make_v2,
        {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0, "rope_parameters": V2_YARN},
    ),
    "v3": (make_v3, {}),
    "v3-yarn": (make_v3, {"rope_parameters": YARN, "first_k_dense_replace": 2, "n_shared_experts": 2}),
    "v3-half-split-rope": (make_v3, {"rope_interleave": False, "norm_topk_prob": False, "rms_norm_eps": 0.01}),
    "v3-biases-no-q-lora-tied": (
        make_v3,
        {"attention_bias": True, "q_lora_rank": None, "tie_word_embeddings": True, "first_k_dense_replace": 0},
    ),
    "v3-biases": (make_v3, {"attention_bias": True, "n_group": 1, "topk_group": 1}),
    "v3-dense": (make_v3, {"first_k_dense_replace": 3}),
    "kimi-k2": (make_kimi_k2, {}),
    "kimi-k2.5": (make_kimi_k25, {}),
    "v3.2": (make_v32, {}),
    "v3.2-yarn-biases": (make_v32, {"rope_parameters": YARN, "attention_bias": True, "index_topk": 13}),
    "v3.2-dense": (make_v32, {"index_topk": 512, "first_k_dense_replace": 3}),
    "glm-5": (make_glm5, {}),
    "glm-flash": (make_glm4_moe_lite, {"mlp_layer_types": ["dense", "sparse", "sparse"]}),
}
TINY = Path(__file__).parents[2] / "models" / "tiny" / "checkpoint"


@pytest.fixture(scope="module", params=list(CASES))
def hf(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HfModel:
    make, overrides = CASES[request.param]
    return make(tmp_path_factory.mktemp(request.param), **overrides)


def tokens_of(seed: int, count: int, vocab: int = VOCAB) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("prefill", ["naive", "absorbed", "auto"])
def test_logits_do_not_depend_on_how_a_prompt_is_cut(hf: HfModel, prefill: str) -> None:
    ours = load_ours(hf.path, mla_prefill=prefill)
    tokens = tokens_of(1, 90)
    expected = hf.logits(tokens)
    for chunks in ([90], [70, 20], [7, 67, 16], [*[1] * 15, 60, *[1] * 15]):
        assert relative_error(chunked_logits(ours, tokens, chunks), expected) < 1e-4


def test_greedy_tokens_are_identical(hf: HfModel) -> None:
    prompts = [tokens_of(2, 9), tokens_of(3, 1), tokens_of(4, 70), tokens_of(5, 30)]
    found = generate_greedy(load_ours(hf.path), prompts, 32, num_blocks=128)
    assert found == hf.continued(prompts, found)


def test_fp8_blocks(tmp_path: Path) -> None:
    """Matrices of one block, two and four, most of them not whole."""
    wide = {"hidden_size": 160, "intermediate_size": 144, "moe_intermediate_size": 132, "num_hidden_layers": 2}
    hf = make_v3(tmp_path, **wide, n_routed_experts=8)
    make_fp8(hf)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["model.layers.1.mlp.experts.7.gate_proj.weight_scale_inv"].shape == (2, 2)
    assert stored["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"].dtype == torch.float8_e4m3fn
    ours = load_ours(tmp_path)
    tokens = tokens_of(6, 40)
    assert relative_error(chunked_logits(ours, tokens, [25, 15]), hf.logits(tokens)) < 1e-4
    prompts = [tokens[:9], tokens[9:30]]
    found = generate_greedy(ours, prompts, 32)
    assert found == hf.continued(prompts, found)


def test_bfloat16_stays_close(tmp_path: Path) -> None:
    """Loose: a token near a tie may choose other experts. One dense layer, so that only rounding is left."""
    hf = make_v3(tmp_path, first_k_dense_replace=3)
    tokens = tokens_of(7, 60)
    ours = chunked_logits(load_ours(tmp_path, dtype=torch.bfloat16), tokens, [40, 20])
    assert relative_error(ours, hf.logits(tokens)) < 0.05


def test_embedded_model() -> None:
    """The checkpoint that ships with the package: trained, with an MTP layer that inference does not use."""
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        TINY, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    hf = HfModel(model.eval(), TINY)
    ours = load_ours(TINY)
    tokens = tokens_of(8, 100, model.config.vocab_size)
    expected = hf.logits(tokens)
    for chunks in ([100], [60, 40], [1] * 100):
        assert relative_error(chunked_logits(ours, tokens, chunks), expected) < 1e-4
    found = generate_greedy(ours, [tokens[:9]], 32)
    assert found == hf.continued([tokens[:9]], found)
