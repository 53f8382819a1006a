"""Writes a trained model as a Hugging Face directory (config, generation settings, tokenizer, weights), and reads it.

``python -m models.tiny.training.export --run-dir RUN`` puts a run's newest checkpoint into this package.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from msgspec.structs import asdict, fields
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from models.tiny import CHECKPOINT
from models.tiny.training.data import BOS_ID, END_ID, USER_ID, tokenizer_config
from models.tiny.training.network import Shape, TinyDeepSeek, from_checkpoint, to_checkpoint


def model_config(shape: Shape) -> dict[str, object]:
    """The ``config.json`` of a shape, with the fields DeepSeek-V3's own file has."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **asdict(shape),
        "num_key_value_heads": shape.num_attention_heads,
        "num_nextn_predict_layers": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "moe_layer_freq": 1,
        "rope_interleave": True,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": BOS_ID,
        "eos_token_id": END_ID,
        "pad_token_id": END_ID,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
    }


def generation_config(shape: Shape) -> dict[str, object]:
    """Sampling defaults; a new user turn ends an answer as the end token does."""
    return {
        "bos_token_id": BOS_ID,
        "eos_token_id": [END_ID, USER_ID],
        "pad_token_id": END_ID,
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.95,
        "max_new_tokens": shape.max_position_embeddings // 2,
    }


def replace_text(path: Path, text: str) -> None:
    """Write a text file so that a reader sees the old or the new one, never a part."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def write_model(directory: Path, model: TinyDeepSeek, tokenizer: Tokenizer) -> None:
    """Write the whole directory; every file is replaced atomically, the weights last."""
    directory.mkdir(parents=True, exist_ok=True)
    shape = model.shape
    files = {
        "config.json": model_config(shape),
        "generation_config.json": generation_config(shape),
        "tokenizer_config.json": tokenizer_config(shape.max_position_embeddings),
    }
    for name, content in files.items():
        replace_text(directory / name, json.dumps(content, indent=2) + "\n")
    replace_text(directory / "tokenizer.json", tokenizer.to_str(pretty=True) + "\n")
    partial = directory / "model.safetensors.partial"
    save_file(to_checkpoint(model), partial, metadata={"format": "pt"})
    # safetensors makes the file readable by its owner only.
    partial.chmod(0o644)
    os.replace(partial, directory / "model.safetensors")


def read_model(directory: Path) -> TinyDeepSeek:
    """The training module in float32, from a checkpoint directory."""
    config = json.loads((directory / "config.json").read_text("utf-8"))
    shape = Shape(**{field.name: config[field.name] for field in fields(Shape)})
    return from_checkpoint(load_file(directory / "model.safetensors"), shape)


def main() -> None:
    """Read a run's checkpoint and write it again as the shipped one (bfloat16 survives the round trip exactly)."""
    parser = argparse.ArgumentParser(description="Ship a run's newest checkpoint.")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=CHECKPOINT)
    arguments = parser.parse_args()
    source = arguments.run_dir / "checkpoint"
    write_model(arguments.out, read_model(source), Tokenizer.from_file(str(source / "tokenizer.json")))


if __name__ == "__main__":
    main()
