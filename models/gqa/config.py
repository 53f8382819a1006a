"""Decoders with grouped-query attention: Qwen2 and Qwen3 with and without experts, Llama, Mistral, Mixtral, GLM-4.5,
MiniMax-M2, dots1, DeepSeek-MoE, ERNIE 4.5, gpt-oss. Free of torch.
"""

from __future__ import annotations

import math
from typing import Any

from msgspec import Struct

from cache.spec import CacheGroup, CacheSpec, Field
from layers.rope_parameters import RopeParameters
from models.eagle3.config import Eagle3Config
from models.fields import Fields
from models.gqa.families import ARCHITECTURES, Family
from models.gqa.windows import NO_WINDOWS
from models.key_names import PLAIN, KeyNames
from models.quantization import check_quantization
from models.router_config import RouterConfig
from models.shared_facts import SharedFacts
from models.shared_fields import context_limit, read_rope


class GqaConfig(SharedFacts, Struct, frozen=True):
    """qk_norm: "none", "head" (each head of queries and keys by itself) or "vector" (all heads of the queries as one
    vector, all of the keys as another). o_bias: bias of the output projection of attention. intermediate_size: of the
    layers without experts. moe_layers: which layers have routed experts, in order (empty for a dense model).
    shared_width: of the expert that every token takes; has_shared_gate: it is weighted by a sigmoid. num_mtp_layers:
    layers of the checkpoint after the last one, which predict further tokens; drafts: the first of them is served
    (models/mtp.py), with experts if the last layer has them. window: tokens that a query of window_layers sees, its own
    included; those layers are in order. sinks: attention has sinks (layers/reference.py). expert_biases, activation
    (moe_kernels.activation.Activation): of routed experts."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position_embeddings: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeParameters
    rope_interleave: bool
    tie_word_embeddings: bool
    qk_norm: str
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    head_bias: bool
    num_experts: int = 0
    moe_intermediate_size: int = 0
    router: RouterConfig | None = None
    moe_layers: tuple[int, ...] = ()
    shared_width: int = 0
    has_shared_gate: bool = False
    num_mtp_layers: int = 0
    window: int = 0
    window_layers: tuple[int, ...] = ()
    sinks: bool = False
    expert_biases: bool = False
    activation: tuple[float, float, float] = (1.0, math.inf, 0.0)
    key_names: KeyNames = PLAIN
    output_gate: bool = False  # of attention: the sigmoid of a projection of its own
    drafts: bool = False
    whole_drafts: bool = False
    eagle3: Eagle3Config | None = None

    @property
    def mla_dims(self) -> None:
        return None

    def own_cache(self, dtype: str, fp8: bool) -> CacheSpec:
        """Keys and values of every layer: first of those that see everything, then of those with a window."""
        if fp8:
            raise ValueError(f"only latents (DeepSeek) can be kept in FP8, {self.architecture} has none")
        shape = (self.num_kv_heads, self.head_dim)
        fields = (Field("key", shape, dtype), Field("value", shape, dtype))
        layers = range(self.num_layers + self.drafts)
        everything = tuple(layer for layer in layers if layer not in self.window_layers)
        groups = [CacheGroup("paged", everything, fields)] if everything else []
        if self.window_layers:
            groups.append(CacheGroup("window", self.window_layers, fields, self.window))
        return tuple(groups)


def parse(raw: dict[str, Any], source: str, family: Family | None = None) -> GqaConfig:
    """config.json of a supported architecture -> GqaConfig. family: of an architecture that is not here.

    Raises ConfigError (one line: file, field, what was expected) for a missing or wrong field, and for fields that ask
    for arithmetic that is not implemented. Defaults of absent fields are those of transformers.
    """
    fields = Fields(raw, source)
    architecture = fields.first_of("architectures")
    family = family or ARCHITECTURES[architecture]
    fields = Fields({**family.absent, **raw}, source)
    if family.rope is not None and not fields.has("rope_parameters") and not fields.has("rope_scaling"):
        fields = Fields({**fields.raw, "rope_parameters": dict(family.rope)}, source)
    fields.only("hidden_act", "silu")
    check_quantization(fields)
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    head_dim = fields.integer("head_dim", hidden_size // num_heads, minimum=2)
    if head_dim % 2:
        raise fields.error("head_dim", "an even number")
    max_position = fields.integer("max_position_embeddings")
    num_layers = fields.integer("num_hidden_layers")
    experts = {} if family.experts is None else family.experts(fields, num_layers)
    rope = read_rope(fields, head_dim, max_position, family.partial)
    windows = family.windows(fields, num_layers)
    if windows.size >= context_limit(max_position, rope)[0]:
        windows = NO_WINDOWS  # no sequence is longer
    return GqaConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        max_position_embeddings=max_position,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size"),
        rms_norm_eps=fields.positive("rms_norm_eps", 1e-6),
        rope=rope,
        rope_interleave=family.interleaved,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        qk_norm=_qk_norm(fields, family),
        qkv_bias=family.qkv.read(fields),
        o_bias=family.out.read(fields),
        mlp_bias=family.mlp.read(fields),
        head_bias=family.head.read(fields),
        window=windows.size,
        window_layers=windows.layers,
        sinks=family.sinks,
        key_names=family.names,
        num_mtp_layers=_num_mtp_layers(fields) if family.mtp else 0,
        **experts,
    )


def _qk_norm(fields: Fields, family: Family) -> str:
    if family.qk_norm_flag is not None and not fields.flag(family.qk_norm_flag, False):
        return "none"
    return family.qk_norm


def _num_mtp_layers(fields: Fields) -> int:
    name = "num_nextn_predict_layers" if fields.has("num_nextn_predict_layers") else "num_mtp_layers"
    return fields.integer(name, 0, minimum=0)
