"""Checkpoints with weights of fewer bits equal transformers with the weights that they stand for, for several families."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from amounts import combined
from deepseek_tiny import make_glm4_moe_lite, make_v2, make_v3
from drive import mailbox_models
from hf_tiny import (
    VOCAB,
    HfModel,
    Quantize,
    chunked_logits,
    generate_on_ranks,
    load_ours,
    make_dots1,
    make_ernie,
    make_fp8,
    make_glm4_moe,
    make_gpt_oss,
    make_kimi_linear,
    make_ling,
    make_llama,
    make_minimax_m2,
    make_mistral,
    make_mixtral,
    make_quantized,
    make_qwen2,
    make_qwen2_moe,
    make_qwen3,
    make_qwen3_5,
    make_qwen3_5_moe,
    make_qwen3_moe,
    make_qwen3_next,
    quantize_fp8,
    relative_error,
    rewrite,
)
from torch import Tensor

from ep.experts import WeightFormat
from layers.linear import Linear
from layers.stored import BLOCK, E2M1
from layers.weights import Checkpoint, CheckpointError
from models.fields import ConfigError
from models.registry import read_config
from native import Isa, isa

pytestmark = pytest.mark.parity

TOKENS = [(7 * i) % VOCAB for i in range(24)]
GROUP = 32
WIDE: dict[str, Any] = {"hidden_size": 160, "moe_intermediate_size": 96, "num_hidden_layers": 2}
DENSE: dict[str, Any] = {"hidden_size": 160, "intermediate_size": 192, "num_hidden_layers": 2}
LAYERS: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"]}
STATES = {**WIDE, **LAYERS, "linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 20}
# By architecture, which is how docs/models.md names them (test_models_table.py).
FAMILIES: dict[str, Callable[[Path], HfModel]] = {
    "Qwen3MoeForCausalLM": lambda path: make_qwen3_moe(path, **WIDE),
    "Glm4MoeForCausalLM": lambda path: make_glm4_moe(path, **WIDE),
    "MiniMaxM2ForCausalLM": lambda path: make_minimax_m2(path, **{**DENSE, "intermediate_size": 96}),
    "DeepseekV3ForCausalLM": lambda path: make_v3(path, **WIDE),
    "KimiK2ForCausalLM": lambda path: make_v3(path, n_group=1, topk_group=1, **WIDE),
    "LlamaForCausalLM": lambda path: make_llama(path, **DENSE),
    "Qwen3NextForCausalLM": lambda path: make_qwen3_next(path, **STATES),
    "Qwen3_5MoeForCausalLM": lambda path: make_qwen3_5_moe(path, **STATES),
    "KimiLinearForCausalLM": lambda path: make_kimi_linear(path, **WIDE, **LAYERS, mlp_layer_types=["dense", "sparse"]),
}
# Their weights are read in the same way; one form shows that their names fit.
MORE: dict[str, Callable[[Path], HfModel]] = {
    "DeepseekV2ForCausalLM": lambda path: make_v2(path, **WIDE),
    "Glm4MoeLiteForCausalLM": lambda path: make_glm4_moe_lite(path, **WIDE),
    "Dots1ForCausalLM": lambda path: make_dots1(path, **WIDE),
    "Ernie4_5_MoeForCausalLM": lambda path: make_ernie(path, **WIDE),
    "MixtralForCausalLM": lambda path: make_mixtral(path, **{**DENSE, "intermediate_size": 96}),
    "Qwen2MoeForCausalLM": lambda path: make_qwen2_moe(path, **WIDE),
    "Qwen3ForCausalLM": lambda path: make_qwen3(path, **DENSE),
    "Qwen2ForCausalLM": lambda path: make_qwen2(path, **DENSE),
    "MistralForCausalLM": lambda path: make_mistral(path, **DENSE),
    "Qwen3_5ForCausalLM": lambda path: make_qwen3_5(path, **DENSE, **LAYERS),
    "BailingHybridForCausalLM": lambda path: make_ling(path, **WIDE, **LAYERS, mlp_layer_types=["dense", "sparse"]),
}


def by_channel(key: str, tensor: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = (tensor.abs().amax(1, keepdim=True) / 448).bfloat16()
    value = (tensor / scale.float()).to(torch.float8_e4m3fn)
    return {key: value, f"{key}_scale": scale}, value.float() * scale.float()


def statically(key: str, tensor: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """One scale in all, and one for the inputs, which is not used here."""
    scale = tensor.abs().amax() / 448
    value = (tensor / scale).to(torch.float8_e4m3fn)
    beside = {f"{key.removesuffix('.weight')}.input_scale": torch.tensor([0.5])}
    return {key: value, f"{key}_scale": scale[None], **beside}, value.float() * scale


def by_blocks(key: str, tensor: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    value, scale = quantize_fp8(tensor)
    wide = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: tensor.shape[0], : tensor.shape[1]]
    return {key: value, f"{key}_scale": scale}, value.float() * wide


def packed_int4(key: str, tensor: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Groups of 32 inputs, symmetric: as Kimi-K2-Thinking has its experts."""
    groups = tensor.view(tensor.shape[0], -1, GROUP)
    scale = (groups.abs().amax(-1) / 7).bfloat16()
    number = (groups / scale.float()[..., None]).round().clamp(-8, 7)
    unsigned = (number + 8).to(torch.int64).view(tensor.shape[0], -1, 8)
    packed = (unsigned << torch.arange(0, 32, 4)).sum(-1)
    packed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)
    shape = torch.tensor(tensor.shape, dtype=torch.int32)
    stored = {f"{key}_packed": packed, f"{key}_scale": scale, f"{key}_shape": shape}
    return stored, (number * scale.float()[..., None]).view(tensor.shape)


def packed_int4_zero(key: str, tensor: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Groups of 64 or fewer inputs with zero points."""
    code, scale, zero = asymmetric(tensor)
    shape = torch.tensor(tensor.shape, dtype=torch.int32)
    beside = {f"{key}_zero_point": words(zero.T).T.contiguous(), f"{key}_shape": shape}
    return {f"{key}_packed": words(code), f"{key}_scale": scale, **beside}, meaning(code, scale, zero)


def asymmetric(tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [O, I], scales and zero points [O, G]."""
    groups = tensor.view(tensor.shape[0], -1, GROUP)
    least, most = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = ((most - least) / 15).half()
    zero = (-least / scale.float()).round().clamp(0, 15)
    code = (groups / scale.float()[..., None] + zero[..., None]).round().clamp(0, 15)
    return code.flatten(1).long(), scale, zero.long()


def meaning(code: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return (code.view(*scale.shape, -1) - zero[..., None]).float().mul(scale.float()[..., None]).flatten(1)


def words(code: Tensor) -> Tensor:
    """int32 [..., N / 8], the first code in the lowest bits; N is filled up."""
    filled = torch.nn.functional.pad(code, (0, -code.shape[-1] % 8)).unflatten(-1, (-1, 8))
    packed = (filled << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def gptq(key: str, tensor: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """With zero points; they are stored less one."""
    code, scale, zero = asymmetric(tensor)
    zero = zero.clamp(min=1)
    base, order = key.removesuffix(".weight"), torch.arange(tensor.shape[1], dtype=torch.int32) // GROUP
    stored = {
        f"{base}.qweight": words(code).T.contiguous(), f"{base}.scales": scale.T.contiguous(),
        f"{base}.qzeros": words(zero.T - 1), f"{base}.g_idx": order,
    }  # fmt: skip
    return stored, meaning(code, scale, zero)


def gptq_symmetric(key: str, tensor: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    groups = tensor.view(tensor.shape[0], -1, GROUP)
    scale = (groups.abs().amax(-1) / 7).half()
    code = ((groups / scale.float()[..., None]).round().clamp(-8, 7) + 8).flatten(1).long()
    zero = torch.full_like(scale, 8).long()
    base = key.removesuffix(".weight")
    qzeros = words(zero.T - 1)
    stored = {
        f"{base}.qweight": words(code).T.contiguous(),
        f"{base}.scales": scale.T.contiguous(),
        f"{base}.qzeros": qzeros,
    }
    return stored, meaning(code, scale, zero)


def awq(key: str, tensor: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    code, scale, zero = asymmetric(tensor)
    base, order = key.removesuffix(".weight"), [0, 2, 4, 6, 1, 3, 5, 7]

    def in_eights(values: Tensor) -> Tensor:
        return words(values.unflatten(-1, (-1, 8))[..., order].flatten(-2))

    stored = {
        f"{base}.qweight": in_eights(code.T), f"{base}.scales": scale.T.contiguous(), f"{base}.qzeros": in_eights(zero.T),
    }  # fmt: skip
    return stored, meaning(code, scale, zero)


def compressed(kind: str, num_bits: int, form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": kind, "num_bits": num_bits, "symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": ["lm_head"],
        "kv_cache_scheme": None, "quantization_status": "compressed", "sparsity_config": {}, "transform_config": {},
    }  # fmt: skip


FP8_BY_CHANNEL = compressed("float", 8, "float-quantized", strategy="channel", dynamic=False)
INT4 = compressed("int", 4, "pack-quantized", strategy="group", group_size=GROUP, actorder=None)
FORMS: dict[str, tuple[Quantize, dict[str, Any], str]] = {
    "fp8 by channel": (by_channel, FP8_BY_CHANNEL, ""),
    "fp8 by tensor": (statically, compressed("float", 8, "float-quantized", strategy="tensor"), ""),
    "fp8 by blocks": (
        by_blocks,
        compressed("float", 8, "float-quantized", strategy="block", block_structure=[128, 128]),
        "",
    ),
    "fp8 by tensor, no compressed-tensors": (
        statically,
        {"quant_method": "fp8", "activation_scheme": "static"},
        "",
    ),
    "int4 experts": (packed_int4, INT4, ".experts."),
    "int4 with zero points": (
        packed_int4_zero,
        compressed("int", 4, "pack-quantized", strategy="group", group_size=GROUP, symmetric=False),
        ".experts.",
    ),
    "awq": (
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
        ".experts.",
    ),
    "gptq": (
        gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False},
        ".experts.",
    ),
    "gptq, symmetric": (
        gptq_symmetric,
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True},
        ".experts.",
    ),
}


def error(hf: HfModel, family: str = "") -> float:
    if family == "KimiK2ForCausalLM":  # DeepSeek-V3 by another name
        rewrite(hf.path, lambda tensors: tensors, architectures=[family], model_type="kimi_k2")
    return relative_error(chunked_logits(load_ours(hf.path), TOKENS, [20, 4]), hf.logits(TOKENS))


@pytest.mark.parametrize(("form", "family"), combined(list(FORMS), list(FAMILIES)))
def test_equal_to_the_weights_that_they_stand_for(tmp_path: Path, family: str, form: str) -> None:
    hf = FAMILIES[family](tmp_path)
    quantize, config, within = FORMS[form]
    if family == "LlamaForCausalLM" and within:
        within = ".mlp."
    before = hf.logits(TOKENS)
    make_quantized(hf, quantize, config, within=within)
    assert relative_error(hf.logits(TOKENS), before) > 1e-3, "quantising changed nothing: the test would be empty"
    assert error(hf, family) < 1e-4


@pytest.mark.parametrize("family", [*FAMILIES, *MORE])
def test_deepseek_blocks(tmp_path: Path, family: str) -> None:
    hf = {**FAMILIES, **MORE}[family](tmp_path)
    make_fp8(hf)
    assert error(hf, family) < 1e-4


@pytest.mark.parametrize("family", list(MORE))
def test_scales_by_channel(tmp_path: Path, family: str) -> None:
    hf = MORE[family](tmp_path)
    make_quantized(hf, by_channel, FP8_BY_CHANNEL)
    assert error(hf) < 1e-4


def test_experts_by_channel_stay_in_8_bits(tmp_path: Path) -> None:
    """Exactly: nothing is rounded again."""
    hf = FAMILIES["Qwen3MoeForCausalLM"](tmp_path)
    make_quantized(hf, by_channel, FP8_BY_CHANNEL)
    model = load_ours(tmp_path)
    (_, moe) = model.moe_layers[0]
    if isa() > Isa.NONE:
        assert moe.experts.format is WeightFormat.FP8
    gate = moe.experts.read_slot(3)[0]
    stored = Checkpoint(tmp_path)
    name = "model.layers.0.mlp.experts.3.gate_proj.weight"
    assert torch.equal(gate, stored.borrow(name, tuple(gate.shape)).widened())


@pytest.mark.parametrize("form", ["awq", "gptq", "gptq, symmetric", "int4 with zero points"])
def test_linear_layers_stay_in_4_bits(tmp_path: Path, form: str) -> None:
    hf = FAMILIES["LlamaForCausalLM"](tmp_path)
    make_quantized(hf, *FORMS[form][:2], within="mlp")
    model = load_ours(tmp_path)
    if isa() > Isa.NONE:
        forms = {module.packed.form for module in model.modules() if isinstance(module, Linear) and module.packed}
        assert (WeightFormat.INT4 if "symmetric" in form else WeightFormat.INT4_ZERO) in forms


def test_reordered_inputs_are_refused(tmp_path: Path) -> None:
    def reordered(key: str, tensor: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        stored, meant = gptq(key, tensor)
        return {name: part.flip(0) if name.endswith("g_idx") else part for name, part in stored.items()}, meant

    hf = FAMILIES["LlamaForCausalLM"](tmp_path)
    make_quantized(hf, reordered, {"quant_method": "gptq", "bits": 4}, within="mlp")
    with pytest.raises(CheckpointError, match="act-order"):
        load_ours(tmp_path)


# ---- gpt-oss ----


def mxfp4(tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[..., rows, inputs] -> (blocks, scales, what they stand for)."""
    groups = tensor.unflatten(-1, (-1, GROUP))
    exponent = (groups.abs().amax(-1, keepdim=True) / 6).log2().ceil()
    levels = torch.tensor(E2M1)
    code = (groups.abs()[..., None] * torch.exp2(-exponent)[..., None] - levels).abs().argmin(-1)
    value = levels[code] * groups.sign() * torch.exp2(exponent)
    code = code + 8 * (groups < 0)
    blocks = (code[..., ::2] | code[..., 1::2] << 4).to(torch.uint8)
    return blocks, (exponent[..., 0] + 127).to(torch.uint8), value.flatten(-2)


def make_gpt_oss_mxfp4(path: Path) -> HfModel:
    hf = make_gpt_oss(path, hidden_size=96, intermediate_size=64)

    def quantize(key: str, tensor: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        blocks, scales, value = mxfp4(tensor.mT)
        return {f"{key}_blocks": blocks, f"{key}_scales": scales}, value.mT.contiguous()

    make_quantized(hf, quantize, {"quant_method": "mxfp4"}, ("experts.gate_up_proj", "experts.down_proj"))
    return hf


def test_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    hf = make_gpt_oss_mxfp4(tmp_path)
    assert error(hf) < 1e-4
    kept = load_ours(tmp_path).moe_layers[0][1].experts.format
    assert kept is (WeightFormat.MXFP4 if isa() > Isa.NONE else WeightFormat.PLAIN)
    prompts = [[5, 7, 9, *range(20)], [3]]
    for size in (1, 2, 4):
        mine = [prompts if rank == 0 else [prompts[1]] for rank in range(size)]
        ours = generate_on_ranks(mailbox_models(tmp_path, size), mine, 16)
        assert ours == [hf.continued(own, tokens) for own, tokens in zip(mine, ours, strict=True)]


def test_an_expert_of_gpt_oss_can_be_read_at_any_time(tmp_path: Path) -> None:
    """As a rank does that takes over an expert of a lost one, on a thread of its own."""
    make_gpt_oss_mxfp4(tmp_path)
    model, whole = load_ours(tmp_path), load_ours(tmp_path)
    checkpoint = Checkpoint(tmp_path, names=read_config(tmp_path).key_names)
    staged, num_bytes = checkpoint.stage(model.expert_keys(checkpoint, 1, 6))
    with torch.inference_mode():
        model.read_expert(staged, 1, 3, 6)
    ours, theirs = (m.expert_storage(1, slot) for m, slot in ((model, 3), (whole, 6)))
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))
    assert 0 < num_bytes < 2 * (3 * 96 * 64) // 2


# ---- what is refused ----


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (compressed("int", 8, "int-quantized", strategy="channel"), r"weights.num_bits: expected 8 of type float or 4"),
        (compressed("float", 8, "float-quantized", strategy="group"), "weights.strategy: expected"),
        (compressed("int", 4, "pack-quantized", strategy="group", actorder="group"), "weights.actorder: expected null"),
        ({**INT4, "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme: expected null"),
        ({**INT4, "quantization_status": "frozen"}, "quantization_status: expected"),
        ({**INT4, "format": "marlin-24"}, "format: expected"),
        ({"quant_method": "mxfp4"}, "MXFP4 is read of gpt-oss only"),
        ({"quant_method": "hqq"}, r"quant_method: expected \"fp8\", \"compressed-tensors\", \"awq\""),
        ({"quant_method": "gptq"}, "bits: expected"),
        ({"quant_method": "gptq", "bits": 8}, "bits: expected 4"),
        ({"quant_method": "gptq", "bits": 4, "desc_act": True}, "desc_act: expected"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version: expected"),
    ],
)
def test_other_schemes_are_refused_by_name(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    make_llama(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "quantization_config": config}))
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path)
