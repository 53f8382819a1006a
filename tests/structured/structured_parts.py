"""Tokens through a matcher, one by one, as a rank does it."""

from __future__ import annotations

from collections.abc import Sequence

import llguidance
import numpy as np

from front.structured.vocabulary import grammar_limits


def allowed(matcher: llguidance.LLMatcher) -> frozenset[int]:
    """The tokens that may come next, by the mask."""
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return frozenset(np.flatnonzero(bits).tolist())


def accepts(tokenizer: llguidance.LLTokenizer, text: str, tokens: Sequence[int]) -> bool:
    """Whether every mask has the next token; behind the end only tokens that end the text may come."""
    matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=grammar_limits())
    for token in tokens:
        if token not in allowed(matcher):
            return False
        if matcher.is_stopped():
            continue
        if not matcher.consume_token(token):
            return False
    return not matcher.is_error()


def whole(tokenizer: llguidance.LLTokenizer, text: str, tokens: Sequence[int]) -> bool:
    """Whether these tokens, and then the end, may come."""
    matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=grammar_limits())
    for token in tokens:
        if token not in allowed(matcher) or not matcher.consume_token(token):
            return False
    return bool(matcher.is_accepting()) and bool(allowed(matcher) & set(tokenizer.eos_tokens))
