"""Matchers by the library's C interface allow what those of its Python interface allow, alone and together."""

from __future__ import annotations

from random import Random

import llguidance
import numpy as np
import pytest
from structured_parts import allowed

from engine.structured import llguidance_matcher
from engine.structured.guide import Guide, Masks
from engine.structured.llguidance_matcher import NativeMatcher, NativeTokenizer
from front.messages import StructuredOutputsParams
from front.structured.grammar import LIMITS, checked_grammar
from front.structured.vocabulary import grammar_tokenizer, grammar_vocabulary
from front.text import Tokenizer
from models.tiny import CHECKPOINT

pytestmark = [
    pytest.mark.structured,
    pytest.mark.skipif(
        not llguidance_matcher.can_run(), reason="needs the native kernels and the version of the library"
    ),
]
TOKENIZER = Tokenizer(CHECKPOINT)
SIZE = TOKENIZER.vocab_size + 40  # a model may have more tokens than the tokenizer
OF_PYTHON = grammar_tokenizer(TOKENIZER, SIZE)
OF_C = NativeTokenizer(grammar_vocabulary(TOKENIZER, SIZE))
ASKED = [
    StructuredOutputsParams(json={"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 3}),
    StructuredOutputsParams(json={"properties": {"first name": {"type": "string"}, "age": {"type": "integer"}}}),
    StructuredOutputsParams(json_object=True),
    StructuredOutputsParams(regex=r"([a-zé]{2,5} ){2,4}\d+"),
    StructuredOutputsParams(choice=("yes and no", "never", "it was a good day")),
    StructuredOutputsParams(grammar='start: "a fox " /[a-z ]+/ "." | "ü" start'),
]
TEXTS = [checked_grammar(asked, TOKENIZER).text for asked in ASKED]


def of_python(text: str) -> llguidance.LLMatcher:
    return llguidance.LLMatcher(OF_PYTHON, text, log_level=0, limits=LIMITS)


def tokens_of(words_W: np.ndarray) -> frozenset[int]:
    return frozenset(np.flatnonzero(np.unpackbits(words_W.view(np.uint8), bitorder="little")).tolist())


def test_walks_by_chance() -> None:
    """All grammars beside each other, with one mask of every step from each kind of matcher."""
    random, masks = Random(1), Masks(SIZE, TOKENIZER.eos_token_ids)
    for _ in range(6):
        expected = [of_python(text) for text in TEXTS]
        guides = [Guide(NativeMatcher.of(OF_C, text), TOKENIZER.eos_token_ids) for text in TEXTS]
        for _ in range(40):
            mask_of, masks_NW = masks.fill([*guides, None])
            assert mask_of.tolist() == [*range(len(guides)), -1]
            drawn = []
            for own, other, words_W in zip(guides, expected, masks_NW, strict=False):
                found = tokens_of(words_W)
                assert found == (frozenset(TOKENIZER.eos_token_ids) if other.is_stopped() else allowed(other))
                assert own.forced() == ([] if other.is_stopped() else other.compute_ff_tokens())
                run = [random.randrange(SIZE - 60) for _ in range(2)]
                drawn.append([random.choice(sorted(found))])
                if not other.is_stopped():
                    for tokens in (run, drawn[-1] + run):
                        assert own.num_valid(tokens) == other.validate_tokens(tokens)
                    other.consume_tokens(drawn[-1])
            masks.accept(guides, drawn)
            for own, other in zip(guides, expected, strict=True):
                assert (own.ended, own.error) == (other.is_stopped(), other.get_error())
        for own, text in zip(guides, TEXTS, strict=True):
            own.restate([])
            assert tokens_of(masks.fill([own])[1][0]) == allowed(of_python(text))


def test_a_copy_goes_its_own_way_and_outlives_the_first() -> None:
    root = NativeMatcher.of(OF_C, TEXTS[3])
    masks, ends = Masks(SIZE, TOKENIZER.eos_token_ids), TOKENIZER.eos_token_ids
    first, second = Guide(root.deep_copy(), ends), Guide(root.deep_copy(), ends)
    before = tokens_of(masks.fill([first])[1][0])
    first.accept([min(before)])
    del root, first
    assert tokens_of(masks.fill([second])[1][0]) == before


def test_masks_of_a_run_are_those_of_its_steps() -> None:
    """Also behind the end, and behind a draft that is refused; nothing of the matcher changes."""
    text = checked_grammar(StructuredOutputsParams(regex="[ab]{2,3}"), TOKENIZER).text
    a, b = (TOKENIZER.encode(one, add_special_tokens=False)[-1] for one in ("xa", "xb"))
    masks, ends = Masks(SIZE, TOKENIZER.eos_token_ids), TOKENIZER.eos_token_ids
    for drafts in ([], [a], [a, b, a], [a, b, ends[0], a], [a, 999, b]):
        own = Guide(NativeMatcher.of(OF_C, text), ends)
        runs = [drafts[:place] for place in range(len(drafts) + 1)]
        got = masks.fill([own] * len(runs), runs)[1].copy()
        for place in range(own.num_valid(drafts) + 1):
            single = Guide(NativeMatcher.of(OF_C, text), ends)
            single.accept(drafts[:place])
            assert np.array_equal(masks.fill([single])[1][0], got[place]), (drafts, place)
        assert np.array_equal(masks.fill([own])[1][0], got[0])


def test_a_token_that_may_not_come_is_an_error_that_stays() -> None:
    own, other = Guide(NativeMatcher.of(OF_C, TEXTS[4])), of_python(TEXTS[4])
    (wrong,) = {min(set(range(300)) - allowed(other))}
    masks = Masks(SIZE, TOKENIZER.eos_token_ids)
    masks.accept([own], [[wrong]])
    other.consume_tokens([wrong])
    assert own.ended and own.error == other.get_error() != ""
    assert tokens_of(masks.fill([own])[1][0]) == frozenset(TOKENIZER.eos_token_ids)


def test_what_is_no_grammar() -> None:
    root = NativeMatcher.of(OF_C, "start: nowhere")
    assert root.is_error() and "nowhere" in root.get_error()
