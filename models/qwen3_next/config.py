"""Configurations of Qwen3-Next and of the text part of Qwen3.5 and 3.6, with experts and dense. Free of torch.

Most of it is read as Qwen3-MoE's (models/gqa/config.py). The config classes of Hugging Face transformers are the source
of the other names.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import fields as fields_of
from msgspec.structs import replace

from cache.spec import CacheSpec
from models.delta_cache import delta_group
from models.fields import Fields
from models.gqa import config as gqa
from models.gqa.experts import qwen_experts
from models.gqa.families import ASKED, Family
from models.key_names import QWEN3_NEXT, with_mtp

_DENSE = Family(
    qk_norm="head",
    qkv=ASKED,
    out=ASKED,
    partial=0.25,
    names=QWEN3_NEXT,
    absent={"head_dim": 256, "num_key_value_heads": 4, "norm_topk_prob": True},
)
_MOE = replace(
    _DENSE,
    experts=qwen_experts,
    absent={**_DENSE.absent, "num_key_value_heads": 2, "shared_expert_intermediate_size": 512},
)
NEXT = "Qwen3NextForCausalLM"
ARCHITECTURES = {NEXT: _MOE, "Qwen3_5MoeForCausalLM": _MOE, "Qwen3_5ForCausalLM": _DENSE}
_KINDS = ("linear_attention", "full_attention")
_OF_IMAGES = ("mrope_section", "mrope_interleaved")  # positions of text are the same in every section


class Qwen3NextConfig(gqa.GqaConfig, frozen=True):
    """full_layers: those that attend to all tokens; the others are gated delta nets (layers/gated_delta.py).
    grouped_keys: the checkpoint has projections of a key head and of its value heads side by side. kept_drafts: the
    most drafts of a sequence in a step."""

    full_layers: tuple[int, ...] = ()
    linear_key_heads: int = 0
    linear_value_heads: int = 0
    linear_key_dim: int = 0
    linear_value_dim: int = 0
    conv_taps: int = 0
    grouped_keys: bool = False
    kept_drafts: int = 0

    def own_cache(self, dtype: str, fp8: bool) -> CacheSpec:
        """Keys and values of the layers with full attention; of the others what models/delta_cache.py says."""
        (paged,) = super().own_cache(dtype, fp8)
        linear_layers = tuple(layer for layer in range(self.num_layers) if layer not in self.full_layers)
        channels = 2 * self.linear_key_heads * self.linear_key_dim + self.linear_value_heads * self.linear_value_dim
        state = self.linear_value_heads, self.linear_key_dim, self.linear_value_dim
        sizes = self.conv_taps, channels, state, self.linear_value_heads
        groups = (
            delta_group(linear_layers, *sizes, dtype, self.kept_drafts),
            paged._replace(layers=(*self.full_layers, *range(self.num_layers, self.num_layers + self.drafts))),
        )
        return tuple(group for group in groups if group.layers)


def parse(raw: dict[str, Any], source: str) -> Qwen3NextConfig:
    """Raises ConfigError, as models.gqa.config.parse."""
    fields = Fields(raw, source)
    architecture = fields.first_of("architectures")
    base = gqa.parse(_as_qwen3_moe(fields, architecture), source, ARCHITECTURES[architecture])
    key_heads, value_heads = fields.integer("linear_num_key_heads", 16), fields.integer("linear_num_value_heads", 32)
    if value_heads % key_heads:
        raise fields.error("linear_num_value_heads", f"a multiple of linear_num_key_heads ({key_heads})")
    full_layers = _full_layers(fields, base.num_layers)
    if not full_layers:
        raise fields.error("layer_types", 'at least one "full_attention"')
    num_mtp_layers = _num_mtp_layers(fields)
    own = {
        "output_gate": True,
        "num_mtp_layers": num_mtp_layers,
        "key_names": with_mtp(base.key_names, base.num_layers, num_mtp_layers),
    }
    return Qwen3NextConfig(
        **{field.name: getattr(base, field.name) for field in fields_of(gqa.GqaConfig)} | own,
        full_layers=full_layers,
        linear_key_heads=key_heads,
        linear_value_heads=value_heads,
        linear_key_dim=fields.integer("linear_key_head_dim", 128),
        linear_value_dim=fields.integer("linear_value_head_dim", 128),
        conv_taps=fields.integer("linear_conv_kernel_dim", 4, minimum=2),
        grouped_keys=architecture == NEXT,
    )


def _num_mtp_layers(fields: Fields) -> int:
    """A config.json of Qwen3-Next does not say that its checkpoint has one."""
    qwen3_5 = fields.has("mtp_num_hidden_layers")
    return fields.integer("mtp_num_hidden_layers" if qwen3_5 else "num_nextn_predict_layers", 1, minimum=0)


def _full_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """By layer_types, or every fourth (full_attention_interval)."""
    kinds = fields.raw.get("layer_types")
    if kinds is None:
        interval = fields.integer("full_attention_interval", 4)
        return tuple(range(interval - 1, num_layers, interval))
    if not isinstance(kinds, list) or len(kinds) != num_layers or set(kinds) - set(_KINDS):
        raise fields.error("layer_types", f"{num_layers} of " + " or ".join(_KINDS))
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "full_attention")


def _as_qwen3_moe(fields: Fields, architecture: str) -> dict[str, Any]:
    """What these families say otherwise, or do not say."""
    raw = {name: value for name, value in fields.raw.items() if name != "layer_types"}
    if fields.has("rope_parameters"):
        rope = fields.section("rope_parameters").raw
        raw["rope_parameters"] = {name: value for name, value in rope.items() if name not in _OF_IMAGES}
    if architecture == "Qwen3_5MoeForCausalLM":
        raw = {"intermediate_size": raw.get("moe_intermediate_size"), **raw, "norm_topk_prob": True}
    return raw
