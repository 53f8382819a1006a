"""Real weights, real text: run by `make real`, which fetches the checkpoint first."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from moesaic import LLM, SamplingParams

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def checkpoint(request: pytest.FixtureRequest) -> str:
    folder = request.config.getoption("--real-weights")
    if folder is None:
        pytest.skip("needs --real-weights DIR (make real)")
    return str(Path(folder) / "smollm2")


def test_answers_as_transformers_does(checkpoint: str) -> None:
    greedy = SamplingParams(max_tokens=24, temperature=0.0)
    with LLM(checkpoint, dtype="float32", max_model_len=512) as llm:
        answer = llm.chat(QUESTION, greedy)[0]
        story = llm.generate("The three laws of thermodynamics are", greedy)[0]
    assert "Paris" in answer.outputs[0].text
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    text = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    for ours, prompt_ids in (
        (answer, tokenizer(text, add_special_tokens=False).input_ids),
        (story, tokenizer("The three laws of thermodynamics are").input_ids),
    ):
        assert ours.prompt_token_ids == prompt_ids
        with torch.inference_mode():
            theirs = model.generate(torch.tensor([prompt_ids]), max_new_tokens=24, do_sample=False)[
                0, len(prompt_ids) :
            ].tolist()
        assert theirs[: len(ours.outputs[0].token_ids)] == ours.outputs[0].token_ids


def test_the_gguf_file_itself(checkpoint: str) -> None:
    """Its weights stay in 4 bits; its tokens are those of transformers (which cuts spaces before digits in another way
    than the original)."""
    gguf = f"{checkpoint}.gguf"
    texts = ["The three laws of thermodynamics are", "Gr\u00fc\u00dfe, \u4e16\u754c! it's\n\n\tfine"]
    greedy = SamplingParams(max_tokens=24, temperature=0.0)
    with LLM(gguf, max_model_len=512) as llm:
        answer = llm.chat(QUESTION, greedy)[0]
        ours = [llm.tokenizer.encode(text) for text in texts]
    assert "Paris" in answer.outputs[0].text
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert ours == [tokenizer(text).input_ids for text in texts]
    text = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    assert answer.prompt_token_ids == tokenizer(text, add_special_tokens=False).input_ids
