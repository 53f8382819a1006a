"""Configurations of DeepSeek-V2 (V2, V2-Lite, Coder-V2), DeepSeek-V3 (V3, R1, V3.1), the models built like V3
(Kimi-K2, Moonlight, GLM-4.7-Flash), and those with sparse attention: DeepSeek-V3.2 and GLM-5. Free of torch.

https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/config.json and its V2 sibling are the sources of the names.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from cache.spec import CacheGroup, CacheSpec, Field
from layers.rope_parameters import RopeParameters, yarn_mscale
from models.deepseek.index_config import GLM_DSA, SPARSE, IndexConfig, read_index
from models.eagle3.config import Eagle3Config
from models.fields import Fields
from models.key_names import KIMI_WRAPPER, PLAIN, KeyNames
from models.quantization import check_quantization
from models.router_config import RouterConfig, RouterMethod, read_groups
from models.shared_facts import SharedFacts
from models.shared_fields import read_rope

V2 = "DeepseekV2ForCausalLM"
_LITE = "Glm4MoeLiteForCausalLM"
# All but V2 route as DeepSeek-V3 does. Glm4MoeLite: GLM-4.7-Flash.
ARCHITECTURES = (V2, "DeepseekV3ForCausalLM", "KimiK2ForCausalLM", _LITE, *SPARSE)
# What transformers takes for keys that config.json does not have.
_V3_ABSENT = {
    "q_lora_rank": 1536, "first_k_dense_replace": 3, "n_shared_experts": 1, "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}  # fmt: skip
_ABSENT: dict[str, dict[str, Any]] = {
    V2: {"q_lora_rank": 1536, "n_shared_experts": 2},
    _LITE: {
        **_V3_ABSENT, "q_lora_rank": 768, "first_k_dense_replace": 1, "routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5
    },
    GLM_DSA: {**_V3_ABSENT, "q_lora_rank": 2048, "rms_norm_eps": 1e-5},
}  # fmt: skip
_MLP_KINDS = ("dense", "sparse")
WRAPPED = "_wrapped"  # a field of our own: `parse` is given the text_config of a model with vision
LATENT_NORM_EPS = 1e-6  # of the norms inside attention: the originals do not pass rms_norm_eps to them


class DeepseekConfig(SharedFacts, Struct, frozen=True):
    """q_lora_rank 0: queries come from one projection. router None and num_experts 0: a dense model.

    moe_layers: those with routed experts, in order; what drafts has some if the last has. num_mtp_layers: extra layers
    in the checkpoint, numbered after the last, that predict further tokens. drafts: the first of them is served
    (models/mtp.py). index: None: attention is dense. head_gates: what each head of attention gives is multiplied by a
    sigmoid.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position_embeddings: int
    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    attention_bias: bool
    rms_norm_eps: float
    rope: RopeParameters
    rope_interleave: bool
    intermediate_size: int
    num_mtp_layers: int
    tie_word_embeddings: bool
    moe_layers: tuple[int, ...]
    num_experts: int
    moe_intermediate_size: int
    num_shared_experts: int
    router: RouterConfig | None
    index: IndexConfig | None = None
    key_names: KeyNames = PLAIN
    drafts: bool = False
    whole_drafts: bool = False
    head_gates: bool = False
    eagle3: Eagle3Config | None = None

    @property
    def mla_dims(self) -> tuple[int, int, int, int, int]:
        return self.num_heads, self.qk_nope_head_dim, self.qk_rope_head_dim, self.kv_lora_rank, self.v_head_dim

    @property
    def attention_scale(self) -> float:
        """What scores are multiplied by: 1 / sqrt(key width), and yarn's temperature if mscale_all_dim asks for it."""
        scale = float((self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5)
        if self.rope.kind == "default" or not self.rope.mscale_all_dim:
            return scale
        mscale = yarn_mscale(self.rope.factor, self.rope.mscale_all_dim)
        return scale * mscale * mscale

    def own_cache(self, dtype: str, fp8: bool) -> CacheSpec:
        """One row per token and layer: the latent, then the rotated key; in FP8 the rows of mla/latent_fp8.py. Layers
        with an indexer keep its key beside it; in FP8 the rows of mla/index_keys.py."""
        if fp8 and (self.kv_lora_rank % 4 or self.qk_rope_head_dim % 2):
            widths = f"kv_lora_rank {self.kv_lora_rank} and qk_rope_head_dim {self.qk_rope_head_dim}"
            raise ValueError(f"latents in FP8 need multiples of 4 and 2, not {widths}")
        if fp8:
            width = self.kv_lora_rank + 4 * -(-self.kv_lora_rank // 128) + 2 * self.qk_rope_head_dim
            latent = Field("latent", (width,), "uint8")
        else:
            latent = Field("latent", (self.kv_lora_rank + self.qk_rope_head_dim,), dtype)
        fields = (latent,) if self.index is None else (latent, self._index_key(self.index, dtype, fp8))
        return (CacheGroup("paged", tuple(range(self.num_layers + self.drafts)), fields),)

    def has_indexer(self, layer: int) -> bool:
        """The layer that drafts has one of its own."""
        return self.index is not None and (layer in self.index.full_layers or layer == self.num_layers)

    def _index_key(self, index: IndexConfig, dtype: str, fp8: bool) -> Field:
        layers = None
        if len(index.full_layers) < self.num_layers:
            layers = tuple(layer for layer in range(self.num_layers + self.drafts) if self.has_indexer(layer))
        if fp8:
            return Field("index_key", (index.key_bytes(),), "uint8", layers)
        return Field("index_key", (index.head_dim,), dtype, layers)


def parse(raw: dict[str, Any], source: str) -> DeepseekConfig:
    """config.json, as transformers 4 or 5 (or DeepSeek) writes it -> DeepseekConfig.

    Raises ConfigError (one line: file, field, what was expected) for a missing or wrong field, and for fields that ask
    for arithmetic that is not implemented. Sizes have no defaults; switches default as in transformers.
    """
    architecture = Fields(raw, source).first_of("architectures")
    fields = Fields({**_ABSENT.get(architecture, _V3_ABSENT), **raw}, source)
    _refuse_unsupported(fields, architecture)
    num_layers = fields.integer("num_hidden_layers")
    max_position = fields.integer("max_position_embeddings")
    qk_rope_head_dim = fields.integer("qk_rope_head_dim")
    if qk_rope_head_dim % 2:
        raise fields.error("qk_rope_head_dim", "an even number")
    # transformers 5 knows the field by a second name
    mtp = "num_nextn_predict_layers" if fields.has("num_nextn_predict_layers") else "num_mtp_layers"
    experts = _experts(fields, architecture, num_layers)
    return DeepseekConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        num_layers=num_layers,
        max_position_embeddings=max_position,
        num_heads=fields.integer("num_attention_heads"),
        q_lora_rank=fields.integer("q_lora_rank", 0, minimum=0),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim"),
        qk_rope_head_dim=qk_rope_head_dim,
        v_head_dim=fields.integer("v_head_dim"),
        attention_bias=fields.flag("attention_bias", False),
        rms_norm_eps=fields.positive("rms_norm_eps", 1e-6),
        rope=read_rope(fields, qk_rope_head_dim, max_position),
        rope_interleave=architecture == V2 or fields.flag("rope_interleave", True),
        intermediate_size=fields.integer("intermediate_size"),
        num_mtp_layers=fields.integer(mtp, 0, minimum=0),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        index=read_index(fields, architecture, num_layers, qk_rope_head_dim),
        key_names=KIMI_WRAPPER if fields.flag(WRAPPED, False) else PLAIN,
        **experts,
    )


def _experts(fields: Fields, architecture: str, num_layers: int) -> dict[str, Any]:
    name = "n_routed_experts" if fields.has("n_routed_experts") else "num_local_experts"  # transformers 5's second name
    moe_layers = _moe_layers(fields, num_layers)
    if not {"n_routed_experts", "num_local_experts"} & fields.raw.keys():
        raise fields.error("n_routed_experts", "a whole number, or null for a dense model")
    if not fields.has(name) or not moe_layers:
        return {
            "moe_layers": (), "num_experts": 0, "moe_intermediate_size": 0, "num_shared_experts": 0, "router": None
        }  # fmt: skip
    num_experts = fields.integer(name)
    return {
        "moe_layers": moe_layers,
        "num_experts": num_experts,
        "moe_intermediate_size": fields.integer("moe_intermediate_size"),
        "num_shared_experts": fields.integer("n_shared_experts", 0, minimum=0),
        "router": _router(fields, architecture, num_experts),
    }


def _moe_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """By mlp_layer_types (GLM-4.7-Flash), or all from first_k_dense_replace on."""
    kinds = fields.raw.get("mlp_layer_types")
    if kinds is None:
        return tuple(range(fields.integer("first_k_dense_replace", 0, minimum=0), num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in _MLP_KINDS for kind in kinds):
        raise fields.error("mlp_layer_types", f"{num_layers} of " + " or ".join(_MLP_KINDS))
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "sparse")


def _router(fields: Fields, architecture: str, num_experts: int) -> RouterConfig:
    method: RouterMethod = "noaux_tc"
    if architecture == V2:
        method = "group_limited_greedy" if fields.text("topk_method", "greedy") == "group_limited_greedy" else "greedy"
    groups = (1, 1)
    if method != "greedy":
        groups = read_groups(fields, num_experts, fewest=2 if method == "noaux_tc" else 1)
    eligible = num_experts // groups[0] * groups[1]
    per_token = fields.integer("num_experts_per_tok")
    if per_token > eligible:
        raise fields.error("num_experts_per_tok", f"at most the experts of topk_group groups ({eligible})")
    return RouterConfig(
        method,
        per_token,
        *groups,
        norm_topk_prob=architecture != V2 and fields.flag("norm_topk_prob", True),
        routed_scaling_factor=fields.number("routed_scaling_factor", 1.0),
    )


def _refuse_unsupported(fields: Fields, architecture: str) -> None:
    fields.only("hidden_act", "silu")
    fields.only("moe_layer_freq", None, 1)
    check_quantization(fields)
    if architecture == V2:
        fields.only("topk_method", None, "greedy", "group_limited_greedy")
        fields.only("scoring_func", None, "softmax")
        fields.only("norm_topk_prob", None, False)
        fields.only("mlp_bias", None, False)
    else:
        fields.only("topk_method", None, "noaux_tc")
        fields.only("scoring_func", None, "sigmoid")
    heads = fields.integer("num_attention_heads")
    fields.only("num_key_value_heads", None, heads, reason="is supported: every head has its own key from the latent")
