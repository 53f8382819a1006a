"""Models with vision as transformers writes them, in shards: their language models give transformers' logits."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import deepseek_tiny
import drive
import hf_tiny
import pytest
import torch

pytestmark = pytest.mark.parity

ROPE = {**hf_tiny.partial_rope(0.5), "mrope_section": [1, 1, 1], "mrope_interleaved": True}
QWEN = {**hf_tiny.LINEAR, "rope_parameters": ROPE}
KIMI = {**deepseek_tiny.ATTENTION, **deepseek_tiny.EXPERTS, "model_type": "deepseek_v3", "num_mtp_layers": 0}
QWEN_EYES = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
KIMI_EYES = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Qwen3_5Moe": ("qwen3_5_moe", {**QWEN, **hf_tiny.SHARED}, {"vision_config": QWEN_EYES}),
    "Qwen3_5": ("qwen3_5", QWEN, {"vision_config": QWEN_EYES}),
    "Kimi_K25": ("kimi_k25", KIMI, {"vision_config": KIMI_EYES, "projection_hidden_size": 16}),
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_language_model_of_one_with_vision(name: str, tied: bool, tmp_path: Path) -> None:
    package, text, more = MODELS[name]
    modeling = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    sizes = {key: value for key, value in hf_tiny.SMALL.items() if key != "attn_implementation"}
    configs = importlib.import_module(f"transformers.models.{package}.configuration_{package}")
    config = vars(configs)[f"{name}Config"](
        text_config={**sizes, **text, "tie_word_embeddings": tied}, tie_word_embeddings=tied, **more
    )
    torch.manual_seed(0)
    model = vars(modeling)[f"{name}ForConditionalGeneration"](config).float().eval()
    hf_tiny.randomize(model)
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    tokens = [(11 * i * i + 3 * i) % hf_tiny.VOCAB for i in range(40)]
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([tokens])).logits[0]
    ours = drive.chunked_logits(drive.load_ours(tmp_path), tokens, [17, 23])
    assert drive.relative_error(ours, expected) < 1e-4
