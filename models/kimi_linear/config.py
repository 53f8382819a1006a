"""Configurations of Kimi-Linear and Ling-3. Free of torch.

Their layers with full attention and their experts are DeepSeek-V3's under other names (models/deepseek/config.py). The
names are those of https://huggingface.co/moonshotai/Kimi-Linear-48B-A3B-Instruct/blob/main/config.json and of the
config classes in Hugging Face transformers.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import fields as fields_of

from cache.spec import CacheSpec
from layers.rope_parameters import RopeParameters
from models.deepseek import config as deepseek
from models.delta_cache import delta_group
from models.fields import Fields
from models.key_names import LING, MIXTRAL

KIMI, LING_3 = "KimiLinearForCausalLM", "BailingHybridForCausalLM"
ARCHITECTURES = (KIMI, LING_3)
_KINDS = ("linear_attention", "full_attention")
_OWN_NAMES = {  # of what DeepSeek-V3 calls otherwise
    "model_max_length": "max_position_embeddings",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
}
_ABSENT: dict[str, dict[str, Any]] = {  # what transformers takes for keys that config.json does not have
    KIMI: {
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.446, "rms_norm_eps": 1e-5
    },
    LING_3: {
        "n_group": 8, "topk_group": 4, "first_k_dense_replace": 2, "rope_theta": 6e6, "num_nextn_predict_layers": 1,
    },
}  # fmt: skip


class KimiLinearConfig(deepseek.DeepseekConfig, frozen=True):
    """full_layers: those with latent attention; the others keep a state, with a decay for each channel of a key
    (layers/gated_delta.py). linear_dim: the width of a head's keys and values. kept_drafts: the most drafts of a
    sequence in a step. narrow_gates: decays and gates of the output are projected in two steps. lower_bound: of a
    decay's logarithm, 0: none."""

    full_layers: tuple[int, ...] = ()
    linear_heads: int = 0
    linear_dim: int = 0
    conv_taps: int = 0
    kept_drafts: int = 0
    narrow_gates: bool = True
    lower_bound: float = 0.0

    def own_cache(self, dtype: str, fp8: bool) -> CacheSpec:
        """The latents of the layers with full attention; of the others what models/delta_cache.py says."""
        (paged,) = super().own_cache(dtype, fp8)
        linear_layers = tuple(layer for layer in range(self.num_layers) if layer not in self.full_layers)
        size = self.linear_heads * self.linear_dim
        sizes = self.conv_taps, 3 * size, (self.linear_heads, self.linear_dim, self.linear_dim), size
        groups = (
            delta_group(linear_layers, *sizes, dtype, self.kept_drafts),
            paged._replace(layers=self.full_layers),
        )
        return tuple(group for group in groups if group.layers)


def parse(raw: dict[str, Any], source: str) -> KimiLinearConfig:
    """Raises ConfigError, as models.deepseek.config.parse."""
    fields = Fields(raw, source)
    architecture = fields.first_of("architectures")
    as_deepseek = {_OWN_NAMES.get(name, name): value for name, value in raw.items()} | {
        "architectures": ["DeepseekV3ForCausalLM"]
    }
    absent = {"q_lora_rank": None, **_ABSENT[architecture]}
    if architecture == KIMI:
        fields.only("moe_router_activation_func", None, "sigmoid")
        fields.only("mla_use_nope", None, True)
        rotated: dict[str, Any] = {"rope_parameters": None, "rope_scaling": None}
    else:
        fields.only("q_lora_rank", None)
        rotated = {"rope_interleave": True}
    base = deepseek.parse({**absent, **as_deepseek, **rotated}, source)
    own = {"architecture": architecture, "tie_word_embeddings": False}  # a head of its own whatever the field says
    own |= _kimi(fields, base) if architecture == KIMI else _ling(fields, base)
    if not own["full_layers"]:
        raise fields.error("layer_types", 'at least one "full_attention"')
    return KimiLinearConfig(**{field.name: getattr(base, field.name) for field in fields_of(base)} | own)


def _kimi(fields: Fields, base: deepseek.DeepseekConfig) -> dict[str, Any]:
    linear = fields.section("linear_attn_config") if fields.has("linear_attn_config") else None

    def size(inner: str, outer: str, default: int, minimum: int = 1) -> int:
        outside = fields.integer(outer, default, minimum)
        return outside if linear is None else linear.integer(inner, outside, minimum)

    return {
        "rope": RopeParameters(base.qk_rope_head_dim, base.rope.theta, "none"),
        "rope_interleave": False,
        "key_names": MIXTRAL,
        "num_mtp_layers": 0,  # none is served
        "full_layers": _full_layers(fields, linear, base.num_layers),
        "linear_heads": size("num_heads", "linear_num_heads", 32),
        "linear_dim": size("head_dim", "linear_head_dim", 128),
        "conv_taps": size("short_conv_kernel_size", "linear_conv_kernel_dim", 4, minimum=2),
    }


def _ling(fields: Fields, base: deepseek.DeepseekConfig) -> dict[str, Any]:
    """Ling-3: every layer_group_size-th layer has full attention. What predicts further tokens is skipped."""
    lower_bound = fields.number("kda_lower_bound", -5.0)
    if lower_bound >= 0:
        raise fields.error("kda_lower_bound", "a number below 0")
    group = fields.integer("layer_group_size", 6)
    every = tuple(range(group - 1, base.num_layers, group))
    return {
        "key_names": LING,
        "full_layers": every if fields.raw.get("layer_types") is None else _full_layers(fields, None, base.num_layers),
        # transformers writes the second names beside the first, which it changes
        "linear_heads": fields.integer("linear_num_heads", base.num_heads),
        "linear_dim": fields.integer("linear_head_dim", fields.integer("head_dim", 128)),
        "conv_taps": fields.integer("linear_conv_kernel_dim", fields.integer("short_conv_kernel_size", 4), minimum=2),
        "narrow_gates": False,
        "head_gates": True,
        "lower_bound": lower_bound if fields.flag("kda_safe_gate", True) else 0.0,
    }


def _full_layers(fields: Fields, linear: Fields | None, num_layers: int) -> tuple[int, ...]:
    """By layer_types; by linear_attn_config, which counts layers from 1; or every fourth but the first."""
    kinds = fields.raw.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != num_layers or set(kinds) - set(_KINDS):
            raise fields.error("layer_types", f"{num_layers} of " + " or ".join(_KINDS))
        return tuple(layer for layer, kind in enumerate(kinds) if kind == "full_attention")
    if linear is None:
        return tuple(range(4, num_layers, 4))
    full, others = linear.integers("full_attn_layers"), linear.integers("kda_layers")
    if sorted((*full, *others)) != list(range(1, num_layers + 1)):
        raise linear.error("full_attn_layers", f"with kda_layers, each of the layers 1 to {num_layers} once")
    return tuple(sorted(layer - 1 for layer in full))
