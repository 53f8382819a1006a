"""Sizes of a model that the cost model and the memory curves need. Bytes and parameter counts only: no weights, no
torch.

Legend: D hidden, E logical experts, K experts per token, F expert width, H heads, L layers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

# Bytes of one weight. fp8: blocks of 128 x 128 with a float32 scale (0.02 % more, left out); nvfp4: 16 values share an
# FP8 scale.
WEIGHT_BYTES = {"bf16": 2.0, "fp8": 1.0, "nvfp4": 0.5625}


class ModelShape(Struct, frozen=True):
    """What a layer costs, read from a model's config. kv_lora_rank 0 means grouped-query attention, else MLA.

    Sizes are counts of elements; `expert_dtype` is the type of the routed and shared experts' weights.
    """

    name: str
    num_layers: int
    num_dense_layers: int  # the first layers, which have a plain MLP
    hidden: int
    num_experts: int
    experts_per_token: int
    moe_intermediate_size: int
    num_shared_experts: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    expert_dtype: str = "fp8"
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    num_groups: int = 1  # groups of experts, of which a token may use groups_per_token
    groups_per_token: int = 1

    def __post_init__(self) -> None:
        if self.expert_dtype not in WEIGHT_BYTES:
            raise ValueError(f"expert dtype is {self.expert_dtype!r}; known are {', '.join(WEIGHT_BYTES)}")
        if not 0 <= self.num_dense_layers < self.num_layers:
            raise ValueError(
                f"model {self.name}: {self.num_dense_layers} dense layers of {self.num_layers} leave no MoE layer"
            )
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"model {self.name}: {self.experts_per_token} experts per token of {self.num_experts} is out of range"
            )

    @property
    def num_moe_layers(self) -> int:
        return self.num_layers - self.num_dense_layers

    @property
    def is_mla(self) -> bool:
        return self.kv_lora_rank > 0

    @property
    def expert_params(self) -> int:
        """Weights of one expert of one layer: gate, up and down projections."""
        return 3 * self.hidden * self.moe_intermediate_size

    @property
    def expert_bytes(self) -> float:
        """Bytes of one expert of one layer, and so of moving it once."""
        return self.expert_params * WEIGHT_BYTES[self.expert_dtype]

    @property
    def attention_params(self) -> int:
        """Weights of one layer's attention projections."""
        if not self.is_mla:
            return self.hidden * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        query = self.num_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        if self.q_lora_rank:
            down_up = self.hidden * self.q_lora_rank + self.q_lora_rank * query
        else:
            down_up = self.hidden * query
        latent = self.hidden * (self.kv_lora_rank + self.qk_rope_head_dim)
        expand = self.kv_lora_rank * self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        return down_up + latent + expand + self.num_heads * self.v_head_dim * self.hidden

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of the whole cache for one token (bfloat16)."""
        per_layer = self.kv_lora_rank + self.qk_rope_head_dim if self.is_mla else 2 * self.num_kv_heads * self.head_dim
        return 2.0 * per_layer * self.num_layers

    @property
    def replicated_bytes(self) -> float:
        """What every GPU holds under data-parallel attention: all but the routed experts. Projections as `expert_dtype`
        (never below fp8), embedding and head in bfloat16."""
        dense = (
            self.attention_params * self.num_layers + 3 * self.hidden * self.intermediate_size * self.num_dense_layers
        )
        shared = self.expert_params * self.num_shared_experts * self.num_moe_layers
        return (dense + shared) * max(1.0, WEIGHT_BYTES[self.expert_dtype]) + 2 * 2.0 * self.vocab_size * self.hidden

    def with_dtype(self, expert_dtype: str) -> ModelShape:
        """The same model with its experts in another type. Raises ValueError for a type not known."""
        return structs.replace(self, expert_dtype=expert_dtype)


_DEEPSEEK_V3 = ModelShape(
    name="deepseek-v3", num_layers=61, num_dense_layers=3, hidden=7168, num_experts=256, experts_per_token=8,
    moe_intermediate_size=2048, num_shared_experts=1, intermediate_size=18432, num_heads=128, num_kv_heads=128,
    head_dim=192, vocab_size=129280, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
    v_head_dim=128,
    num_groups=8, groups_per_token=4,
)  # fmt: skip
_QWEN3_235B = ModelShape(
    name="qwen3-235b", num_layers=94, num_dense_layers=0, hidden=4096, num_experts=128, experts_per_token=8,
    moe_intermediate_size=1536, num_shared_experts=0, intermediate_size=12288, num_heads=64, num_kv_heads=4,
    head_dim=128, vocab_size=151936,
)  # fmt: skip
_QWEN3_30B = ModelShape(
    name="qwen3-30b-a3b", num_layers=48, num_dense_layers=0, hidden=2048, num_experts=128, experts_per_token=8,
    moe_intermediate_size=768, num_shared_experts=0, intermediate_size=6144, num_heads=32, num_kv_heads=4, head_dim=128,
    vocab_size=151936, expert_dtype="bf16",
)  # fmt: skip
MODELS = {shape.name: shape for shape in (_DEEPSEEK_V3, _QWEN3_235B, _QWEN3_30B)}


def load_shape(name_or_path: str, expert_dtype: str | None = None) -> ModelShape:
    """A named model or a Hugging Face config.json (or its folder).

    Raises ValueError, naming the file and the key, when it is neither or a key is missing.
    """
    shape = MODELS.get(name_or_path)
    if shape is None:
        path = Path(name_or_path)
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise ValueError(f"--model {name_or_path}: not a file and none of {', '.join(MODELS)}")
        shape = _from_config(path)
    return shape if expert_dtype is None else shape.with_dtype(expert_dtype)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a small file that a person wrote. ValueError naming the file when it is none."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a JSON file: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds a {type(value).__name__}; it must be a JSON object")
    return value


def _from_config(path: Path) -> ModelShape:
    config = read_object(path)

    def number(*keys: str, default: int | None = None) -> int:
        for key in keys:
            value: Any = config.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
                return value
            if value is not None:
                raise ValueError(f"{path}: {key} is {value!r}; it must be a whole number, 0 or more")
        if default is None:
            raise ValueError(f"{path}: has no key {' or '.join(keys)}; it must be the config of an MoE model")
        return default

    heads, hidden = number("num_attention_heads"), number("hidden_size")
    quantised = config.get("quantization_config")
    fp8 = isinstance(quantised, dict) and quantised.get("quant_method") == "fp8"
    return ModelShape(
        name=path.parent.name or path.stem,
        num_layers=number("num_hidden_layers"),
        num_dense_layers=number("first_k_dense_replace", default=0),
        hidden=hidden,
        num_experts=number("n_routed_experts", "num_experts"),
        experts_per_token=number("num_experts_per_tok"),
        moe_intermediate_size=number("moe_intermediate_size"),
        num_shared_experts=number("n_shared_experts", default=0),
        intermediate_size=number("intermediate_size", default=0),
        num_heads=heads,
        num_kv_heads=number("num_key_value_heads", default=heads),
        head_dim=number("head_dim", default=hidden // max(heads, 1)),
        vocab_size=number("vocab_size"),
        expert_dtype="fp8" if fp8 else "bf16",
        q_lora_rank=number("q_lora_rank", default=0),
        kv_lora_rank=number("kv_lora_rank", default=0),
        qk_nope_head_dim=number("qk_nope_head_dim", default=0),
        qk_rope_head_dim=number("qk_rope_head_dim", default=0),
        v_head_dim=number("v_head_dim", default=0),
        num_groups=max(1, number("n_group", default=1)),
        groups_per_token=max(1, number("topk_group", default=1)),
    )
