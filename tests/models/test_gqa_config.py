"""config.json in, frozen config out; whatever is wrong is named in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cache.spec import bytes_per_token
from layers.rope_parameters import RopeParameters
from models.fields import ConfigError
from models.gqa.config import GqaConfig, parse
from models.registry import read_config

DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1000,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
MOE = {
    **DENSE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [3],
    "norm_topk_prob": True,
}


def write(path: Path, raw: object) -> Path:
    (path / "config.json").write_text(json.dumps(raw))
    return path


def test_dense_and_moe(tmp_path: Path) -> None:
    dense = read_config(write(tmp_path, DENSE))
    assert isinstance(dense, GqaConfig)
    assert dense.qk_norm == "head" and not dense.qkv_bias and dense.tie_word_embeddings and dense.num_moe_layers == 0
    assert dense.rope == RopeParameters(16, 1e6)
    assert bytes_per_token(dense.cache_spec("bfloat16")) == 4 * 2 * 2 * 16 * 2
    moe = read_config(write(tmp_path, MOE))
    assert isinstance(moe, GqaConfig)
    assert moe.moe_layers == (1,) and moe.num_moe_layers == 1 and moe.num_experts == 16


def test_both_spellings_of_rope_and_experts() -> None:
    old = {**MOE, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 250}}
    new = {key: value for key, value in MOE.items() if key not in ("rope_theta", "rope_scaling", "num_experts")}
    new["rope_parameters"] = {**old["rope_scaling"], "rope_type": "yarn", "rope_theta": 1e6}
    new["num_local_experts"] = 16
    assert parse(old, "c") == parse(new, "c")


def test_defaults_differ_by_family() -> None:
    bare = {
        key: value for key, value in DENSE.items() if key not in ("head_dim", "use_sliding_window", "sliding_window")
    }
    heads = {
        name: parse({**bare, "architectures": [name]}, "c").head_dim
        for name in ("LlamaForCausalLM", "Qwen3ForCausalLM")
    }
    assert heads == {"LlamaForCausalLM": 8, "Qwen3ForCausalLM": 128}
    qwen2 = parse({**bare, "architectures": ["Qwen2ForCausalLM"]}, "c")
    assert qwen2.qkv_bias and not qwen2.o_bias and qwen2.qk_norm == "none"
    llama = parse({**bare, "architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True}, "c")
    assert llama.qkv_bias and llama.o_bias and llama.mlp_bias and llama.qk_norm == "none"


REQUIRED = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "max_position_embeddings", "architectures"]  # fmt: skip


@pytest.mark.parametrize("name", [*REQUIRED, "num_experts_per_tok", "moe_intermediate_size", "num_experts"])
@pytest.mark.parametrize("value", ["absent", "text", True, -1, 2.5, [], {}])
def test_missing_or_wrong_fields_are_named(tmp_path: Path, name: str, value: object) -> None:
    raw = {key: v for key, v in MOE.items() if key != name}
    if value != "absent":
        raw[name] = value
    with pytest.raises(ConfigError) as raised:
        read_config(write(tmp_path, raw))
    message = str(raised.value)
    assert message.startswith(str(tmp_path / "config.json")) and name in message and "\n" not in message


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"hidden_act": "gelu"}, 'hidden_act: expected "silu" .*got "gelu"'),
    ({"use_sliding_window": 1}, "use_sliding_window: expected"),
    (
        {"architectures": ["MistralForCausalLM"], "sliding_window": 0},
        "sliding_window: expected a whole number of at least 1",
    ),
    (
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "betafast": 3}},
        "rope_scaling.betafast: expected none: .*beta_fast",
    ),
    ({"rope_scaling": {"type": "default", "mrope_section": [1]}}, "rope_scaling.mrope_section: expected none"),
    (
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "extrapolation_factor": 2}},
        "extrapolation_factor: expected null or 1",
    ),
    (
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "attn_factor": 0.9, "attention_factor": 1.0}},
        "rope_scaling.attn_factor: expected none beside attention_factor",
    ),
    (
        {"quantization_config": {"quant_algo": "NVFP4"}},
        r"quantization_config.quant_algo: .*quant_method.*got \"NVFP4\"",
    ),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: expected"),
    ({"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor of num_attention_heads"),
    ({"head_dim": 15}, "head_dim: expected an even number"),
    ({"rms_norm_eps": 0}, "rms_norm_eps: expected a number above 0"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings: expected true or false"),
    ({"rope_theta": "big"}, "rope_theta: expected a number"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type: expected one of default"),
    ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor: expected a number, it is missing"),
    ({"rope_scaling": 3}, "rope_scaling: expected an object"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected"),
    ({"quantization_config": {"quant_method": "bitnet"}}, 'quantization_config.quant_method: expected "fp8"'),
    (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
        r"quantization_config.weight_block_size: expected \[128, 128\]",
    ),
    ({"num_experts_per_tok": 17, "architectures": MOE["architectures"]}, "num_experts_per_tok: expected at most"),
    ({"mlp_only_layers": "0", "architectures": MOE["architectures"]}, "mlp_only_layers: expected a list"),
    ({"architectures": ["GPT2LMHeadModel"]}, "architectures: GPT2LMHeadModel is not supported .*Qwen3MoeForCausalLM"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[next(iter(changes)) for changes, _ in WRONG])
def test_unsupported_arithmetic_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(write(tmp_path, {**MOE, "architectures": ["Qwen3ForCausalLM"], **changes}))


def test_layers_with_a_window() -> None:
    bare = {key: value for key, value in DENSE.items() if key != "sliding_window"}
    bare |= {"architectures": ["MistralForCausalLM"], "max_position_embeddings": 32768}
    windows = {}
    for name, more in {"absent": {}, "null": {"sliding_window": None}, "set": {"sliding_window": 1024}}.items():
        config = parse({**bare, **more}, "c")
        windows[name] = config.window
        assert config.context_limit == 32768
        kinds = [group.kind for group in config.cache_spec("bfloat16")]
        assert kinds == (["window"] if config.window else ["paged"])
    assert windows == {"absent": 4096, "null": 0, "set": 1024}  # absent: transformers' default
    assert parse({**bare, "max_position_embeddings": 2048}, "c").window == 0  # no sequence is longer
    qwen = {**bare, "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": 2}
    layers = parse(qwen, "c").num_layers
    assert parse(qwen, "c").window_layers == tuple(range(2, layers))
    types = ["sliding_attention", *["full_attention"] * (layers - 1)]
    assert parse({**qwen, "layer_types": types}, "c").window_layers == (0,)


def test_yarn_stretches_the_context() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 900}
    found = parse({**DENSE, "rope_scaling": yarn}, "c")
    assert found.context_limit == 3600 and found.max_position_embeddings == 1000 and "yarn" in found.context_reason
    assert parse({**DENSE, "max_position_embeddings": 9000, "rope_scaling": yarn}, "c").context_limit == 9000
    assert parse({**DENSE, "rope_scaling": {"type": "linear", "factor": 4.0}}, "c").context_limit == 1000


def test_overrides_replace_fields_of_the_file(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0}
    for name in ("rope_parameters", "rope_scaling"):
        for other in ("rope_parameters", "rope_scaling"):
            write(tmp_path, {**DENSE, other: {"rope_type": "linear", "factor": 2.0}})
            found = read_config(tmp_path, {name: yarn, "max_position_embeddings": 500})
            assert found.max_position_embeddings == 500 and found.context_limit == 2000
    with pytest.raises(ConfigError, match="hidden_act"):
        read_config(tmp_path, {"hidden_act": "gelu"})


def test_attn_factor_multiplies_and_attention_factor_replaces() -> None:
    def scale(**more: float) -> float:
        return parse({**DENSE, "rope_scaling": {"type": "yarn", "factor": 4.0, **more}}, "c").rope.scale

    assert scale() == pytest.approx(1.1386, abs=1e-4) and scale(attention_factor=0.5) == 0.5
    assert scale(attn_factor=0.8782488562869419) == pytest.approx(1.0)


def test_weights_of_modelopt_are_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, DENSE)
    other = tmp_path / "hf_quant_config.json"
    for algorithm in ("NVFP4", "FP8", "W4A8_AWQ"):
        other.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm}}))
        with pytest.raises(ConfigError, match=f"hf_quant_config.json: quantization.quant_algo: .*{algorithm}"):
            read_config(tmp_path)
    other.write_text(json.dumps({"quantization": {"quant_algo": None}}))
    assert read_config(tmp_path) == parse(DENSE, "c")
    block_fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    other.write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    assert read_config(write(tmp_path, {**DENSE, "quantization_config": block_fp8}))  # config.json decides


def test_files_that_are_not_configs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        read_config(tmp_path)
    for text in ("", "{", "[1]", "3"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=r"config\.json: "):
            read_config(tmp_path)


def test_reading_a_config_does_not_import_torch(tmp_path: Path) -> None:
    write(tmp_path, MOE)
    code = f"import sys; from models.registry import read_config; read_config({str(tmp_path)!r}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
