"""Fields of config.json that mean the same in every family: rotary positions and quantised weights."""

from __future__ import annotations

from layers.rope_parameters import RopeKind, RopeParameters
from models.fields import ConfigError, Fields

_KINDS: dict[str, RopeKind] = {"default": "default", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}


def read_rope(fields: Fields, dim: int, max_position: int) -> RopeParameters:
    """Reads transformers 5's `rope_parameters`, or transformers 4's `rope_theta` and `rope_scaling`.

    Raises ConfigError for a kind that is not supported (default, linear, llama3 and yarn are).
    """
    fields.only("partial_rotary_factor", None, 1, 1.0)
    top_theta = fields.positive("rope_theta", 10000.0)
    name = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    if not fields.has(name):
        return RopeParameters(dim, top_theta)
    inner = fields.section(name)
    key = "rope_type" if inner.has("rope_type") else "type"
    kind = _KINDS.get(inner.text(key, "default"))
    if kind is None:
        raise inner.error(key, "one of " + ", ".join(_KINDS))
    theta = inner.positive("rope_theta", top_theta)
    inner.only("partial_rotary_factor", None, 1, 1.0)
    if kind == "default":
        return RopeParameters(dim, theta)
    original = inner.integer("original_max_position_embeddings", max_position)
    if fields.has("original_max_position_embeddings"):
        original = fields.integer("original_max_position_embeddings")
    if kind == "yarn" and not inner.has("factor"):
        factor = max_position / original
    else:
        factor = inner.positive("factor")
    if kind == "linear":
        return RopeParameters(dim, theta, kind, factor)
    if kind == "llama3":
        low, high = inner.positive("low_freq_factor"), inner.positive("high_freq_factor")
        if high <= low:
            raise inner.error("high_freq_factor", f"a number above low_freq_factor ({low})")
        return RopeParameters(dim, theta, kind, factor, original, low_freq_factor=low, high_freq_factor=high)
    return RopeParameters(
        dim,
        theta,
        kind,
        factor,
        original,
        # transformers reads 0 as "not given" here
        beta_fast=inner.number("beta_fast", 32.0) or 32.0,
        beta_slow=inner.number("beta_slow", 1.0) or 1.0,
        mscale=inner.optional_number("mscale"),
        mscale_all_dim=inner.optional_number("mscale_all_dim"),
        attention_factor=inner.optional_number("attention_factor"),
        truncate=inner.flag("truncate", True),
    )


def check_quantization(fields: Fields) -> None:
    """Accepts no quantisation, or DeepSeek's FP8 in 128 x 128 blocks; refuses everything else by name."""
    if not fields.has("quantization_config"):
        return
    quantization = fields.section("quantization_config")
    if quantization.text("quant_method") != "fp8":
        raise quantization.error("quant_method", '"fp8" (nothing else is supported)')
    if quantization.integers("weight_block_size") != (128, 128):
        raise quantization.error("weight_block_size", "[128, 128] (nothing else is supported)")
    quantization.only("fmt", "e4m3")


__all__ = ["ConfigError", "check_quantization", "read_rope"]
