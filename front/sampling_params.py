"""Sampling parameters: checked, filled in, and the seed of every choice.

Limits are OpenAI's and vLLM's, except for the number and the length of stop strings, which are ours.
"""

from __future__ import annotations

import importlib
import math
import secrets
from collections.abc import Iterable

import msgspec

from front.params import SamplingParams, StructuredOutputsParams
from front.text.tokenizer import Tokenizer

MAX_N = 16384
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024  # characters; so that looking for them stays cheap
MAX_BAD_WORDS = 128
MAX_LOGIT_BIAS = 100.0
MAX_EXTRA_ARGS = 16
MAX_EXTRA_BYTES = 4096  # of their names and values together, as JSON
REPETITION_PENALTIES = 0.001, 1000.0  # beyond, logits leave float32

_SEED_MASK = (1 << 63) - 1


def validate(params: SamplingParams, vocab_size: int, max_logprobs: int, processors: bool = False) -> None:
    """ValueError naming the field and its limit. max_logprobs -1: no limit but the vocabulary. processors: there are
    logits processors, which are all that extra_args can mean."""
    _integer("n", params.n, 1, MAX_N)
    if params.max_tokens is not None:
        _integer("max_tokens", params.max_tokens, 1, None)
    _integer("min_tokens", params.min_tokens, 0, None)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise ValueError(f"min_tokens must be at most max_tokens ({params.max_tokens}), not {params.min_tokens}")
    _number("temperature", params.temperature, 0.0, 2.0)
    _number("top_p", params.top_p, 0.0, 1.0, above=True)
    _integer("top_k", params.top_k, -1, (1 << 63) - 1)
    _number("min_p", params.min_p, 0.0, 1.0)
    _number("presence_penalty", params.presence_penalty, -2.0, 2.0)
    _number("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    _number("repetition_penalty", params.repetition_penalty, *REPETITION_PENALTIES)
    if params.seed is not None:
        _integer("seed", params.seed, -(1 << 63), (1 << 63) - 1)
    _strings("stop", params.stop, MAX_STOP_STRINGS, MAX_STOP_LENGTH)
    _strings("bad_words", params.bad_words, MAX_BAD_WORDS, MAX_STOP_LENGTH)
    _token_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    if not isinstance(params.bad_words_token_ids, (tuple, list)):
        raise ValueError("bad_words_token_ids must be a tuple of words, each a tuple of token ids")
    for word in params.bad_words_token_ids:
        if not word:
            raise ValueError("bad_words_token_ids must not hold an empty word")
        _token_ids("bad_words_token_ids", word, vocab_size)
    if params.allowed_token_ids is not None:
        if not params.allowed_token_ids:
            raise ValueError("allowed_token_ids must not be empty")
        _token_ids("allowed_token_ids", params.allowed_token_ids, vocab_size)
    if params.logit_bias is not None:
        if not isinstance(params.logit_bias, dict):
            raise ValueError(f"logit_bias must be a dict of token ids, not {type(params.logit_bias).__name__}")
        _token_ids("logit_bias", params.logit_bias, vocab_size)
        for token_id, bias in params.logit_bias.items():
            _number(f"logit_bias[{token_id}]", bias, -math.inf, math.inf)
    _flag("include_stop_str_in_output", params.include_stop_str_in_output)
    _flag("ignore_eos", params.ignore_eos)
    _flag("skip_special_tokens", params.skip_special_tokens)
    if not isinstance(params.prediction, str):
        raise ValueError(f"prediction must be a text, not {type(params.prediction).__name__}")
    _token_ids("prediction_token_ids", params.prediction_token_ids, vocab_size)
    if params.thinking_token_budget is not None:
        _integer("thinking_token_budget", params.thinking_token_budget, -1, None)
    _kind("structured_outputs", params.structured_outputs, StructuredOutputsParams)
    for field, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None:
            _logprobs(field, count, vocab_size, max_logprobs)
    _token_ids("logprob_token_ids", params.logprob_token_ids, vocab_size)
    limit = vocab_size if max_logprobs == -1 else max_logprobs
    if len(params.logprob_token_ids) > limit:
        count = len(params.logprob_token_ids)
        raise ValueError(f"logprob_token_ids must hold at most {limit} ids (max_logprobs), not {count}")
    if params.logprob_token_ids and params.logprobs is None:
        raise ValueError("logprob_token_ids needs logprobs")
    if params.extra_args is not None:
        _extra_args(params.extra_args, processors)


def resolve(params: SamplingParams, tokenizer: Tokenizer | None, prompt_len: int, max_model_len: int) -> SamplingParams:
    """The parameters as the ranks get them: max_tokens decided (at most what the context has left), bad_words as token
    ids (each with and without a space before it), the prediction too, structured_outputs as a grammar, logit_bias
    clamped to 100 either way, top_k -1 as 0.

    ValueError when the prompt is empty or leaves no room for output, or the grammar is none. tokenizer: needed for
    texts only.
    """
    if prompt_len < 1:
        raise ValueError("prompt must hold at least one token")
    room = room_for_output(prompt_len, max_model_len)
    if params.max_tokens is None and params.min_tokens > room:
        raise ValueError(f"min_tokens must be at most what the context leaves ({room}), not {params.min_tokens}")
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    bias = params.logit_bias
    if bias is not None:
        bias = {token_id: max(-MAX_LOGIT_BIAS, min(MAX_LOGIT_BIAS, value)) for token_id, value in bias.items()}
    words = params.bad_words_token_ids
    if params.bad_words:
        assert tokenizer is not None
        words += _bad_words(params.bad_words, tokenizer)
    predicted = params.prediction_token_ids
    if params.prediction and not predicted:
        assert tokenizer is not None
        predicted = tuple(tokenizer.encode(params.prediction, add_special_tokens=False))
    grammar = params.grammar
    if params.structured_outputs is not None and grammar is None:
        assert tokenizer is not None
        checks = importlib.import_module("front.structured.grammar")  # few ask for it, and it takes a while
        grammar = checks.checked_grammar(params.structured_outputs, tokenizer)
    return msgspec.structs.replace(
        params,
        structured_outputs=None,
        grammar=grammar,
        prediction="",
        prediction_token_ids=predicted[:max_model_len],
        max_tokens=max_tokens,
        min_tokens=min(params.min_tokens, max_tokens),
        top_k=max(0, params.top_k),
        logit_bias=bias,
        bad_words_token_ids=words,
    )


def room_for_output(prompt_len: int, max_model_len: int, at_least: bool = False) -> int:
    """Tokens that the context has left. ValueError when that is none. at_least: the prompt has so many tokens, or
    more."""
    room = max_model_len - prompt_len
    if room < 1:
        has = f"at least {prompt_len}" if at_least else str(prompt_len)
        raise ValueError(
            f"maximum context length is {max_model_len} tokens; the prompt has {has} and leaves no room for output"
        )
    return room


def seeds(seed: int | None, n: int) -> list[int]:
    """One 63-bit seed per choice. Choice 0 has the request's own (modulo 2**63), the others are mixed from it.

    Without one, the seed comes from the operating system.
    """
    base = secrets.randbits(63) if seed is None else seed & _SEED_MASK
    return [base] + [_mix(base, choice) for choice in range(1, n)]


def _mix(seed: int, choice: int) -> int:
    """SplitMix64 (Steele, Lea, Flood 2014), as far along as `choice`."""
    word = (1 << 64) - 1
    z = (seed + choice * 0x9E3779B97F4A7C15) & word
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & word
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & word
    return (z ^ (z >> 31)) & _SEED_MASK


def _bad_words(words: Iterable[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip() or word
        for text in (bare, " " + bare):
            token_ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if token_ids:
                found[token_ids] = None
    return tuple(found)


def _number(field: str, value: object, low: float, high: float, above: bool = False) -> None:
    """Finite, and in [low, high]; above: low itself is not allowed."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and -math.inf < value < math.inf
    if good:
        assert isinstance(value, (int, float))
        good = low <= value <= high and not (above and value == low)
    if not good:
        limit = f"above {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"
        raise ValueError(f"{field} must be {'a finite number' if high == math.inf else limit}, not {value!r}")


def _extra_args(found: object, processors: bool) -> None:
    if not processors:
        raise ValueError("extra_args need an engine with logits_processors")
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ValueError("extra_args must be a dict with texts for keys")
    if len(found) > MAX_EXTRA_ARGS:
        raise ValueError(f"extra_args must have at most {MAX_EXTRA_ARGS} entries, not {len(found)}")
    try:
        size = len(msgspec.json.encode(found))
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"extra_args must hold what JSON can: {error}") from None
    if size > MAX_EXTRA_BYTES:
        raise ValueError(f"extra_args must take at most {MAX_EXTRA_BYTES} bytes as JSON, not {size}")


def _kind(field: str, value: object, kind: type) -> None:
    if value is not None and not isinstance(value, kind):
        raise ValueError(f"{field} must be {kind.__name__}, not {type(value).__name__}")


def _flag(field: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{field} must be True or False, not {value!r}")


def _integer(field: str, value: object, low: int, high: int | None) -> None:
    good = isinstance(value, int) and not isinstance(value, bool) and low <= value and (high is None or value <= high)
    if not good:
        limit = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{field} must be an integer {limit}, not {value!r}")


def _token_ids(field: str, token_ids: object, vocab_size: int) -> None:
    if not isinstance(token_ids, (tuple, list, dict)):
        raise ValueError(f"{field} must be a tuple of token ids, not {type(token_ids).__name__}")
    for token_id in token_ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
            raise ValueError(f"{field} must hold token ids from 0 to {vocab_size - 1}, not {token_id!r}")


def _strings(field: str, strings: object, max_count: int, max_length: int) -> None:
    if not isinstance(strings, (tuple, list)):
        raise ValueError(f"{field} must be a tuple of strings, not {type(strings).__name__}")
    if len(strings) > max_count:
        raise ValueError(f"{field} must hold at most {max_count} strings, not {len(strings)}")
    for string in strings:
        if not isinstance(string, str) or not 1 <= len(string) <= max_length:
            raise ValueError(f"{field} must hold strings of 1 to {max_length} characters")


def _logprobs(field: str, count: object, vocab_size: int, max_logprobs: int) -> None:
    limit = vocab_size if max_logprobs == -1 else max_logprobs
    if count == -1 and limit < vocab_size:
        raise ValueError(f"{field} -1 (all {vocab_size}) is more than the limit of {limit} (max_logprobs)")
    _integer(field, count, -1, limit)
