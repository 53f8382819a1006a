"""Tiny random Hugging Face checkpoints of every family, and ways to rewrite them. drive.py runs our models on them.

Legend: T tokens, V vocabulary.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from drive import (
    CPU,
    Cache,
    chunked_logits,
    generate_greedy,
    generate_on_ranks,
    load_ours,
    make_step,
    relative_error,
    run_step,
    single_rank,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from layers.weights import BLOCK

__all__ = [
    "CPU",
    "Cache",
    "chunked_logits",
    "generate_greedy",
    "generate_on_ranks",
    "load_ours",
    "make_step",
    "relative_error",
    "run_step",
    "single_rank",
]

VOCAB = 97

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "attn_implementation": "eager",
}


@dataclass
class HfModel:
    """A random Hugging Face model in float32 and the directory it was saved to."""

    model: Any
    path: Path

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """[T] -> float32 [T, V]."""
        with torch.inference_mode():
            return self.model(torch.tensor([list(token_ids)]), use_cache=False).logits[0].float()

    def greedy(self, token_ids: Sequence[int], count: int, guess: Sequence[int] = ()) -> list[int]:
        """The next `count` tokens, each the argmax given all before it. Of a guess of them all is looked at in one
        forward pass up to the first that is another."""
        tokens = list(token_ids)
        while (known := len(tokens) - len(token_ids)) < count:
            drafts = list(guess[known : count - 1])
            found = self.logits(tokens + drafts)[len(tokens) - 1 :].argmax(-1).tolist()
            for draft, best in zip([*drafts, None], found, strict=True):
                tokens.append(best)
                if draft != best:
                    break
        return tokens[len(token_ids) :]

    def continued(self, prompts: Sequence[Sequence[int]], ours: Sequence[Sequence[int]]) -> list[list[int]]:
        """What it says behind each prompt, as many tokens as ours."""
        return [self.greedy(prompt, len(tokens), tokens) for prompt, tokens in zip(prompts, ours, strict=True)]


def make_hf(path: Path, config_class: str, model_class: str, seed: int = 0, **overrides: Any) -> HfModel:
    """Build a random model, with norms and biases that are not ones and zeros, and save it to `path`."""
    config = getattr(transformers, config_class)(**{**SMALL, **overrides})
    config._experts_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(transformers, model_class)(config).float().eval()
    randomize(model)
    model.save_pretrained(path)
    return HfModel(model, path)


def randomize(model: torch.nn.Module) -> None:
    """Weights large enough that the layers matter; norms around one; biases and score corrections around zero."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not tensor.is_floating_point() or "inv_freq" in name or not tensor.numel():
                continue
            if "norm" in name:
                tensor.copy_(1 + 0.2 * torch.randn(tensor.shape))
            elif tensor.dim() == 1:
                tensor.copy_(0.1 * torch.randn(tensor.shape))
            else:
                tensor.copy_(torch.randn(tensor.shape) * tensor.shape[-1] ** -0.5)


def make_qwen3(path: Path, **overrides: Any) -> HfModel:
    return make_hf(path, "Qwen3Config", "Qwen3ForCausalLM", **{"head_dim": 12, **overrides})


def make_qwen3_moe(path: Path, **overrides: Any) -> HfModel:
    experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "norm_topk_prob": True}
    return make_hf(path, "Qwen3MoeConfig", "Qwen3MoeForCausalLM", **{"head_dim": 12, **experts, **overrides})


def make_qwen2(path: Path, **overrides: Any) -> HfModel:
    return make_hf(path, "Qwen2Config", "Qwen2ForCausalLM", **overrides)


def make_llama(path: Path, **overrides: Any) -> HfModel:
    return make_hf(path, "LlamaConfig", "LlamaForCausalLM", **overrides)


def make_mistral(path: Path, **overrides: Any) -> HfModel:
    return make_hf(path, "MistralConfig", "MistralForCausalLM", **{"sliding_window": None, **overrides})


def make_mixtral(path: Path, **overrides: Any) -> HfModel:
    experts = {"num_local_experts": 6, "num_experts_per_tok": 2}
    return make_hf(path, "MixtralConfig", "MixtralForCausalLM", **{**experts, **overrides})


def make_qwen2_moe(path: Path, **overrides: Any) -> HfModel:
    experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
    shared = {"shared_expert_intermediate_size": 20}
    return make_hf(path, "Qwen2MoeConfig", "Qwen2MoeForCausalLM", **{**experts, **shared, **overrides})


def make_minimax_m2(path: Path, **overrides: Any) -> HfModel:
    sizes = {"head_dim": 12, "num_local_experts": 8, "num_experts_per_tok": 3, "rope_parameters": partial_rope(2 / 3)}
    return make_hf(path, "MiniMaxM2Config", "MiniMaxM2ForCausalLM", **{**sizes, **overrides})


GPT_OSS_ROPE = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "truncate": False, "original_max_position_embeddings": 32,
}  # fmt: skip
ROUTED = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
    "n_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.7, "head_dim": 12,
}  # fmt: skip


def make_glm4_moe(path: Path, **overrides: Any) -> HfModel:
    sizes = {**ROUTED, "use_qk_norm": True, "num_mtp_layers": 0, "rope_parameters": partial_rope(0.5)}
    return make_hf(path, "Glm4MoeConfig", "Glm4MoeForCausalLM", **{**sizes, **overrides})


def make_dots1(path: Path, **overrides: Any) -> HfModel:
    return make_hf(path, "Dots1Config", "Dots1ForCausalLM", **{**ROUTED, **overrides})


def make_ernie(path: Path, **overrides: Any) -> HfModel:
    experts = {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 16, "moe_num_shared_experts": 2}
    return make_hf(path, "Ernie4_5_MoeConfig", "Ernie4_5_MoeForCausalLM", **{**experts, **overrides})


LINEAR = {
    "head_dim": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 10,
    "linear_value_head_dim": 6, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
SHARED = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 20,
}


def make_qwen3_next(path: Path, **overrides: Any) -> HfModel:
    sizes = {**LINEAR, **SHARED, "rope_parameters": partial_rope(0.5)}
    return make_hf(path, "Qwen3NextConfig", "Qwen3NextForCausalLM", **{**sizes, **overrides})


def make_qwen3_5_moe(path: Path, **overrides: Any) -> HfModel:
    sizes = {**LINEAR, **SHARED, "rope_parameters": partial_rope(0.5)}
    return make_hf(path, "Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", **{**sizes, **overrides})


def make_qwen3_5(path: Path, **overrides: Any) -> HfModel:
    sizes = {**LINEAR, "rope_parameters": partial_rope(0.5)}
    return make_hf(path, "Qwen3_5TextConfig", "Qwen3_5ForCausalLM", **{**sizes, **overrides})


def make_kimi_linear(path: Path, **overrides: Any) -> HfModel:
    latent = {
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    }
    linear = {"linear_num_heads": 3, "linear_head_dim": 10, "linear_conv_kernel_dim": 4}
    experts = {"num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "n_shared_experts": 1}
    kinds = {"layer_types": LINEAR["layer_types"], "mlp_layer_types": ["dense", "sparse", "sparse"]}
    sizes = {**latent, **linear, **experts, **kinds, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    return make_hf(path, "KimiLinearConfig", "KimiLinearForCausalLM", **{**sizes, **overrides})


def make_ling(path: Path, **overrides: Any) -> HfModel:
    latent = {"kv_lora_rank": 16, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 8, "head_dim": 10}
    experts = {"num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "n_shared_experts": 1}
    kinds = {"layer_types": LINEAR["layer_types"], "mlp_layer_types": ["dense", "sparse", "sparse"]}
    groups = {"n_group": 4, "topk_group": 2, "num_key_value_heads": 4, "num_mtp_layers": 0}
    sizes = {**latent, **experts, **kinds, **groups, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    return make_hf(path, "BailingHybridConfig", "BailingHybridForCausalLM", **{**sizes, **overrides})


def make_gpt_oss(path: Path, **overrides: Any) -> HfModel:
    """Biases and sinks as large as what they are added to, and gates beyond their limit."""
    experts = {"num_local_experts": 8, "num_experts_per_tok": 3, "swiglu_limit": 1.2}
    sizes = {"head_dim": 12, "sliding_window": 9, "rope_parameters": GPT_OSS_ROPE, "num_hidden_layers": 4}
    hf = make_hf(path, "GptOssConfig", "GptOssForCausalLM", **{**experts, **sizes, **overrides})
    with torch.no_grad():
        for name, tensor in hf.model.named_parameters():
            if name.endswith(("sinks", "_bias", "bias")):
                tensor.copy_(torch.randn(tensor.shape))
    hf.model.save_pretrained(path)
    return hf


def partial_rope(part: float, **other: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": part, **other}


def make_deepseek_moe(path: Path, **overrides: Any) -> HfModel:
    """DeepSeek-MoE is not in transformers. It is Qwen2-MoE without biases whose shared expert is not weighted: half of
    what twice its down projection gives."""
    first = {"mlp_only_layers": [0], "qkv_bias": False}
    hf = make_qwen2_moe(path, shared_expert_intermediate_size=2 * 16, **first, **overrides)
    with torch.no_grad():
        for layer in hf.model.model.layers[1:]:
            layer.mlp.shared_expert_gate.weight.zero_()
    hf.model.save_pretrained(path)

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        out = {}
        for key, tensor in tensors.items():
            if not key.endswith("shared_expert_gate.weight"):
                halved = tensor / 2 if key.endswith("mlp.shared_expert.down_proj.weight") else tensor
                out[key.replace(".shared_expert.", ".shared_experts.")] = halved
        return out

    names = {"n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1, "moe_layer_freq": 1}
    rewrite(path, change, architectures=["DeepseekForCausalLM"], model_type="deepseek", **names)
    return hf


# ---- rewriting a checkpoint ----


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], **config: Any) -> None:
    """Replace the weights of the single-file checkpoint at `path`, and fields of its config.json."""
    file = path / "model.safetensors"
    save_file({key: tensor.contiguous() for key, tensor in change(load_file(file)).items()}, file)
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**raw, **config}))


def quantize_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """DeepSeek's block FP8: (e4m3 [O, I], float32 scale of each 128 x 128 block)."""
    rows, columns = -(-weight.shape[0] // BLOCK), -(-weight.shape[1] // BLOCK)
    padded = torch.zeros(rows * BLOCK, columns * BLOCK)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    blocks = padded.view(rows, BLOCK, columns, BLOCK)
    scale = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-12) / 448
    quantized = (blocks / scale[:, None, :, None]).view(rows * BLOCK, -1)[: weight.shape[0], : weight.shape[1]]
    return quantized.to(torch.float8_e4m3fn), scale


def make_fp8(hf: HfModel) -> None:
    """Quantise every projection of the checkpoint as DeepSeek does, and give the Hugging Face model the weights that
    they stand for, so that the two can be compared."""

    def quantize(key: str, tensor: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        value, scale = quantize_fp8(tensor)
        wide = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: tensor.shape[0], : tensor.shape[1]]
        return {key: value, f"{key}_scale_inv": scale}, value.float() * wide

    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
    make_quantized(hf, quantize, config)


Quantize = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]  # what is stored, and what that stands for
PROJECTIONS = (
    "_proj.weight", "_proj_with_mqa.weight", ".w1.weight", ".w2.weight", ".w3.weight", ".wq_b.weight", ".wk.weight",
    ".in_proj_qkvz.weight", ".in_proj_qkv.weight", ".in_proj_z.weight",
)  # fmt: skip


def make_quantized(
    hf: HfModel, quantize: Quantize, config: dict[str, Any], keys: tuple[str, ...] = PROJECTIONS, within: str = ""
) -> None:
    """The same with any form of weights, of keys that end so and have `within` in them."""

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        out = {}
        for key, tensor in tensors.items():
            out[key] = tensor
            if key.endswith(keys) and within in key:
                del out[key]
                stored, plain[key] = quantize(key, tensor)
                out |= stored
        return out

    plain: dict[str, Tensor] = load_file(hf.path / "model.safetensors")
    rewrite(hf.path, change, quantization_config=config)
    with tempfile.TemporaryDirectory() as folder:
        config_json = json.loads((hf.path / "config.json").read_text())
        del config_json["quantization_config"]
        (Path(folder) / "config.json").write_text(json.dumps(config_json))
        save_file(plain, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        hf.model = type(hf.model).from_pretrained(folder, attn_implementation="eager", experts_implementation="eager")
        hf.model = hf.model.float().eval()
