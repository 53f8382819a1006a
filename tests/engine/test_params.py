"""Sampling parameters: what is refused, what is filled in, the seeds."""

from __future__ import annotations

import math

import pytest
from front_parts import small_tokenizer

from front.params import SamplingParams
from front.sampling_params import resolve, seeds, validate

VOCAB = 100


@pytest.mark.parametrize(
    "good",
    [
        {},
        {"n": 16384},
        {"max_tokens": None, "min_tokens": 10},
        {"max_tokens": 1, "min_tokens": 1},
        {"temperature": 0, "top_p": 1.0, "top_k": -1, "min_p": 1},
        {"temperature": 2.0, "top_p": 1e-9, "top_k": 10**6},
        {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 0.1},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"stop": ("a", "b" * 1024), "stop_token_ids": (0, 99)},
        {"logit_bias": {0: -1000.0, 99: 5}},
        {"allowed_token_ids": (1, 2), "bad_words": ("x",), "bad_words_token_ids": ((1, 2), (3,))},
        {"logprobs": 0, "prompt_logprobs": 20},
    ],
)
def test_good(good: dict[str, object]) -> None:
    validate(SamplingParams(**good), VOCAB, 20)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"n": 0}, "n must be an integer from 1 to 16384, not 0"),
        ({"n": True}, "n must be an integer"),
        ({"n": 16385}, "from 1 to 16384"),
        ({"max_tokens": 0}, "max_tokens must be an integer at least 1, not 0"),
        ({"max_tokens": 1.5}, "max_tokens must be an integer"),
        ({"min_tokens": -1}, "min_tokens must be an integer at least 0"),
        ({"min_tokens": 17}, r"min_tokens must be at most max_tokens \(16\), not 17"),
        ({"temperature": -0.1}, "temperature must be from 0 to 2, not -0.1"),
        ({"temperature": math.nan}, "temperature must be from 0 to 2"),
        ({"temperature": "1"}, "temperature must be from 0 to 2, not '1'"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, not 0.0"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -2}, "top_k must be an integer from -1 to 9223372036854775807, not -2"),
        ({"top_k": 2**63}, "top_k must be an integer from -1"),
        ({"temperature": 10**400}, "temperature must be from 0 to 2"),
        ({"repetition_penalty": 1e300}, "repetition_penalty must be from 0.001 to 1000"),
        ({"ignore_eos": "yes"}, "ignore_eos must be True or False, not 'yes'"),
        ({"min_p": 1.1}, "min_p must be from 0 to 1"),
        ({"presence_penalty": 2.5}, "presence_penalty must be from -2 to 2"),
        ({"frequency_penalty": math.inf}, "frequency_penalty must be from -2 to 2"),
        ({"repetition_penalty": 0}, "repetition_penalty must be from 0.001 to 1000, not 0"),
        ({"seed": 2**63}, "seed must be an integer from"),
        ({"stop": 5}, "stop must be a tuple of strings, not int"),
        ({"stop": ("a",) * 17}, "stop must hold at most 16 strings, not 17"),
        ({"stop": ("",)}, "stop must hold strings of 1 to 1024 characters"),
        ({"stop": (1,)}, "stop must hold strings"),
        ({"stop_token_ids": (100,)}, "stop_token_ids must hold token ids from 0 to 99, not 100"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a tuple of token ids, not int"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias must hold token ids from 0 to 99, not -1"),
        ({"logit_bias": [3]}, "logit_bias must be a dict of token ids, not list"),
        ({"logit_bias": {3: math.nan}}, r"logit_bias\[3\] must be a finite number"),
        ({"allowed_token_ids": ()}, "allowed_token_ids must not be empty"),
        ({"allowed_token_ids": (100,)}, "allowed_token_ids"),
        ({"bad_words": ("x",) * 129}, "bad_words must hold at most 128"),
        ({"bad_words_token_ids": ((),)}, "empty word"),
        ({"logprobs": 21}, "logprobs must be an integer from -1 to 20, not 21"),
        ({"logprobs": -2}, "logprobs must be an integer"),
        ({"logprobs": -1}, r"logprobs -1 \(all 100\) is more than the limit of 20"),
        ({"prompt_logprobs": 21}, "prompt_logprobs must be"),
    ],
)
def test_bad(bad: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate(SamplingParams(**bad), VOCAB, 20)


def test_all_logprobs_when_the_limit_allows() -> None:
    validate(SamplingParams(logprobs=-1), VOCAB, -1)
    validate(SamplingParams(logprobs=100, prompt_logprobs=-1), VOCAB, 100)


def test_max_tokens_is_what_the_context_has_left() -> None:
    assert resolve(SamplingParams(max_tokens=None), None, 30, 100).max_tokens == 70
    assert resolve(SamplingParams(max_tokens=200, min_tokens=200), None, 30, 100).max_tokens == 70
    assert resolve(SamplingParams(max_tokens=200, min_tokens=200), None, 30, 100).min_tokens == 70
    assert resolve(SamplingParams(max_tokens=5), None, 99, 100).max_tokens == 1


@pytest.mark.parametrize("prompt_len", [100, 101, 5000])
def test_too_long(prompt_len: int) -> None:
    with pytest.raises(ValueError, match=f"maximum context length is 100 tokens; the prompt has {prompt_len}"):
        resolve(SamplingParams(), None, prompt_len, 100)


def test_empty_prompt() -> None:
    with pytest.raises(ValueError, match="prompt must hold at least one token"):
        resolve(SamplingParams(), None, 0, 100)


def test_bad_words_with_and_without_a_space() -> None:
    tokenizer = small_tokenizer()
    params = resolve(SamplingParams(bad_words=("fox", " tree"), bad_words_token_ids=((7,),)), tokenizer, 5, 100)
    expected = {tuple(tokenizer.encode(text, False)) for text in ("fox", " fox", "tree", " tree")}
    assert params.bad_words_token_ids[0] == (7,) and set(params.bad_words_token_ids[1:]) == expected


def test_bias_is_clamped_and_top_k_is_plain() -> None:
    params = resolve(SamplingParams(logit_bias={1: 1000.0, 2: -1000.0, 3: 1.5}, top_k=-1), None, 5, 100)
    assert params.logit_bias == {1: 100.0, 2: -100.0, 3: 1.5} and params.top_k == 0


def test_seeds() -> None:
    assert seeds(42, 1) == [42] and seeds(42, 5)[:3] == seeds(42, 3)
    many = seeds(-1, 1000) + seeds(0, 1000)
    assert len(set(many)) == 2000 and all(0 <= seed < 2**63 for seed in many)
    assert seeds(None, 2) != seeds(None, 2)
