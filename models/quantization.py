"""What config.json says of weights with fewer bits: accepted where layers/stored.py has their form, refused by name
otherwise. Free of torch. The forms themselves are known by their keys.
"""

from __future__ import annotations

from pathlib import Path

from models.fields import ConfigError, Fields

_BLOCK = (128, 128)
_TAKEN = (
    "weights in BF16, FP32, FP8 e4m3 (a scale per 128 x 128 block, per output or per tensor), INT4 of "
    "compressed-tensors (pack-quantized), AWQ and GPTQ (without act-order) and, of gpt-oss, MXFP4 are supported"
)


def check_quantization(fields: Fields) -> None:
    """Raises ConfigError for weights that cannot be read."""
    if not fields.has("quantization_config"):
        return
    quantization = fields.section("quantization_config")
    if not quantization.has("quant_method") and quantization.has("quant_algo"):  # ModelOpt's
        raise quantization.error("quant_algo", f"a quant_method in its place ({_TAKEN})")
    method = quantization.text("quant_method")
    if method == "fp8":
        if quantization.has("weight_block_size") and quantization.integers("weight_block_size") != _BLOCK:
            raise quantization.error("weight_block_size", "[128, 128], or none for one scale per tensor")
        quantization.only("fmt", None, "e4m3", "float8_e4m3fn")
    elif method == "compressed-tensors":
        _check_compressed_tensors(quantization)
    elif method in ("awq", "gptq"):
        if quantization.integer("bits") != 4:
            raise quantization.error("bits", "4")
        quantization.only("version", None, "gemm", "GEMM")
        quantization.only("desc_act", None, False)
        quantization.only("checkpoint_format", None, "gptq", "gemm")
    elif method == "mxfp4":
        if fields.first_of("architectures") != "GptOssForCausalLM":
            raise quantization.error("quant_method", f"another one: MXFP4 is read of gpt-oss only ({_TAKEN})")
    else:
        raise quantization.error("quant_method", f'"fp8", "compressed-tensors", "awq", "gptq" or "mxfp4" ({_TAKEN})')


def is_fp8(fields: Fields) -> bool:
    """Whether the experts of a checkpoint are in FP8, by a quantization_config that was checked."""
    quantization = fields.raw.get("quantization_config") or {}
    groups = quantization.get("config_groups", {}).values()
    return quantization.get("quant_method") == "fp8" or any(group["weights"]["type"] == "float" for group in groups)


def _check_compressed_tensors(quantization: Fields) -> None:
    quantization.only("quantization_status", None, "compressed")
    quantization.only("kv_cache_scheme", None)
    quantization.only("transform_config", None, {})
    if quantization.has("sparsity_config"):
        quantization.section("sparsity_config").only("format", None, "dense")
    groups = quantization.section("config_groups")
    for name in groups.raw:
        group = groups.section(name)
        where = group if group.has("format") else quantization
        weights = group.section("weights")
        kind = weights.text("type"), weights.integer("num_bits")
        weights.only("actorder", None)
        if kind == ("float", 8):
            where.only("format", None, "float-quantized", "naive-quantized")
            weights.only("symmetric", None, True)
            weights.only("strategy", "channel", "tensor", "block")
            if weights.text("strategy") == "block" and weights.integers("block_structure") != _BLOCK:
                raise weights.error("block_structure", "[128, 128]")
        elif kind == ("int", 4):
            where.only("format", "pack-quantized")
            weights.only("strategy", "group", "channel")
        else:
            raise weights.error("num_bits", f"8 of type float or 4 of type int ({_TAKEN})")


def check_modelopt(fields: Fields, directory: Path) -> None:
    """ModelOpt describes what it did to the weights in a file beside config.json, which then has no
    quantization_config."""
    path = directory / "hf_quant_config.json"
    if fields.has("quantization_config") or not path.is_file():
        return
    found = Fields.from_file(path)
    if not found.has("quantization"):
        raise found.error("quantization", "an object")
    quantization = found.section("quantization")
    if quantization.has("quant_algo"):
        raise quantization.error("quant_algo", f"none ({_TAKEN})")


__all__ = ["ConfigError", "check_modelopt", "check_quantization", "is_fp8"]
