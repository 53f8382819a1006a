"""A config.json that lacks a key, or has null for it, is read as transformers reads it, or refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
import transformers
from msgspec import structs

from models.fields import ConfigError
from models.registry import parse_config

CLASSES = {
    "KimiK2ForCausalLM": "DeepseekV3Config",
    "Qwen3_5MoeForCausalLM": "Qwen3_5MoeTextConfig",
    "Qwen3_5ForCausalLM": "Qwen3_5TextConfig",
}
SAME_NAME = [
    "Qwen3", "Qwen3Moe", "Qwen2", "Qwen2Moe", "Llama", "Mistral", "Mixtral", "MiniMaxM2", "Glm4Moe", "Dots1",
    "Ernie4_5_Moe", "GptOss", "DeepseekV2", "DeepseekV3", "DeepseekV32", "GlmMoeDsa", "Glm4MoeLite", "Qwen3Next",
    "KimiLinear", "BailingHybrid",
]  # fmt: skip
CLASSES |= {f"{name}ForCausalLM": f"{name}Config" for name in SAME_NAME}
GIVEN: dict[str, dict[str, Any]] = {  # where the defaults are of no model
    "Dots1Config": {"n_routed_experts": 8, "num_experts_per_tok": 4, "n_shared_experts": 1},
    "DeepseekV2Config": {"num_experts_per_tok": 4, "n_group": 1, "topk_group": 1},
    "Glm4MoeConfig": {"head_dim": 64},
}
UNREAD = {"num_mtp_layers", "key_names"}  # by transformers
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
SCALINGS: list[dict[str, Any]] = [
    {"type": "linear", "factor": 4.0},
    YARN,
    {**YARN, "partial_rotary_factor": 0.5},
    {"type": "yarn", "factor": 4.0, "beta_fast": 16, "truncate": False, "attention_factor": 0.7},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
]


def as_transformers_reads(raw: dict[str, Any], architecture: str) -> dict[str, Any] | None:
    """With every key; None where transformers refuses it."""
    try:
        config = getattr(transformers, CLASSES[architecture]).from_dict(dict(raw))
    except Exception:  # of many types
        return None
    written: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return {**written, "architectures": [architecture]}


def read(raw: dict[str, Any]) -> dict[str, Any] | str:
    try:
        config: Any = parse_config(raw, "c")
    except ConfigError as error:
        return str(error)
    names = {field.name for field in structs.fields(config)} - UNREAD
    if raw["architectures"] == ["KimiLinearForCausalLM"]:
        names.remove("rope")  # nothing is rotated
    return {name: getattr(config, name) for name in names}


def variants(whole: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    for key in whole.keys() - {"architectures", "model_type"}:
        others = {name: value for name, value in whole.items() if name != key}
        found += [others, {**others, key: None}]
    plain = {name: value for name, value in whole.items() if name != "rope_parameters"} | {"rope_theta": 1234.0}
    found += [plain, {**plain, "rope_scaling": None}, {**plain, "partial_rotary_factor": 0.25}]
    for scaling in SCALINGS:
        found += [{**plain, "rope_scaling": scaling}, {**plain, "rope_parameters": {"rope_theta": 99.0, **scaling}}]
    return found


@pytest.mark.parametrize("architecture", sorted(CLASSES))
@pytest.mark.filterwarnings("ignore")
def test_it_is_read_as_transformers_reads_it(architecture: str) -> None:
    given = {"num_hidden_layers": 8, **GIVEN.get(CLASSES[architecture], {})}
    whole = as_transformers_reads(given, architecture)
    assert whole is not None and isinstance(read(whole), dict)
    for raw in variants(whole):
        full = as_transformers_reads(raw, architecture)
        ours = read(raw)
        if full is None or isinstance(ours, str):
            continue  # one of the two refuses it
        expected = read(full)
        if isinstance(expected, str) and "partial_rotary_factor" in expected:
            continue  # transformers writes down what this family does not read
        assert ours == expected, {name: raw.get(name, "absent") for name in whole if raw.get(name) != whole[name]}
