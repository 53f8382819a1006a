"""Every valid instance of a schema passes its grammar token by token, every other one does not, or the schema is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache

import llguidance
import pytest
from schema_cases import CASES, Case
from structured_parts import whole

from front.messages import StructuredOutputsParams
from front.structured.grammar import checked_grammar
from front.structured.vocabulary import grammar_tokenizer
from front.text import Tokenizer
from models.tiny import CHECKPOINT

pytestmark = pytest.mark.structured


@cache
def tokenizers() -> tuple[Tokenizer, llguidance.LLTokenizer]:
    tokenizer = Tokenizer(CHECKPOINT)
    return tokenizer, grammar_tokenizer(tokenizer, tokenizer.vocab_size)


def writings(instance: object) -> Iterator[str]:
    """As programs and people write it."""
    yield json.dumps(instance, ensure_ascii=False)
    yield json.dumps(instance, ensure_ascii=False, separators=(",", ":"))
    yield json.dumps(instance, ensure_ascii=False, indent=2)


def test_strings_may_be_escaped() -> None:
    """Free ones; where a pattern or a constant says what they are, characters stand for themselves."""
    tokenizer, masks = tokenizers()
    text = checked_grammar(StructuredOutputsParams(json={"type": "string", "maxLength": 3}), tokenizer).text
    for written in (r'"\u00fc"', r'"\ud83c\udf89"', r'"\n\t\\"', r'"\u0041bc"'):
        assert whole(masks, text, tokenizer.encode(written, add_special_tokens=False)), written


def test_there_are_many() -> None:
    assert len(CASES) >= 100
    assert sum(not case.refused for case in CASES) >= 85


@pytest.mark.parametrize("case", CASES, ids=lambda case: json.dumps(case.schema)[:60])
def test_instances(case: Case) -> None:
    tokenizer, masks = tokenizers()
    params = StructuredOutputsParams(json=case.schema)
    if case.refused:
        with pytest.raises(ValueError, match=r"^structured_outputs: json: \S"):
            checked_grammar(params, tokenizer)
        return
    text = checked_grammar(params, tokenizer).text

    def passes(written: str) -> bool:
        return whole(masks, text, tokenizer.encode(written, add_special_tokens=False))

    for instance in case.valid:
        assert all(map(passes, writings(instance))), instance
    for instance in case.invalid:
        assert not any(map(passes, writings(instance))), instance
