"""What means the same in every family's config.json: rotary positions, and the longest context."""

from __future__ import annotations

from layers.rope_parameters import RopeKind, RopeParameters
from models.fields import Fields

# What a section about rotary positions may say. "finetuned" tells what was done to the weights, not what to compute.
_ROPE_KEYS = frozenset(
    [
        "rope_type",
        "type",
        "rope_theta",
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "attention_factor",
        "attn_factor",
        "truncate",
        "partial_rotary_factor",
        "extrapolation_factor",
        "finetuned",
    ]
)
_KINDS: dict[str, RopeKind] = {"default": "default", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}


def read_rope(fields: Fields, dim: int, max_position: int, partial: float | None = None) -> RopeParameters:
    """Reads transformers 5's `rope_parameters`, or transformers 4's `rope_theta` and `rope_scaling`.

    dim: of a head. partial: which part of it is rotated where config.json does not say; None: all of it, and it may not
    say otherwise.

    Raises ConfigError for a kind that is not supported (default, linear, llama3 and yarn are).
    """
    rotated = _rotated(fields, dim, partial)
    return _read_rope(fields, rotated, max_position, dim - rotated)


def _rotated(fields: Fields, dim: int, partial: float | None) -> int:
    """How many of a head's dimensions are rotated: rotary_dim, or partial_rotary_factor, at the top or among the rope
    parameters."""
    inner = _section(fields)
    holder = inner if inner is not None and inner.has("partial_rotary_factor") else fields
    if partial is None:
        holder.only("partial_rotary_factor", None, 1, 1.0)
        return dim
    if fields.has("rotary_dim") and not holder.has("partial_rotary_factor"):
        rotated = fields.integer("rotary_dim")
        if rotated > dim or rotated % 2:
            raise fields.error("rotary_dim", f"an even number of at most the size of a head ({dim})")
        return rotated
    rotated = int(dim * holder.positive("partial_rotary_factor", partial))
    if not 2 <= rotated <= dim or rotated % 2:
        raise holder.error("partial_rotary_factor", f"a part of a head's {dim} dimensions that is an even number")
    return rotated


def _section(fields: Fields) -> Fields | None:
    name = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    return fields.section(name) if fields.has(name) else None


def _read_rope(fields: Fields, dim: int, max_position: int, unrotated: int) -> RopeParameters:
    top_theta = fields.positive("rope_theta", 10000.0)
    inner = _section(fields)
    if inner is None:
        return RopeParameters(dim, top_theta, unrotated=unrotated)
    key = "rope_type" if inner.has("rope_type") else "type"
    kind = _KINDS.get(inner.text(key, "default"))
    if kind is None:
        raise inner.error(key, "one of " + ", ".join(_KINDS))
    unknown = sorted(name for name in inner.raw.keys() - _ROPE_KEYS if inner.has(name))
    if unknown:
        raise inner.error(unknown[0], f"none: this key is not understood ({', '.join(sorted(_ROPE_KEYS))} are)")
    theta = inner.positive("rope_theta", top_theta)
    inner.only("extrapolation_factor", None, 1, 1.0)
    if kind == "default":
        return RopeParameters(dim, theta, unrotated=unrotated)
    original = inner.integer("original_max_position_embeddings", max_position)
    if fields.has("original_max_position_embeddings"):
        original = fields.integer("original_max_position_embeddings")
    if kind == "yarn" and not inner.has("factor"):
        factor = max_position / original
    else:
        factor = inner.positive("factor")
    if kind == "linear":
        return RopeParameters(dim, theta, kind, factor, unrotated=unrotated)
    if kind == "llama3":
        low, high = inner.positive("low_freq_factor"), inner.positive("high_freq_factor")
        if high <= low:
            raise inner.error("high_freq_factor", f"a number above low_freq_factor ({low})")
        return RopeParameters(
            dim, theta, kind, factor, original, low_freq_factor=low, high_freq_factor=high, unrotated=unrotated
        )
    attn_factor = inner.positive("attn_factor", 1.0)
    if attn_factor != 1.0 and inner.has("attention_factor"):
        raise inner.error("attn_factor", "none beside attention_factor, which replaces what it would multiply")
    return RopeParameters(
        dim,
        theta,
        kind,
        factor,
        original,
        attn_factor=attn_factor,
        # transformers reads 0 as "not given" here
        beta_fast=inner.number("beta_fast", 32.0) or 32.0,
        beta_slow=inner.number("beta_slow", 1.0) or 1.0,
        mscale=inner.optional_number("mscale"),
        mscale_all_dim=inner.optional_number("mscale_all_dim"),
        attention_factor=inner.optional_number("attention_factor"),
        truncate=inner.flag("truncate", True),
        unrotated=unrotated,
    )


def context_limit(max_position: int, rope: RopeParameters) -> tuple[int, str]:
    """The most tokens that a sequence may have, and what says so."""
    limit, why = max_position, "max_position_embeddings"
    stretched = int(rope.original_max_position * rope.factor) if rope.kind == "yarn" else 0
    if stretched > limit:
        limit, why = stretched, "original_max_position_embeddings x factor of its yarn"
    return limit, why
