"""The models of benchmarks/make_models.py as GGUF files, for llama.cpp and for us, run by the Python that has llama.cpp:

    LLAMA_PYTHON benchmarks/make_gguf.py --models DIR [--only MODEL ...] [--kinds q4_0 q4_k_m q8_0]

DIR/MODEL.gguf is in bfloat16, DIR/MODEL-KIND.gguf what llama.cpp's own quantiser makes of it. Needs the package gguf there
(its writer and its table of tensor names). Latent attention is written in two parts, from which llama.cpp computes it in the latent space.
"""

from __future__ import annotations

import argparse
import json
import re
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np

ARCHITECTURES = {"qwen3_moe": "qwen3moe", "qwen3": "qwen3", "qwen2": "qwen2", "deepseek_v3": "deepseek2"}
FILE_TYPES = {"q4_0": 2, "q8_0": 7, "q4_k_m": 15, "bf16": 32}  # llama_ftype
EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(\d+)\.(\w+)\.weight")


class Checkpoint:
    """Tensors of one safetensors file as raw bfloat16, mapped."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            size = struct.unpack("<Q", file.read(8))[0]
            self._header = {key: value for key, value in json.loads(file.read(size)).items() if key != "__metadata__"}
        self._data = np.memmap(path, np.uint8, "r", 8 + size)

    def names(self) -> list[str]:
        return list(self._header)

    def get(self, name: str) -> np.ndarray[Any, Any]:
        entry = self._header[name]
        assert entry["dtype"] == "BF16", (name, entry["dtype"])
        begin, end = entry["data_offsets"]
        return self._data[begin:end].view(np.uint16).reshape(entry["shape"])


def widen(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (values.astype(np.uint32) << 16).view(np.float32)


def describe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """What llama.cpp's own converter writes of a configuration."""
    heads = config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_file_type(FILE_TYPES["bf16"])
    writer.add_vocab_size(config["vocab_size"])
    experts = config.get("n_routed_experts") or config.get("num_local_experts") or config.get("num_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "kv_lora_rank" not in config:
        head = config.get("head_dim") or config["hidden_size"] // heads
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(head)
        writer.add_value_length(head)
        return
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_head_count_kv(1)
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + rope)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rope)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(rope)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def words(writer: gguf.GGUFWriter, count: int) -> None:
    """One made-up word per id, as make_models.py has them; nothing is ever read or written with them."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["w", "w1", "1", *(f"w{number}" for number in range(3, count))])
    writer.add_token_types([1] * count)
    writer.add_token_merges(["w 1"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)


def tensors(source: Checkpoint, config: dict[str, Any]) -> dict[str, Any]:
    """By the checkpoint's name: a call that gives the numbers; experts of a layer as one."""
    found: dict[str, Any] = {}
    experts: dict[str, list[str]] = {}
    for name in source.names():
        if matched := EXPERT.fullmatch(name):
            experts.setdefault(f"{matched[1]}.{matched[3]}.weight", []).append(name)
        elif name.endswith("kv_b_proj.weight"):
            width = config["qk_nope_head_dim"] + config["v_head_dim"]
            for part in ("k_b_proj", "v_b_proj"):
                found[name.replace("kv_b_proj", part)] = lambda name=name, part=part, width=width: halves(
                    source.get(name), config["num_attention_heads"], width, config["qk_nope_head_dim"]
                )[part]
        else:
            found[name.replace("e_score_correction_bias", "e_score_correction.bias")] = lambda name=name: source.get(
                name
            )
    for stacked, names in experts.items():
        names.sort(key=lambda name: int(EXPERT.fullmatch(name)[2]))  # type: ignore[index]
        found[stacked] = lambda names=names: np.stack([source.get(name) for name in names])
    return found


def halves(both: np.ndarray[Any, Any], heads: int, width: int, nope: int) -> dict[str, np.ndarray[Any, Any]]:
    """Keys transposed, of each head, and values."""
    split = both.reshape(heads, width, -1)
    return {
        "k_b_proj": np.ascontiguousarray(split[:, :nope].transpose(0, 2, 1)),
        "v_b_proj": np.ascontiguousarray(split[:, nope:]),
    }


def write(folder: Path, path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(folder.name)
    describe(writer, config)
    words(writer, config["vocab_size"])
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    calls = tensors(Checkpoint(folder / "model.safetensors"), config)
    plain = {name: gives().ndim == 1 or name.endswith("mlp.gate.weight") for name, gives in calls.items()}
    for name, gives in calls.items():
        to = table.get_name(name, try_suffixes=(".weight", ".bias"))
        if to is None:
            raise SystemExit(f"{name}: GGUF has no name for it")
        shape = gives().shape
        if plain[name]:
            writer.add_tensor_info(to, shape, np.dtype(np.float32), 4 * int(np.prod(shape)))
        else:
            raw = gguf.GGMLQuantizationType.BF16
            writer.add_tensor_info(to, shape, np.dtype(np.uint16), 2 * int(np.prod(shape)), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, gives in calls.items():
        writer.write_tensor_data(widen(gives()) if plain[name] else gives())
    writer.close()


def quantise(source: Path, path: Path, kind: str, threads: int) -> None:
    import llama_cpp

    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = FILE_TYPES[kind]
    parameters.nthread = threads
    if llama_cpp.llama_model_quantize(str(source).encode(), str(path).encode(), parameters) != 0:
        raise SystemExit(f"llama.cpp could not make {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, metavar="DIR")
    parser.add_argument("--only", nargs="*", default=["qwen3moe-small", "deepseek-small", "qwen3-0.6b-like"])
    parser.add_argument("--kinds", nargs="*", choices=sorted(set(FILE_TYPES) - {"bf16"}), default=[])
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    for name in arguments.only:
        whole = arguments.models / f"{name}.gguf"
        if not whole.exists():
            write(arguments.models / name, whole.with_suffix(".part"))
            whole.with_suffix(".part").rename(whole)
        print(json.dumps({"file": str(whole), "megabytes": round(whole.stat().st_size / 1e6)}), flush=True)
        for kind in arguments.kinds:
            path = arguments.models / f"{name}-{kind}.gguf"
            if not path.exists():
                quantise(whole, path.with_suffix(".part"), kind, arguments.threads)
                path.with_suffix(".part").rename(path)
            print(json.dumps({"file": str(path), "megabytes": round(path.stat().st_size / 1e6)}), flush=True)


if __name__ == "__main__":
    main()
