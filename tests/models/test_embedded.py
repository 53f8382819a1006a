"""The embedded model is the one that its card describes: its files, and what it says."""

from __future__ import annotations

import hashlib

import pytest

from models.tiny import CHECKPOINT
from moesaic import LLM, SamplingParams

SHA256 = {
    "model.safetensors": "a118aacb7694ed6bd81e62414b8632461526f78d8170390a750cf1300ccfe4a8",
    "tokenizer.json": "6724d8b841e1e9468a09a939cc8605a6f95221055b0bcfdf0dce15e43584d44b",
}
STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play with her toys and run around outside. One day, she found a "
    'shiny rock that was very pretty. She picked it up and showed it to her mom.\n"Look'
)
MAX_BYTES = 16 << 20


@pytest.mark.parametrize("name", sorted(SHA256))
def test_the_files_are_the_trained_ones(name: str) -> None:
    assert hashlib.sha256((CHECKPOINT / name).read_bytes()).hexdigest() == SHA256[name]


def test_it_is_small_enough_for_git() -> None:
    assert sum(file.stat().st_size for file in CHECKPOINT.parent.rglob("*") if file.is_file()) < MAX_BYTES


def test_golden_greedy_continuation() -> None:
    """float32, 48 tokens; transformers says the same (models/tiny/training/verify.py), with margins of 0.01 or more."""
    with LLM(dtype="float32") as llm:
        result = llm.generate("Once upon a time", SamplingParams(max_tokens=48, temperature=0.0))[0]
    assert "Once upon a time" + result.outputs[0].text == STORY
