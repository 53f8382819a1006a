"""What an architecture's name decides about a decoder with grouped-query attention. Free of torch.

Defaults are those of Hugging Face transformers, whose config classes are the source of the names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from models.fields import Fields
from models.gqa import windows
from models.gqa.experts import deepseek_experts, ernie_experts, gpt_oss_experts, mixtral_experts, qwen_experts
from models.gqa.windows import ReadWindows, no_windows
from models.key_names import ERNIE, GPT_OSS, MIXTRAL, PLAIN, QWEN2_MOE, KeyNames

ReadExperts = Callable[[Fields, int], dict[str, Any]]


class Bias(Struct, frozen=True):
    """flag: the field that says whether there is a bias; None: `default` decides."""

    flag: str | None = None
    default: bool = False

    def read(self, fields: Fields) -> bool:
        return self.default if self.flag is None else fields.flag(self.flag, self.default)


ASKED = Bias("attention_bias")
USE_BIAS = Bias("use_bias")  # of every projection


class Family(Struct, frozen=True):
    """qk_norm: as GqaConfig.qk_norm; qk_norm_flag: the field that says whether there is one. qkv, out, mlp, head:
    biases of the projections. windows: reads which layers look back a window of tokens only. sinks: its attention has
    sinks. partial: the part of a head that is rotated; None: all of it, always. interleaved: pairs of rotated
    dimensions lie side by side. experts: reads what GqaConfig says of routed experts, given the number of layers.
    absent: values of keys that config.json does not have. rope: the section of rotary positions where it has none."""

    qk_norm: str = "none"
    qk_norm_flag: str | None = None
    qkv: Bias = Bias()
    out: Bias = Bias()
    mlp: Bias = Bias()
    head: Bias = Bias()
    windows: ReadWindows = no_windows
    sinks: bool = False
    partial: float | None = None
    interleaved: bool = False
    experts: ReadExperts | None = None
    names: KeyNames = PLAIN
    absent: Mapping[str, Any] = {}
    rope: Mapping[str, Any] | None = None
    mtp: bool = False  # its checkpoints may have layers after the last one that predict further tokens


_YARN_OF_GPT_OSS = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
ARCHITECTURES: dict[str, Family] = {
    "Qwen3ForCausalLM": Family(
        qk_norm="head",
        qkv=ASKED,
        out=ASKED,
        windows=windows.qwen,
        absent={"head_dim": 128, "num_key_value_heads": 32},
    ),
    "Qwen3MoeForCausalLM": Family(
        qk_norm="head",
        qkv=ASKED,
        out=ASKED,
        experts=qwen_experts,
        windows=windows.qwen3_moe,
        absent={"num_key_value_heads": 4},
    ),
    "Qwen2ForCausalLM": Family(qkv=Bias(default=True), windows=windows.qwen, absent={"num_key_value_heads": 32}),
    "Qwen2MoeForCausalLM": Family(
        qkv=Bias("qkv_bias", True),
        experts=qwen_experts,
        names=QWEN2_MOE,
        windows=windows.qwen2_moe,
        absent={"num_key_value_heads": 16, "shared_expert_intermediate_size": 5632},
    ),
    "LlamaForCausalLM": Family(qkv=ASKED, out=ASKED, mlp=Bias("mlp_bias")),
    "MistralForCausalLM": Family(windows=windows.everywhere(4096), absent={"num_key_value_heads": 8}),
    "MixtralForCausalLM": Family(
        experts=mixtral_experts,
        names=MIXTRAL,
        windows=windows.everywhere(None),
        absent={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    ),
    "MiniMaxM2ForCausalLM": Family(
        qk_norm="vector",
        partial=1.0,
        experts=mixtral_experts,
        names=MIXTRAL,
        absent={"head_dim": 128, "num_key_value_heads": 8, "rope_theta": 5e6},
    ),
    "Glm4MoeForCausalLM": Family(
        qk_norm="head",
        qk_norm_flag="use_qk_norm",
        qkv=ASKED,
        partial=0.5,
        experts=deepseek_experts,
        mtp=True,
        absent={"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    ),
    "Dots1ForCausalLM": Family(
        qk_norm="head",
        qkv=ASKED,
        out=ASKED,
        experts=deepseek_experts,
        windows=windows.dots,
        absent={"num_key_value_heads": 32},
    ),
    "DeepseekForCausalLM": Family(qkv=ASKED, out=ASKED, experts=deepseek_experts),
    "Ernie4_5_MoeForCausalLM": Family(
        qkv=USE_BIAS,
        out=USE_BIAS,
        mlp=USE_BIAS,
        head=USE_BIAS,
        interleaved=True,
        experts=ernie_experts,
        names=ERNIE,
        absent={"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": True},
    ),
    "GptOssForCausalLM": Family(
        qkv=Bias("attention_bias", True),
        out=Bias("attention_bias", True),
        experts=gpt_oss_experts,
        names=GPT_OSS,
        windows=windows.gpt_oss,
        sinks=True,
        absent={"head_dim": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 150000.0},
        rope=_YARN_OF_GPT_OSS,
    ),
}
