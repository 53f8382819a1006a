"""Beam search: the sequences of transformers' generate(num_beams=...) on the same weights, in float32."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from amounts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from front.outputs import PositionLogprobs, Prompt, TokenLogprob
from front.params import SamplingParams
from front.search.beams import BeamSearchParams, Search
from models.tiny import CHECKPOINT
from moesaic import LLM

torch.set_num_threads(1)
PROMPTS = ["Once upon a time", "The dog said: I", "One day a little girl named Lily found a"]
COMMON = (13, 14, 260, 261, 262, 264, 265, 266, 268, 270, 280, 290)  # tokens that come soon
CASES: list[dict[str, Any]] = [
    {"beam_width": 1, "max_tokens": 5},
    {"beam_width": 3, "max_tokens": 9},
    {"beam_width": 4, "max_tokens": 12, "stop_token_ids": COMMON},
    {"beam_width": 4, "max_tokens": 12, "stop_token_ids": COMMON, "early_stopping": True},
    {"beam_width": 3, "max_tokens": 10, "stop_token_ids": COMMON, "early_stopping": "never", "length_penalty": 2.0},
    {"beam_width": 3, "max_tokens": 10, "stop_token_ids": COMMON, "length_penalty": -0.5},
    {"beam_width": 2, "max_tokens": 8, "stop_token_ids": tuple(range(2, 1200)), "length_penalty": 0.0},
]


def test_sequences_are_those_of_transformers() -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    with LLM(dtype="float32") as llm:
        ends = list(llm.tokenizer.eos_token_ids)
        for case in CASES:
            params = BeamSearchParams(**case)
            found = llm.beam_search(PROMPTS, params)
            for text, output in zip(PROMPTS, found, strict=True):
                prompt = llm.tokenizer.encode(text)
                expected = theirs.generate(
                    torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                    num_beams=params.beam_width, num_return_sequences=params.beam_width, do_sample=False,
                    max_new_tokens=params.max_tokens, length_penalty=params.length_penalty,
                    early_stopping=params.early_stopping, eos_token_id=[*ends, *params.stop_token_ids],
                    pad_token_id=0, return_dict_in_generate=True, output_scores=True,
                )  # fmt: skip
                for sequence, tokens in zip(output.sequences, expected.sequences.tolist(), strict=True):
                    kept = tokens[: len(sequence.tokens)]
                    assert sequence.tokens == kept and not any(tokens[len(kept) :]), case
                    assert sequence.finish_reason == (
                        "stop" if kept[-1] in (*ends, *params.stop_token_ids) else "length"
                    )
                    assert len(sequence.logprobs) == len(kept) - len(prompt)
                    assert [one.chosen.token_id for one in sequence.logprobs] == kept[len(prompt) :]
                scores = [sequence.score for sequence in output.sequences]
                if params.beam_width > 1:
                    assert scores == pytest.approx(expected.sequences_scores.tolist(), abs=1e-4)


def test_a_text_without_what_ended_it_and_what_is_refused() -> None:
    with LLM() as llm:
        (output,) = llm.beam_search("Once upon a time", BeamSearchParams(2, 4))
        first = output.sequences[0]
        assert first.text.startswith("Once upon a time") and first.text == llm.tokenizer.decode(first.tokens, True)
        assert first.cum_logprob == pytest.approx(sum(one.chosen.logprob for one in first.logprobs))
        for wrong in ({"beam_width": 0}, {"beam_width": 65}, {"max_tokens": 0}, {"early_stopping": "soon"}):
            with pytest.raises(ValueError, match=next(iter(wrong))):
                llm.beam_search("Once", BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **wrong}))
        with pytest.raises(ValueError, match="length_penalty"):
            llm.beam_search("Once", BeamSearchParams(2, 4, length_penalty=math.nan))
    with LLM(logprobs_mode="raw_logits") as llm, pytest.raises(ValueError, match="logprobs_mode"):
        llm.beam_search("Once", BeamSearchParams(2, 4))


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_with_beams_enough_it_finds_the_best_of_all(vocabulary: int, length: int, seed: int) -> None:
    """A width that loses nothing: every output there is, ranked."""
    draw = torch.Generator().manual_seed(seed)
    table = {}

    def following(output: tuple[int, ...]) -> list[float]:
        if output not in table:
            table[output] = torch.randn(vocabulary, generator=draw).log_softmax(0).tolist()
        return table[output]

    width = vocabulary**length
    prompt = Prompt(request_id="x", token_ids=[0], params=SamplingParams(max_tokens=length))
    search = Search(prompt, BeamSearchParams(width, length, early_stopping="never"), ())
    while asked := search.prompts():
        search.take([position(following(tuple(one.token_ids[1:]))) for one in asked])
    everything: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for _ in range(length):
        everything = [
            (total + logprob, (*output, token))
            for total, output in everything
            for token, logprob in enumerate(following(output))
        ]
    everything.sort(reverse=True)
    assert [tuple(beam.tokens) for beam in search.best] == [output for _, output in everything]


def position(logprobs: list[float]) -> PositionLogprobs:
    tokens = [TokenLogprob(token, logprob, 1, "", b"") for token, logprob in enumerate(logprobs)]
    tokens.sort(key=lambda token: -token.logprob)
    return PositionLogprobs(tokens[0], tokens)
