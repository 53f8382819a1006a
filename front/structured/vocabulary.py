"""A model's vocabulary as llguidance wants it: the bytes of every token, and which tokens are special."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, Protocol

import llguidance

KEPT_TEXTS, KEPT_LENGTH = 1 << 14, 256  # what texts become as tokens, and how long these may be


class Vocabulary(Protocol):
    """Of front.text.tokenizer.Tokenizer, of whatever kind of file."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    special_ids: frozenset[int]
    special_tokens: dict[str, int]

    def __hash__(self) -> int: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def encode_bit(self, text: str) -> list[int]: ...


class _Wrapper:
    """What llguidance reads of a tokenizer."""

    is_tokenizer_wrapper = True

    def __init__(self, vocabulary: Vocabulary, tokens: Sequence[bytes]) -> None:
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.bos_token_id = vocabulary.bos_token_id
        self.tokens = tokens
        self.special_token_ids = sorted(vocabulary.special_ids)
        self._encode = vocabulary.encode_bit
        self._encode_again = lru_cache(KEPT_TEXTS)(vocabulary.encode_bit)

    def __call__(self, text: str | bytes) -> list[int]:
        """Asked at a step for text that the grammar makes certain there, by all sequences for much the same."""
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return (self._encode_again if len(text) <= KEPT_LENGTH else self._encode)(text)


@cache
def grammar_limits() -> llguidance.LLParserLimits:
    """Bounds what a grammar may cost: the front when it is checked, a rank when it is built, every step afterwards."""
    return llguidance.LLParserLimits(
        max_grammar_size=200_000, initial_lexer_fuel=1_000_000, step_max_items=50_000, verbose_errors=False
    )


def grammar_tokenizer(vocabulary: Vocabulary, vocab_size: int) -> llguidance.LLTokenizer:
    """vocab_size: of the model, which may have more than the tokenizer. About a second for 150,000 tokens.

    ValueError when the tokenizer has no token that ends a text.
    """
    tokens = [vocabulary.token_bytes(token_id) for token_id in range(vocabulary.vocab_size)]
    return _made(vocabulary, tokens[:vocab_size], vocab_size)


@lru_cache(maxsize=4)
def names_only(vocabulary: Vocabulary) -> llguidance.LLTokenizer:
    """Of the vocabulary only the special tokens have bytes: enough to check a grammar, and made in a moment. Without
    what speeds up masks, which takes a third of the time of a check."""
    tokens = [
        vocabulary.token_bytes(token_id) if token_id in vocabulary.special_ids else b""
        for token_id in range(vocabulary.vocab_size)
    ]
    return _made(vocabulary, tokens, vocabulary.vocab_size).with_slices([])


def _made(vocabulary: Vocabulary, tokens: Sequence[bytes], vocab_size: int) -> llguidance.LLTokenizer:
    eos = [token_id for token_id in vocabulary.eos_token_ids if token_id < vocab_size]
    if not eos:
        raise ValueError("the model's tokenizer has no token that ends a text, which structured output needs")
    wrapper: Any = _Wrapper(vocabulary, tokens)
    return llguidance.LLTokenizer(wrapper, n_vocab=vocab_size, eos_token=eos)
