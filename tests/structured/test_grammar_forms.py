"""A schema alone and one within Lark are two forms of one grammar."""

from __future__ import annotations

import random

import llguidance
import numpy as np
import pytest
from schema_cases import CASES

from front.structured.lark import JsonStyle, json_grammar, json_rule
from front.structured.vocabulary import grammar_limits, grammar_tokenizer
from front.text.tokenizer import Tokenizer
from models.tiny import CHECKPOINT

pytestmark = pytest.mark.structured
TOKENIZER = Tokenizer(CHECKPOINT)
VOCABULARY = grammar_tokenizer(TOKENIZER, TOKENIZER.vocab_size)
FOLLOWED = [case.schema for case in CASES if not case.refused]
LONGEST = 16  # tokens of a walk


def matcher_of(text: str) -> llguidance.LLMatcher:
    return llguidance.LLMatcher(VOCABULARY, text, log_level=0, limits=grammar_limits())


def test_the_masks_are_the_same() -> None:
    """Along texts that their masks allow, drawn by chance."""
    draw, compared = random.Random(3), 0
    for number, schema in enumerate(FOLLOWED):
        style = JsonStyle("", True) if number % 2 else JsonStyle()
        try:
            texts = json_grammar(schema, style), f"start: {json_rule(schema, style)}"
        except ValueError:
            continue
        first, second = map(matcher_of, texts)
        assert first.is_error() == second.is_error(), schema
        for _ in range(LONGEST):
            if first.is_stopped():
                break
            mask = first.compute_bitmask()
            assert mask == second.compute_bitmask() and first.is_accepting() == second.is_accepting(), schema
            allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
            chosen = int(allowed[draw.randrange(len(allowed))])
            assert first.consume_tokens([chosen]) and second.consume_tokens([chosen])
            compared += 1
        assert first.is_stopped() == second.is_stopped()
    assert compared > 1000
