"""Random-weight benchmark checkpoints: `python benchmarks/make_models.py --out DIR [--only NAME ...]`.

Needs transformers (the dev extra). The tokenizer has one made-up word per id: benchmarks feed token ids.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

COMMON = {
    "bos_token_id": 1,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}


def qwen3_moe(
    hidden: int, layers: int, heads: int, kv_heads: int, head: int, experts: int, top_k: int, width: int
) -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe", "vocab_size": 32000, "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head, "num_experts": experts,
        "num_experts_per_tok": top_k, "moe_intermediate_size": width, "intermediate_size": 3 * hidden, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip


def deepseek_v3(hidden: int, layers: int, heads: int, q_rank: int, nope: int, rope: int, v: int, experts: int, top_k: int, groups: int,
                top_groups: int, width: int, dense: int) -> dict[str, Any]:  # fmt: skip
    return {
        "model_type": "deepseek_v3", "vocab_size": 32000, "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": heads, "q_lora_rank": q_rank, "kv_lora_rank": 512,
        "qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "v_head_dim": v, "n_routed_experts": experts,
        "num_experts_per_tok": top_k, "n_shared_experts": 1, "n_group": groups, "topk_group": top_groups,
        "moe_intermediate_size": width, "intermediate_size": dense, "first_k_dense_replace": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "rope_interleave": True, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
    }  # fmt: skip


def qwen3(hidden: int, layers: int, heads: int, kv_heads: int, head: int, width: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "qwen3", "vocab_size": 32000, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head, "intermediate_size": width, **more,
    }  # fmt: skip


def qwen3_next(hidden: int, layers: int, heads: int, kv_heads: int, head: int, key_heads: int, value_heads: int, linear: int, experts: int,
               top_k: int, width: int) -> dict[str, Any]:  # fmt: skip
    return {
        "model_type": "qwen3_next", "vocab_size": 32000, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head, "linear_num_key_heads": key_heads, "linear_num_value_heads": value_heads,
        "linear_key_head_dim": linear, "linear_value_head_dim": linear, "num_experts": experts, "num_experts_per_tok": top_k,
        "moe_intermediate_size": width, "shared_expert_intermediate_size": width, "intermediate_size": 3 * hidden,
    }  # fmt: skip


SHAPES: dict[str, dict[str, Any]] = {
    "qwen3next-small": qwen3_next(1024, 12, 8, 2, 128, 8, 16, 128, 64, 8, 384),
    "qwen3moe-small": qwen3_moe(1024, 16, 16, 4, 64, 64, 8, 384),
    "deepseek-small": deepseek_v3(1024, 12, 16, 384, 128, 64, 128, 64, 6, 8, 4, 384, 3072),
    "qwen3-0.6b-like": qwen3(1024, 28, 16, 8, 128, 3072, vocab_size=151936, tie_word_embeddings=True),
    "qwen2-1.5b-like": qwen3(1536, 28, 12, 2, 128, 8960, vocab_size=151936, model_type="qwen2"),
    "qwen3moe-11g": {**qwen3_moe(2048, 8, 32, 4, 128, 128, 8, 768), "vocab_size": 151936},
    "tiny-qwen3moe": qwen3_moe(64, 4, 4, 2, 32, 16, 4, 32),
    "tiny-host": {**qwen3_moe(32, 1, 2, 1, 16, 4, 2, 16), "vocab_size": 1024},
    "tiny-deepseek": deepseek_v3(64, 4, 4, 32, 32, 64, 32, 16, 4, 4, 2, 32, 128),
    "tiny-qwen3next": qwen3_next(64, 4, 4, 2, 32, 2, 4, 32, 16, 4, 32),
    "tiny-dense": qwen3(64, 4, 4, 2, 32, 128),
}


IN_PARTS = ("qwen3moe-11g",)  # those that are written without being in memory as a whole
PART_BYTES = 1 << 30


def write_in_parts(model: Any, folder: Path, seed: int) -> None:
    """model: on the meta device. Its weights in files of about PART_BYTES, experts one by one, as they are published."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    random = torch.Generator().manual_seed(seed)
    pool = torch.empty(1 << 24, dtype=torch.bfloat16).normal_(0, 0.02, generator=random)
    part: dict[str, Any] = {}
    index: dict[str, str] = {}

    def flush() -> None:
        name = f"model-{len(set(index.values())) + 1:05}.safetensors"
        save_file(part, folder / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(part, name))
        part.clear()

    def add(key: str, shape: tuple[int, ...]) -> None:
        count = math.prod(shape)
        start = int(torch.randint(len(pool), (1,), generator=random))
        values = pool.roll(-start).repeat(-(-count // len(pool)))[:count] if "norm" not in key else torch.ones(count)
        part[key] = values.to(torch.bfloat16).view(shape).contiguous()
        if sum(tensor.nbytes for tensor in part.values()) > PART_BYTES:
            flush()

    for key, tensor in model.state_dict().items():
        prefix, _, last = key.rpartition(".")
        if last not in ("gate_up_proj", "down_proj"):
            add(key, tuple(tensor.shape))
            continue
        rows, columns = tensor.shape[1:]
        for expert in range(tensor.shape[0]):
            names = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
            for name in names:
                add(f"{prefix}.{expert}.{name}.weight", (rows // len(names), columns))
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def make(name: str, out: Path, seed: int = 0) -> Path:
    """Write shape `name` under `out` unless it is there already; bfloat16, weights N(0, 0.02), norms 1. The largest have
    the same numbers again and again, from different places on."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = out / name
    if (folder / "tokenizer.json").exists():
        return folder
    shape = dict(SHAPES[name])
    torch.manual_seed(seed)
    config = AutoConfig.for_model(shape.pop("model_type"), **{**COMMON, **shape})
    config.dtype = "bfloat16"
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta" if name in IN_PARTS else "cpu"):
            model = AutoModelForCausalLM.from_config(config)
    finally:
        torch.set_default_dtype(torch.float32)
    if name in IN_PARTS:
        write_in_parts(model, folder, seed)
    else:
        _write_whole(model, folder)
    words = {f"w{token_id}": token_id for token_id in range(shape["vocab_size"])}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder


def _write_whole(model: Any, folder: Path) -> None:
    import torch

    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.fill_(1.0) if "norm" in key else parameter.normal_(0, 0.02)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.05)
    model.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=sorted(SHAPES), default=sorted(set(SHAPES) - set(IN_PARTS)))
    arguments = parser.parse_args()
    for name in arguments.only:
        folder = make(name, arguments.out)
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        print(json.dumps({"model": str(folder), "megabytes": round(size / 1e6)}), flush=True)


if __name__ == "__main__":
    main()
