"""Real models: their config.json is accepted, and `moesaic explain` says of them what their makers do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from published_configs import NAMES, config_of, sizes_of

from models.registry import FAMILIES, WRAPPERS, parse_config
from moesaic.explain import command

GPUS = 32  # that all of them fit on, widened where GPUs cannot keep their form
DENSE = {"Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM"}
SAME = {"KimiK2ForCausalLM": "DeepseekV3ForCausalLM", "Qwen3_5MoeForCausalLM": "Qwen3_5MoeForConditionalGeneration"}
# Its published config.json is not known here, only transformers' config class.
UNPUBLISHED = {"BailingHybridForCausalLM"}
SAME |= {"Kimi_K25ForConditionalGeneration": "KimiK25ForConditionalGeneration"}
SAME |= {"Qwen3_5ForCausalLM": "Qwen3_5ForConditionalGeneration"}


def explain(directory: Path, *options: str) -> Result:
    arguments = ["--json", "--gpu", "h200", "--world", str(GPUS), *options, str(directory)]
    return CliRunner().invoke(command, arguments, catch_exceptions=False)


def write(config: dict[str, Any], directory: Path) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def between(published: float, least: float, most: float) -> bool:
    """But for three per cent, or what a name leaves out: of 3.9 it says A3B."""
    whole = published == int(published)
    slack = max(0.03 * published, 1.0 if whole and published < 5 else 0.5 if whole else 0.05)
    return least - slack <= published <= most + slack


def test_every_family_with_experts_is_here() -> None:
    published = {config_of(name)["architectures"][0] for name in NAMES}
    ours = {name for name, family in FAMILIES.items() if family.module.startswith("models.")} | WRAPPERS.keys()
    dense = DENSE | {"Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"}
    assert {SAME.get(name, name) for name in ours - dense - UNPUBLISHED} == published


@pytest.mark.parametrize("name", NAMES)
def test_explain_prices_them(name: str, tmp_path: Path) -> None:
    config = config_of(name)
    done = explain(write(config, tmp_path))
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    parameters = found["parameters"]
    text = config.get("text_config", config)
    tied = parse_config(config, name).tie_word_embeddings  # type: ignore[attr-defined]
    table = text["vocab_size"] * text["hidden_size"] / 1e9
    total, active = parameters["total"] / 1e9, parameters["active"] / 1e9
    # Some makers count both tables of the vocabulary, some one, some none.
    assert between(sizes_of(name)[0], total - (1 if tied else 2) * table, total)
    assert between(sizes_of(name)[1], active - table, active if tied else active + table)

    # What takes a GPU's memory: experts in their form, shared among GPUs, and a copy of all other weights.
    quantization = text.get("quantization_config") or {}
    in_fp8 = quantization.get("quant_method") == "fp8" or "float-quantized" in str(quantization)
    assert found["plan"]["expert_format"] == ("fp8" if in_fp8 else "plain")
    memory = list(found["memory"].values())
    assert memory[0] == pytest.approx(2 * (parameters["total"] - parameters["routed"]), rel=0.01)
    copies = found["plan"]["slots_per_rank"] / found["plan"]["num_experts"]
    each = 1 + 4 / 128 if in_fp8 else 2
    assert memory[1] == pytest.approx(parameters["routed"] * copies * each, rel=0.01)


def test_deepseek_v4_is_refused_by_name(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        command, ["--gpu", "h200", str(write({"architectures": ["DeepseekV4ForCausalLM"]}, tmp_path))]
    )
    assert "DeepseekV4ForCausalLM is not supported" in str(done.exception or done.output)


def test_the_text_part_of_a_model_with_vision() -> None:
    facts = parse_config(config_of("Kimi-K2.5"), "c")
    assert facts.num_experts == 384
    names = facts.key_names
    assert names("language_model.model.layers.3.mlp.gate.weight") == "model.layers.3.mlp.gate.weight"
    assert names("language_model.lm_head.weight") == "lm_head.weight"
    assert names("vision_tower.blocks.0.weight") is None


def test_a_head_that_a_model_with_vision_shares() -> None:
    """Where its text_config does not say so."""
    facts: Any = parse_config({**config_of("Qwen3.5-35B-A3B"), "tie_word_embeddings": True}, "c")
    assert facts.tie_word_embeddings


def test_fp8_of_a_model_with_vision_is_priced(tmp_path: Path) -> None:
    fp8 = config_of("MiniMax-M2")["quantization_config"]
    done = explain(write({**config_of("Qwen3.5-397B-A17B"), "quantization_config": fp8}, tmp_path))
    assert json.loads(done.stdout)["plan"]["expert_format"] == "fp8"
