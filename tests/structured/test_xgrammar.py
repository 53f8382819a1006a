"""xgrammar as the back end: what it accepts, what is refused by name, and streams that are what its grammars allow."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
import torch
from amounts import examples
from drafting import METHODS, RANDOM, Streams
from hypothesis import given, settings
from hypothesis import strategies as st
from refused import error_of
from schema_cases import CASES, Case
from server_parts import MODEL, server
from test_schemas import made_by

from configs.server import ServerConfig
from engine.structured.guide import Guide, Masks, Words
from engine.structured.xgrammar_matcher import XgrammarMatcher
from front.messages import AddRequest
from front.params import StructuredOutputsParams
from front.structured.grammar import checked_grammar
from front.structured.xgrammar_backend import Compiler
from front.text.tokenizer import Tokenizer
from models.tiny import CHECKPOINT

pytest.importorskip("xgrammar", reason="these need xgrammar: pip install 'moesaic[xgrammar]'")
pytestmark = pytest.mark.structured
torch.set_num_threads(1)

TOKENIZER = Tokenizer(CHECKPOINT)
COMPILER = Compiler(TOKENIZER, TOKENIZER.vocab_size)
ENDS = frozenset(COMPILER.ends)


def asked(**fields: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(backend="xgrammar", **fields)


def matcher_of(text: str) -> XgrammarMatcher:
    return XgrammarMatcher(COMPILER.matcher(COMPILER.compile(text)), TOKENIZER.vocab_size)


def allowed(matcher: XgrammarMatcher) -> frozenset[int]:
    words = np.zeros(-(-TOKENIZER.vocab_size // 32), np.int32)
    matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    assert not matcher.is_error(), matcher.get_error()
    return frozenset(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def whole(text: str, written: str) -> bool:
    """Whether every mask has the next token of it, and the last one the end."""
    matcher = matcher_of(text)
    for token in TOKENIZER.encode(written, add_special_tokens=False):
        if token not in allowed(matcher) or not matcher.consume_tokens([token]):
            return False
    return matcher.is_accepting() and bool(allowed(matcher) & ENDS)


def passes(params: StructuredOutputsParams, written: str) -> bool:
    return whole(checked_grammar(params, TOKENIZER).text, written)


# ---- what it accepts ----

KINDS_OF = {"properties": dict, "required": dict, "minLength": str, "minimum": int, "minItems": list}


def narrower(schema: Any, instance: Any) -> bool:
    """Valid, and not made by xgrammar: where constraints of one type stand without it, values of others; a quote or a
    backslash where a pattern says what characters are."""
    if not isinstance(schema, dict):
        return False
    kind = next((KINDS_OF[keyword] for keyword in schema if keyword in KINDS_OF), None)
    if "type" not in schema and kind is not None and not isinstance(instance, kind):
        return True
    return "pattern" in schema and isinstance(instance, str) and any(character in instance for character in '"\\')


def follows(case: Case) -> bool:
    """Whether it is followed; False: refused, with a reason."""
    try:
        text = checked_grammar(asked(json=case.schema), TOKENIZER).text
    except ValueError as error:
        assert str(error).startswith("structured_outputs: json: ") and len(str(error)) > 30, error
        return False
    constant = any(word in json.dumps(case.schema) for word in ('"enum"', '"const"'))  # written without spaces
    for instance in case.valid:
        forms: list[dict[str, Any]] = [{"separators": (",", ":")}, *([] if constant else [{}, {"indent": 2}])]
        for form in forms:
            written = json.dumps(instance, ensure_ascii=False, **form)
            assert whole(text, written) or narrower(case.schema, instance), (case.schema, written)
    for instance in case.invalid:
        written = json.dumps(instance, ensure_ascii=False, separators=(",", ":"))
        assert not whole(text, written), (case.schema, written)
    return True


def test_instances_of_schemas() -> None:
    followed = [follows(case) for case in CASES]
    assert sum(followed) >= 0.6 * len(CASES)


def test_schemas_by_chance() -> None:
    followed = [follows(made_by(seed)) for seed in range(40)]
    assert sum(followed) >= 0.3 * len(followed)


def test_characters_of_strings_with_a_length() -> None:
    for schema, written, fits in (
        ({"maxLength": 3}, r'"\n\"a"', True),
        ({"maxLength": 3}, r'"\u00e9üa"', True),
        ({"maxLength": 3}, '"abcd"', False),
        ({"maxLength": 3}, '"a\tb"', False),
        ({"minLength": 1, "maxLength": 1}, '"\t"', False),
        ({"minLength": 1, "maxLength": 1}, r'"\t"', True),
        ({"minLength": 2}, r'"\ud83c\udf89"', False),  # one character
    ):
        assert passes(asked(json={"type": "string", **schema}), written) == fits, (schema, written)


def test_other_kinds() -> None:
    for fields, right, wrong in (
        ({"regex": r"[a-z]{2}\d+/x"}, ["ab12/x"], ["a1/x", "ab/x", "ab1/xx"]),
        ({"choice": ('say "a"\n', "ü🎉", "[x]")}, ['say "a"\n', "ü🎉", "[x]"], ["say", "x", ""]),
        ({"json_object": True}, ["{}", '{"a": [1]}'], ["[]", "1"]),
        ({"json": {"properties": {"a": {}}}, "disable_any_whitespace": True}, ['{"a":1}'], ['{"a": 1}']),
        ({"json": {"type": "object"}, "disable_additional_properties": True}, ["{}"], ['{"a":1}']),
    ):
        for text in right:
            assert passes(asked(**fields), text), (fields, text)
        for text in wrong:
            assert not passes(asked(**fields), text), (fields, text)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"structural_tag": {"format": {"type": "any_text"}}}, "xgrammar takes json, regex and choice"),
    ({"json_object": True, "whitespace_pattern": " ?"}, "whitespace_pattern"),
    ({"regex": r"a(?=b)"}, "Lookahead"),
    ({"regex": r"\Aab"}, r"\\A"),
    ({"regex": "("}, "parenthesis|closed"),
    ({"regex": "((a{0,1000}){0,1000}){0,1000}b"}, "counts"),
    ({"regex": "((a{1,1000}){1,1000})b"}, "counts"),
    ({"grammar": 'start: "a"'}, "xgrammar takes json, regex and choice"),
    ({"choice": ()}, "from 1 to"),
    ({"json": {"type": "integer", "multipleOf": 3}}, "multipleOf"),
    ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    ({"json": {"type": "string", "format": "colour"}}, "format 'colour'"),
    ({"json": {"type": "string", "pattern": "a", "maxLength": 3}}, "maxLength beside pattern"),
    ({"json": {"type": "string", "pattern": "(a{90}){90}"}}, "counts"),
    ({"json": {"type": "string", "pattern": "a|^b"}}, "anchor"),
    ({"json": {"type": "object", "anyOf": [{"required": ["a"]}]}}, "type beside anyOf"),
    ({"json": {"$ref": "#/$defs/none"}}, "'#/\\$defs/none'"),
    ({"json": {"$ref": "#"}}, "points to itself"),
    ({"json": {"type": "object", "properties": [1]}}, "properties must be an object"),
    ({"json": {"allOf": [{"type": "string"}, {"minLength": 1}]}}, "allOf"),
    ({"json": {"type": "object", "required": ["z"], "additionalProperties": False}}, "required: 'z'"),
    ({"json": {"not": {}}}, "not cannot be followed"),
    ({"json": False}, "nothing is valid"),
]


@pytest.mark.parametrize(("fields", "reason"), REFUSED, ids=str)
def test_refusals(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        checked_grammar(asked(**fields), TOKENIZER)


# ---- a server ----


ASKS = {"model": MODEL, "prompt": "Once"}


def test_requests_follow_the_servers_back_end() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
    tag = {"type": "structural_tag", "format": {"type": "any_text"}}

    async def run() -> None:
        async with server(ServerConfig(structured_outputs_backend="xgrammar")) as s:
            for fields, xgrammar in (
                ({"response_format": schema}, True),
                ({"guided_regex": "ab"}, True),
                ({"structured_outputs": {"choice": ["a"], "_backend": "xgrammar"}}, True),
                ({"guided_regex": "ab", "guided_decoding_backend": "guidance"}, False),
            ):
                await s.complete(**fields, max_tokens=4)
                grammar = next(sent.params.grammar for sent in reversed(s.ranks.sent) if isinstance(sent, AddRequest))
                assert grammar is not None and grammar.xgrammar == xgrammar, fields
            error = error_of(await s.post("/v1/completions", {**ASKS, "response_format": tag}), 400)
            assert error["param"] == "response_format" and "xgrammar takes json" in error["message"]
        async with server() as s:
            wanted = {"guided_regex": "a", "guided_decoding_backend": "xgrammar"}
            error = error_of(await s.post("/v1/completions", {**ASKS, **wanted}), 400)
            assert error["param"] == "guided_regex" and "--structured-outputs-config" in error["message"]

    asyncio.run(run())


# ---- on a rank ----


def test_masks_of_a_run_are_those_of_its_steps() -> None:
    """Also behind the end, and behind a draft that is refused; nothing of the matcher changes."""
    text = checked_grammar(asked(regex="[ab]{2,3}"), TOKENIZER).text
    a, b = (TOKENIZER.encode(one, add_special_tokens=False)[-1] for one in ("xa", "xb"))

    def masks_of(guide: Guide, drafts: list[list[int]]) -> Words:
        masks = Masks(1, TOKENIZER.vocab_size, COMPILER.ends)
        masks.put(0, guide)
        mask_P, masks_NW = masks.fill([0] * len(drafts), drafts)
        return masks_NW[mask_P]

    for drafts in ([], [a], [a, b, a], [a, b, COMPILER.ends[0], a], [a, 999, b]):
        guide = Guide(matcher_of(text), COMPILER.ends)
        got = masks_of(guide, [drafts[:place] for place in range(len(drafts) + 1)])
        valid = guide.num_valid(drafts)
        for place in range(valid + 1):
            single = Guide(matcher_of(text), COMPILER.ends)
            single.accept(drafts[:place])
            assert np.array_equal(masks_of(single, [[]])[0], got[place]), (drafts, place)
        assert np.array_equal(masks_of(guide, [[]])[0], got[0])
        assert valid == next((i for i, draft in enumerate(drafts) if draft == 999), min(len(drafts), 3))


ASKED = [
    asked(json={"type": "array", "items": {"type": "string", "maxLength": 5}, "minItems": 4}),
    asked(regex=r"([a-z]{2,5} ){2}\d+"),
    asked(choice=("yes and no", "never", "it was a good day")),
    asked(regex="(no|yes)+", after_token_ids=tuple(TOKENIZER.encode(".", add_special_tokens=False)[-1:])),
    StructuredOutputsParams(regex="[a-z ]+"),  # by llguidance, in the same steps
]
GRAMMARS = [*[checked_grammar(one, TOKENIZER) for one in ASKED], None]
STREAMS = Streams([{**[{}, RANDOM][i % 2], "grammar": own} for i, own in enumerate(GRAMMARS)])


def test_every_token_is_one_that_the_grammar_allows() -> None:
    for index, params in enumerate(ASKED[:3]):
        matcher = matcher_of(checked_grammar(params, TOKENIZER).text)
        for token in STREAMS.expected[index]:
            assert token in (ENDS if matcher.is_stopped() else allowed(matcher)), index
            matcher.consume_tokens([token])
        assert not matcher.is_error()


@settings(max_examples=examples(8), deadline=None)
@given(st.data())
def test_whatever_the_engine_does(data: st.DataObject) -> None:
    STREAMS.check(data, st.none() | METHODS)


@settings(max_examples=examples(4), deadline=None)
@given(st.data())
def test_kills_at_any_moment(data: st.DataObject) -> None:
    STREAMS.endure(data, speculation=data.draw(st.none() | METHODS))
