"""Sparse attention of DeepSeek-V3.2 and GLM-5 equals Hugging Face transformers', whatever the configuration; what of
their config.json is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from amounts import examples
from deepseek_tiny import INDEX, YARN, make_glm5, make_v3, make_v32
from drive import (
    chunked_logits,
    generate_greedy,
    generate_on_ranks,
    load_ours,
    mailbox_models,
    prompts_of,
    relative_error,
)
from hf_tiny import VOCAB, make_fp8, rewrite
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from cache.memory import CacheMemory
from cache.spec import CacheSizes, check_spec
from models.fields import ConfigError
from models.registry import parse_config, read_config

# Of layers without shared experts transformers makes tensors without numbers.
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")]
torch.set_num_threads(1)

MAKE = {"v3.2": make_v32, "glm-5": make_glm5}


def tokens_of(seed: int, count: int) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@st.composite
def configs(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """Index heads are many: with few, relu makes scores of zero, and which of equals are chosen is nobody's to say."""
    family = draw(st.sampled_from(list(MAKE)))
    layers, rope = draw(st.integers(1, 4)), 2 * draw(st.integers(1, 4))
    config: dict[str, Any] = {
        "num_hidden_layers": layers,
        "num_attention_heads": draw(st.integers(1, 5)),
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": draw(st.integers(1, 12)),
        "v_head_dim": draw(st.integers(1, 14)),
        "kv_lora_rank": draw(st.integers(2, 24)),
        "q_lora_rank": draw(st.integers(4, 24)),
        "index_topk": draw(st.sampled_from([1, 2, 7, 16, 39, 40, 41, 200])),
        "index_n_heads": draw(st.sampled_from([16, 24, 64, 70])),
        "index_head_dim": rope + 2 * draw(st.integers(0, 6)),
        "attention_bias": draw(st.booleans()),
        "tie_word_embeddings": draw(st.booleans()),
        "mlp_layer_types": draw(st.lists(st.sampled_from(["dense", "sparse"]), min_size=layers, max_size=layers)),
        "n_shared_experts": draw(st.integers(0, 2)),
        "norm_topk_prob": draw(st.booleans()),
        "rope_parameters": draw(st.sampled_from([None, YARN])),
        "seed": draw(st.integers(0, 99)),
    }
    config["num_key_value_heads"] = config["num_attention_heads"]
    config["n_group"] = draw(st.sampled_from([1, 2, 8]))  # of 16 experts
    config["topk_group"] = draw(st.integers(max(1, config["n_group"] // 4), config["n_group"]))
    if family == "glm-5":
        config["indexer_types"] = [
            "full",
            *draw(st.lists(st.sampled_from(["full", "shared"]), min_size=layers - 1, max_size=layers - 1)),
        ]
    return family, config


@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drawn=configs(), cuts=st.lists(st.integers(1, 39), max_size=4, unique=True))
def test_any_configuration(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[str, dict[str, Any]], cuts: list[int]
) -> None:
    """Whole, cut anywhere, and one by one."""
    family, config = drawn
    hf = MAKE[family](tmp_path_factory.mktemp("any"), **config)
    ours, tokens = load_ours(hf.path), tokens_of(1, 40)
    expected = hf.logits(tokens)
    ends = [*sorted(cuts), 40]
    pieces = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    for chunks in ([40], pieces, [1] * 40):
        assert relative_error(chunked_logits(ours, tokens, chunks), expected) < 1e-4


@pytest.mark.parametrize(("size", "slots_per_rank"), [(1, None), (2, None), (4, None), (2, 11)])
@pytest.mark.parametrize("family", MAKE)
def test_ranks_give_the_tokens_of_transformers(
    family: str, size: int, slots_per_rank: int | None, tmp_path: Path
) -> None:
    hf = MAKE[family](tmp_path)
    prompts = [prompts_of(rank, VOCAB) for rank in range(size)]
    ours = generate_on_ranks(mailbox_models(hf.path, size, slots_per_rank), prompts, 16)
    assert ours == [hf.continued(own, tokens) for own, tokens in zip(prompts, ours, strict=True)]


def test_with_few_tokens_it_is_deepseek_v3(tmp_path: Path) -> None:
    """Up to index_topk tokens the same weights give the same logits, bit by bit."""
    sparse = make_v32(tmp_path / "sparse", index_topk=40)
    make_v3(tmp_path / "dense")

    def without_indexer(_: dict[str, Tensor]) -> dict[str, Tensor]:
        stored = load_file(sparse.path / "model.safetensors")
        return {key: tensor for key, tensor in stored.items() if ".indexer." not in key}

    rewrite(tmp_path / "dense", without_indexer)
    tokens = tokens_of(2, 40)
    for chunks in ([40], [13, 27]):
        ours = chunked_logits(load_ours(sparse.path), tokens, chunks)
        assert torch.equal(ours, chunked_logits(load_ours(tmp_path / "dense"), tokens, chunks))


@pytest.mark.parametrize("family", MAKE)
def test_fp8_checkpoints(family: str, tmp_path: Path) -> None:
    wide = {"hidden_size": 160, "q_lora_rank": 136, "index_head_dim": 20, "num_hidden_layers": 3, "n_routed_experts": 8}
    hf = MAKE[family](tmp_path, **wide)
    make_fp8(hf)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["model.layers.0.self_attn.indexer.wq_b.weight"].dtype == torch.float8_e4m3fn
    tokens = tokens_of(3, 30)
    ours = load_ours(tmp_path)
    assert relative_error(chunked_logits(ours, tokens, [21, 9]), hf.logits(tokens)) < 1e-4
    found = generate_greedy(ours, [tokens[:9]], 32)
    assert found == hf.continued([tokens[:9]], found)


@pytest.mark.parametrize("family", MAKE)
def test_bfloat16_and_an_fp8_cache_stay_close(family: str, tmp_path: Path) -> None:
    """Of most tokens: a rounding may choose another key. There are no experts, so that none is another."""
    hf = MAKE[family](tmp_path, first_k_dense_replace=3, index_topk=24, index_head_dim=12)
    tokens = tokens_of(4, 40)
    expected = hf.logits(tokens)
    for fp8_cache in (False, True):
        ours = load_ours(tmp_path, dtype=torch.bfloat16, fp8_cache=fp8_cache)
        error_T = (chunked_logits(ours, tokens, [30, 9, 1]) - expected).abs().amax(1) / expected.abs().max()
        assert error_T.median() < (0.1 if fp8_cache else 0.05)


@pytest.mark.parametrize("family", MAKE)
def test_the_cache_takes_what_is_said(family: str, tmp_path: Path) -> None:
    """Layers that share a choice keep no index key."""
    MAKE[family](tmp_path, index_head_dim=12)
    facts = read_config(tmp_path)
    full = {"v3.2": 3, "glm-5": 2}[family]
    for fp8, latent, key in ((False, 26 * 4, 12 * 4), (True, 20 + 4 + 12, 12 + 4)):
        spec = facts.cache_spec("float32", fp8)
        check_spec(spec, 3)
        assert spec[0].row_bytes == 3 * latent + full * key
        sizes = CacheSizes(4, 10)
        memory = CacheMemory.allocate(spec, sizes, torch.device("cpu"))
        allocated = sum(field.numel() * field.element_size() for layer in memory.layers for field in layer)
        assert allocated == sizes.bytes_of(spec[0])


GLM: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"], "vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 6,
    "max_position_embeddings": 64, "num_attention_heads": 2, "q_lora_rank": 4, "kv_lora_rank": 4, "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4, "v_head_dim": 4, "intermediate_size": 8, "n_routed_experts": None,
    **INDEX,
}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "full"),
    [
        ({}, range(6)),
        ({"index_topk_freq": 4}, [0, 1, 5]),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 3}, [0, 1, 2, 4]),
        ({"index_topk_pattern": "FSSFSF", "index_topk_freq": 4}, [0, 3, 5]),
        ({"indexer_types": ["full", "shared", "shared", "full", "shared", "shared"]}, [0, 3]),
    ],
)
def test_which_layers_choose(given: dict[str, Any], full: Any) -> None:
    facts: Any = parse_config({**GLM, **given}, "c")
    assert facts.index.full_layers == tuple(full) and facts.index.interleave
    v32 = {**GLM, **given, "architectures": ["DeepseekV32ForCausalLM"]}
    read: Any = parse_config(v32, "c")
    assert read.index.full_layers == tuple(range(6)) and not read.index.interleave


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"index_topk": None}, "index_topk"),
        ({"index_head_dim": 2}, "index_head_dim: expected an even number of at least qk_rope_head_dim"),
        ({"index_head_dim": 11}, "index_head_dim"),
        ({"q_lora_rank": None}, "q_lora_rank: expected above 0"),
        ({"index_topk_pattern": "SFFFFF"}, "index_topk_pattern: expected 6"),
        ({"index_topk_pattern": "FFX"}, "index_topk_pattern: expected 6"),
        ({"indexer_types": "full"}, "indexer_types: expected 6"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 0}, "index_skip_topk_offset"),
    ],
)
def test_what_cannot_be_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({**GLM, **given}, "c")
    facts: Any = parse_config({**GLM, "index_head_dim": 10}, "c")
    with pytest.raises(ValueError, match="index_head_dim that is a multiple of 4, not 10"):
        facts.cache_spec("bfloat16", True)
