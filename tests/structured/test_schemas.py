"""Every valid instance of a schema passes its grammar token by token, every other one does not, or the schema is refused."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterator
from functools import cache, partial
from random import Random
from typing import Any

import llguidance
import pytest
from amounts import combined
from hard_cases import HARD
from jsonschema import Draft202012Validator, FormatChecker
from schema_cases import CASES, Case
from schema_makers import FORMATS, JSON_PIECES, OwnVocabulary, make_instance, make_schema, mutated
from structured_parts import whole
from user_cases import FOLLOWED, REFUSED

from front.params import StructuredOutputsParams
from front.structured.grammar import checked_grammar
from front.structured.vocabulary import Vocabulary, grammar_tokenizer
from front.text.tokenizer import Tokenizer
from models.tiny import CHECKPOINT

pytestmark = pytest.mark.structured


VOCABULARIES = ("tiny", "bytes", "pieces")
QUICK, MANY = 6, 300


@cache
def tokenizers(name: str = "tiny") -> tuple[Vocabulary, llguidance.LLTokenizer]:
    tokenizer = Tokenizer(CHECKPOINT) if name == "tiny" else OwnVocabulary(JSON_PIECES if name == "pieces" else ())
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


def test_closed_objects_wherever_they_stand() -> None:
    inner = {"type": ["object", "null"], "properties": {"a": {"type": "integer"}}}
    schema = {"type": "object", "properties": {"default": inner, "x": {"items": inner}}, "required": ["default", "x"]}
    tokenizer, masks = tokenizers()
    params = StructuredOutputsParams(json=schema, disable_additional_properties=True)
    text = checked_grammar(params, tokenizer).text
    for more, passes in (({}, True), ({"b": 1}, False)):
        for instance in ({"default": {"a": 1, **more}, "x": []}, {"default": None, "x": [more]}):
            written = json.dumps(instance)
            assert whole(masks, text, tokenizer.encode(written, add_special_tokens=False)) == passes, written


def test_there_are_many() -> None:
    assert len(CASES) >= 150
    assert sum(not case.refused for case in CASES) >= 85


def check(case: Case, vocabulary: str) -> bool:
    """Whether it was followed; False: refused, with a reason."""
    tokenizer, masks = tokenizers(vocabulary)
    params = StructuredOutputsParams(json=case.schema)
    try:
        text = checked_grammar(params, tokenizer).text
    except ValueError as error:
        assert str(error).startswith("structured_outputs: json: ") and len(str(error)) > 30, error
        return False

    def passes(written: str) -> bool:
        return whole(masks, text, tokenizer.encode(written, add_special_tokens=False))

    for instance in case.valid:
        assert all(map(passes, writings(instance))), (case.schema, instance)
    for instance in case.invalid:
        assert not any(map(passes, writings(instance))), (case.schema, instance)
    return True


@pytest.mark.parametrize("case", CASES, ids=lambda case: json.dumps(case.schema)[:60])
def test_instances(case: Case) -> None:
    assert check(case, "tiny") != case.refused


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", VOCABULARIES[1:])
def test_instances_in_other_tokens(vocabulary: str) -> None:
    for case in CASES:
        assert check(case, vocabulary) != case.refused


@pytest.mark.parametrize(
    ("schema", "vocabulary"),
    combined(HARD, VOCABULARIES, names=([json.dumps(one[0])[:60] for one in HARD], VOCABULARIES)),
)
def test_hard_schemas(schema: tuple[Any, ...], vocabulary: str) -> None:
    judge, instances = Draft202012Validator(schema[0]), schema[1:]
    judged = [[one for one in instances if judge.is_valid(one) == valid] for valid in (True, False)]
    check(Case(schema[0], *judged), vocabulary)


def test_most_hard_schemas_are_followed() -> None:
    assert sum(check(Case(schema[0]), "bytes") for schema in HARD) >= 0.75 * len(HARD)


KNOWN = FormatChecker(())  # of another text jsonschema alone does not know
for known, example in FORMATS.items():
    KNOWN.checkers[known] = partial(operator.eq, example), ()


def made_by(seed: int) -> Case:
    """A schema by chance, with instances that jsonschema has judged."""
    random = Random(seed)
    schema = make_schema(random)
    made = [make_instance(random, schema, schema) for _ in range(8)]
    made += [mutated(random, one) for one in made]
    strict, lenient = Draft202012Validator(schema, format_checker=KNOWN), Draft202012Validator(schema)
    valid = [one for one in made if strict.is_valid(one)]
    return Case(schema, valid, [one for one in made if not lenient.is_valid(one)])


def check_made(seeds: range, vocabulary: str) -> None:
    cases = [made_by(seed) for seed in seeds]
    followed = sum([check(case, vocabulary) for case in cases])
    assert followed >= 0.8 * len(cases)
    assert sum(bool(case.valid) for case in cases) >= 0.8 * len(cases)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_schemas_by_chance(vocabulary: str) -> None:
    check_made(range(QUICK), vocabulary)


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_many_schemas_by_chance(vocabulary: str) -> None:
    check_made(range(QUICK, MANY), vocabulary)


def test_choices_are_these_texts() -> None:
    """Whatever they are made of, and as many as may be given."""
    tokenizer, masks = tokenizers()
    odd = (
        "a",
        "ab",
        "a b",
        "x.y*",
        "new\nline",
        "tab\t",
        'q"',
        "b\\s",
        "/s/",
        "é🎉",
        "<t>",
        "{1}",
        "$^",
        "a|b",
        "(x)[y]",
        "#&~-\x00",
    )
    for choices in (odd, tuple(map(str, range(4096)))):
        text = checked_grammar(StructuredOutputsParams(choice=choices), tokenizer).text
        for written in (*choices[:16], "", "abc", "xay", "a|", "4096", "x"):
            tokens = tokenizer.encode(written, add_special_tokens=False)
            assert whole(masks, text, tokens) == (written in choices), written


@pytest.mark.parametrize("schema", FOLLOWED, ids=lambda one: json.dumps(one[0])[:60])
def test_schemas_of_users(schema: tuple[Any, ...]) -> None:
    judge, instances = Draft202012Validator(schema[0]), schema[1:]
    judged = [[one for one in instances if judge.is_valid(one) == valid] for valid in (True, False)]
    assert check(Case(schema[0], *judged), "tiny")


@pytest.mark.parametrize(("schema", "named"), REFUSED, ids=lambda one: json.dumps(one)[:60])
def test_refusals_name_the_keyword(schema: object, named: str) -> None:
    """And show nothing of the text that is made for the back end."""
    with pytest.raises(ValueError) as refused:
        checked_grammar(StructuredOutputsParams(json=schema), tokenizers()[0])
    message = str(refused.value)
    assert named in message and "%json" not in message and "x-guidance" not in message


@pytest.mark.parametrize("kind", ["regex", "grammar"])
def test_counts_within_counts(kind: str) -> None:
    given = {"regex": "((a{100}){100}){100}", "grammar": "start: /((a{100}){100}){100}/"}[kind]
    with pytest.raises(ValueError, match="counts within counts"):
        checked_grammar(StructuredOutputsParams(**{kind: given}), tokenizers()[0])


def test_bounds_that_leave_themselves_out() -> None:
    """All pairs of some numbers as bounds, and numbers beside them."""
    tokenizer, masks = tokenizers("bytes")
    bounds = (-0.5, -0.001, 0, 0.5, 10)
    for low, high in ((low, high) for low in bounds for high in bounds if low < high):
        for least, most in (("minimum", "exclusiveMaximum"), ("exclusiveMinimum", "maximum")):
            schema = {"type": "number", least: low, most: high}
            judge, text = (
                Draft202012Validator(schema),
                checked_grammar(StructuredOutputsParams(json=schema), tokenizer).text,
            )
            for number in {low, high, 0, low - 1, high + 1, low + 0.0001, high - 0.0001}:
                written = json.dumps(round(number, 6))
                for form in (
                    written,
                    written if "." in written else f"{written}.0",
                    f"-{written}" if not number else written,
                ):
                    passes = whole(masks, text, tokenizer.encode(form, add_special_tokens=False))
                    assert not passes or judge.is_valid(json.loads(form)), (schema, form)
                    assert passes or form != written or not judge.is_valid(json.loads(form)), (schema, form)
