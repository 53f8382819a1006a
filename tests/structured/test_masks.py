"""The masks that a rank works out ahead are those that its matchers would give where the step is sampled."""

from __future__ import annotations

from typing import Any

import llguidance
import numpy as np
import pytest
from amounts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.structured.guide import Guide, Masks, Words
from front.params import StructuredOutputsParams
from front.structured.grammar import checked_grammar
from front.structured.vocabulary import grammar_limits, grammar_tokenizer
from front.text.tokenizer import Tokenizer
from models.tiny import CHECKPOINT

pytestmark = pytest.mark.structured
TOKENIZER = Tokenizer(CHECKPOINT)
VOCABULARY = grammar_tokenizer(TOKENIZER, TOKENIZER.vocab_size)
ENDS = VOCABULARY.eos_tokens
ROWS = 4
AFTER = (TOKENIZER.encode(".", add_special_tokens=False)[-1],)
ASKED = [
    StructuredOutputsParams(json={"type": "array", "items": {"type": "string", "maxLength": 3}, "minItems": 1}),
    StructuredOutputsParams(choice=("yes", "yes and no", "never")),
    StructuredOutputsParams(regex="(no|yes){1,4}", after_token_ids=AFTER),
    StructuredOutputsParams(json_object=True),
]
GRAMMARS = [checked_grammar(asked, TOKENIZER) for asked in ASKED]
ROOTS = [llguidance.LLMatcher(VOCABULARY, grammar.text, log_level=0, limits=grammar_limits()) for grammar in GRAMMARS]


def guide_of(number: int) -> Guide:
    return Guide(ROOTS[number].deep_copy(), ENDS, GRAMMARS[number].after_token_ids)


def afresh(number: int, output: list[int], drafts: list[list[int]]) -> list[Words | None]:
    """The masks of a row and its drafts, from nothing but the text so far."""
    guide = guide_of(number)
    guide.restate(output)
    masks = Masks(1, TOKENIZER.vocab_size, ENDS)
    masks.put(0, guide)
    mask_P, masks_NW = masks.fill([0] * len(drafts), drafts if len(drafts) > 1 else ())
    return [masks_NW[mask].copy() if mask >= 0 else None for mask in mask_P]


def tokens_of(mask: Words | None) -> list[int]:
    if mask is None:
        return [*AFTER, 17]
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_whatever_rows_go_on(data: st.DataObject) -> None:
    """Rows come, go on by one token or by several, with drafts that are right or not, are stated anew, and leave."""
    masks = Masks(ROWS, TOKENIZER.vocab_size, ENDS)
    rows: dict[int, tuple[int, list[int]]] = {}  # the grammar and the output
    for _ in range(data.draw(st.integers(1, 12))):
        row = data.draw(st.integers(0, ROWS - 1))
        if data.draw(st.booleans()) or not rows:
            masks.drop(row)
            number = data.draw(st.integers(0, len(GRAMMARS) - 1))
            rows[row] = number, []
            masks.put(row, guide_of(number))
        chosen = data.draw(st.lists(st.sampled_from(sorted(rows)), min_size=1, unique=True))
        runs = {row: drafts_of(data, *rows[row]) for row in chosen}
        places = [(row, runs[row][:count]) for row in chosen for count in range(len(runs[row]) + 1)]
        drafts = [drafts for _, drafts in places]
        mask_P, masks_NW = masks.fill([row for row, _ in places], drafts if any(drafts) else ())
        got = [masks_NW[mask].copy() if mask >= 0 else None for mask in mask_P]
        expected = [
            mask
            for row in chosen
            for mask in afresh(*rows[row], [runs[row][:count] for count in range(len(runs[row]) + 1)])
        ]
        for own, wanted in zip(got, expected, strict=True):
            assert (own is None) == (wanted is None)
            assert own is None or np.array_equal(own, wanted)
        new = []
        for row in chosen:
            first = data.draw(st.sampled_from(tokens_of(afresh(*rows[row], [[]])[0])))
            new.append([first])
            rows[row][1].extend(new[-1])
        masks.accept(chosen, new)


def drafts_of(data: st.DataObject, number: int, output: list[int]) -> list[int]:
    """None, some that may come, and perhaps one that may not."""
    drafts: list[int] = []
    for _ in range(data.draw(st.integers(0, 3))):
        drafts.append(data.draw(st.sampled_from(tokens_of(afresh(number, output + drafts, [[]])[0]))))
    return drafts + [999] * data.draw(st.integers(0, 1))


def test_a_matcher_that_fails_at_the_next_mask_has_not_failed_before_it_is_asked_for() -> None:
    """The token before it is a good one; and a request that ends with it never asks."""
    limits: Any = llguidance.LLParserLimits(step_max_items=40, verbose_errors=False)
    lark = 'start: "a" many\nmany: (one | two)*\none: /[b-d]/ many?\ntwo: /[b-e]/ many?\n'
    matcher = llguidance.LLMatcher(VOCABULARY, lark, log_level=0, limits=limits)
    assert not matcher.is_error(), matcher.get_error()
    guide = Guide(matcher, ENDS)
    masks = Masks(1, TOKENIZER.vocab_size, ENDS)
    masks.put(0, guide)
    tokens = [VOCABULARY.tokenize_str(text)[-1] for text in "abcbcbcbcb"]
    for token in tokens:
        masks.accept([0], [[token]])
        if matcher.is_stopped():
            break
    assert matcher.is_error() and guide.error == ""
    mask_P, masks_NW = masks.fill([0])
    assert guide.error and tokens_of(masks_NW[mask_P[0]]) == sorted(ENDS)
