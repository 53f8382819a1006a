"""Qwen3, Qwen3-MoE, and the dense shapes that one attention class covers: Qwen2, Llama, Mistral. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cache.spec import CacheGroup, CacheSpec, Field
from layers.rope_parameters import RopeParameters
from models.fields import Fields
from models.shared_fields import check_quantization, context_limit, read_rope


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture's name decides. bias: which biases its config.json may ask for."""

    qk_norm: bool = False
    qkv_bias: bool | None = None  # None: the field attention_bias says
    may_bias_mlp: bool = False
    has_experts: bool = False
    default_window: int | None = None  # of a config.json that does not say sliding_window; None: it has no such field
    split_head: bool = True  # head_dim defaults to hidden_size / num_attention_heads; else to 128


ARCHITECTURES: dict[str, Family] = {
    "Qwen3ForCausalLM": Family(qk_norm=True, split_head=False),
    "Qwen3MoeForCausalLM": Family(qk_norm=True, has_experts=True),
    "Qwen2ForCausalLM": Family(qkv_bias=True),
    "LlamaForCausalLM": Family(may_bias_mlp=True),
    "MistralForCausalLM": Family(qkv_bias=False, default_window=4096),
}


@dataclass(frozen=True, slots=True)
class Qwen3Config:
    """moe_layers: which layers have routed experts, in order (empty for a dense model). intermediate_size is that of
    the other layers. o_bias: bias of the output projection of attention."""

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
    tie_word_embeddings: bool
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    num_experts: int = 0
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    moe_layers: tuple[int, ...] = ()
    window: int | None = None  # tokens that attention looks back; None: all

    @property
    def context_limit(self) -> int:
        return context_limit(self.max_position_embeddings, self.rope, self.window)[0]

    @property
    def context_reason(self) -> str:
        return context_limit(self.max_position_embeddings, self.rope, self.window)[1]

    @property
    def mla_dims(self) -> None:
        return None

    @property
    def num_moe_layers(self) -> int:
        return len(self.moe_layers)

    def cache_spec(self, dtype: str, fp8: bool = False) -> CacheSpec:
        """Keys and values of every layer."""
        if fp8:
            raise ValueError(f"only latents (DeepSeek) can be kept in FP8, {self.architecture} has none")
        shape = (self.num_kv_heads, self.head_dim)
        fields = (Field("key", shape, dtype), Field("value", shape, dtype))
        return (CacheGroup("paged", tuple(range(self.num_layers)), fields),)


def parse(raw: dict[str, Any], source: str) -> Qwen3Config:
    """config.json of a supported architecture -> Qwen3Config.

    Raises ConfigError (one line: file, field, what was expected) for a missing or wrong field, and for fields that ask
    for arithmetic that is not implemented. Defaults of absent fields are those of transformers.
    """
    fields = Fields(raw, source)
    architecture = fields.first_of("architectures")
    family = ARCHITECTURES[architecture]
    _refuse_unsupported(fields, architecture)
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    default_head = hidden_size // num_heads if family.split_head else 128
    head_dim = fields.integer("head_dim", default_head, minimum=2)
    if head_dim % 2:
        raise fields.error("head_dim", "an even number")
    max_position = fields.integer("max_position_embeddings")
    attention_bias = fields.flag("attention_bias", False) if family.qkv_bias is None else False
    common: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden_size,
        "num_layers": fields.integer("num_hidden_layers"),
        "max_position_embeddings": max_position,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": fields.integer("intermediate_size"),
        "rms_norm_eps": fields.positive("rms_norm_eps", 1e-6),
        "rope": read_rope(fields, head_dim, max_position),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
        "qk_norm": family.qk_norm,
        "qkv_bias": attention_bias if family.qkv_bias is None else family.qkv_bias,
        "o_bias": attention_bias,
        "mlp_bias": family.may_bias_mlp and fields.flag("mlp_bias", False),
    }
    if family.default_window is not None:
        given = "sliding_window" in fields.raw
        common["window"] = fields.integer("sliding_window") if fields.has("sliding_window") else None
        if not given:
            common["window"] = family.default_window
    experts = _experts(fields, common["num_layers"]) if family.has_experts else {}
    return Qwen3Config(**common, **experts)


def _experts(fields: Fields, num_layers: int) -> dict[str, Any]:
    name = "num_experts" if fields.has("num_experts") else "num_local_experts"  # transformers 5 writes the latter
    if not fields.has(name):
        raise fields.error("num_experts", "a whole number")
    num_experts = fields.integer(name, minimum=0)
    step = fields.integer("decoder_sparse_step", 1)
    mlp_only = fields.integers("mlp_only_layers", ())
    layers = tuple(l for l in range(num_layers) if l not in mlp_only and num_experts > 0 and (l + 1) % step == 0)
    if not layers:
        return {}
    per_token = fields.integer("num_experts_per_tok")
    if per_token > num_experts:
        raise fields.error("num_experts_per_tok", f"at most {name} ({num_experts})")
    return {
        "num_experts": num_experts,
        "experts_per_token": per_token,
        "moe_intermediate_size": fields.integer("moe_intermediate_size"),
        "norm_topk_prob": fields.flag("norm_topk_prob", False),
        "moe_layers": layers,
    }


def _refuse_unsupported(fields: Fields, architecture: str) -> None:
    fields.only("hidden_act", "silu")
    check_quantization(fields)
    if architecture.startswith("Qwen"):
        fields.only("use_sliding_window", None, False)
    layer_types = fields.raw.get("layer_types")
    if layer_types is not None and (not isinstance(layer_types, list) or set(layer_types) - {"full_attention"}):
        raise fields.error("layer_types", 'a list of "full_attention" (no other attention is implemented)')
