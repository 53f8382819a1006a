"""Every family's text becomes the calls that were meant, however it is cut into pieces, and no text is lost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from amounts import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tool_formats import RENDERED, SCHEMA, Calls, dumps, read, reasoning_of, tags_of_family

from front.chat.events import CallArguments, CallBegin, CallEnd, Content
from front.chat.families import CALLS, HARMONY, TOOL_PARSERS

pytestmark = pytest.mark.tools
ALPHABET = 'ab <>/={}[]"\\\n\té漢🎉|｜▁:,0'
TEXTS = st.text(ALPHABET, max_size=30)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": TEXTS,
        "maybe": TEXTS,
        "number": st.integers(),
        "yes": st.booleans(),
        "many": st.lists(VALUES, max_size=3),
        "deep": st.dictionaries(TEXTS, VALUES, max_size=3),
    },
)
CALL_LISTS = st.lists(st.tuples(st.just("f"), ARGUMENTS), min_size=1, max_size=3)


def cuts(data: st.DataObject, text: str) -> list[str]:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


def sayable(family: str, calls: Calls) -> bool:
    """Values that a format writes as plain text cannot hold the tag that ends them."""
    table = CALLS.get(family)
    if table is None:
        return not any(tag in dumps(calls) for tag in tags_of_family(family))
    return not table.value_end or table.value_end[:5] not in json.dumps(calls, ensure_ascii=False)


@settings(max_examples=examples(40), deadline=None)
@given(data=st.data(), calls=CALL_LISTS, said=st.sampled_from(["", "Let me see.", "é, 漢 < 3"]))
@pytest.mark.parametrize("form", RENDERED)
def test_calls_come_back(form: str, data: st.DataObject, calls: Calls, said: str) -> None:
    family, render = RENDERED[form]
    if not sayable(family, calls):
        return
    if family == HARMONY:
        said = f"<|channel|>final<|message|>{said}<|end|>" if said else ""
    text = said + render(calls)
    message, _ = read(cuts(data, text), family)
    assert [(call.name, json.loads(call.arguments)) for call in message.calls] == calls
    assert message.content == said.removeprefix("<|channel|>final<|message|>").removesuffix("<|end|>")
    assert len({call.id for call in message.calls}) == len(calls)


@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("with_reasoning", [False, True])
@pytest.mark.parametrize("family", TOOL_PARSERS)
def test_any_split_gives_the_same_and_no_text_is_lost(family: str, with_reasoning: bool, data: st.DataObject) -> None:
    """Of texts made of the format's own tags, whole and broken."""
    tags = [*tags_of_family(family), "<think>", "</think>"]
    broken = [tag[: place + 1] for tag in tags for place in range(0, len(tag), 3)]
    words = st.sampled_from(
        [*tags, *broken, "f", '{"a": 1}', '{"name": "f", "arguments": ', "{", "}", '"', " ", "\n", "é"]
    )
    text = "".join(data.draw(st.lists(words, max_size=20)))
    reasoning = reasoning_of(family) if with_reasoning else ""
    begins = data.draw(st.sampled_from([None, True, False])) if with_reasoning else None
    cut = data.draw(st.booleans())
    most = data.draw(st.integers(0, 2))
    more: dict[str, Any] = {"cut": cut, "begins_reasoning": begins, "max_calls": most}
    whole, events = read([text], family, reasoning, **more)
    for pieces in (cuts(data, text), list(text)):
        assert read(pieces, family, reasoning, **more)[0] == whole
    if not whole.calls and not with_reasoning and family != HARMONY:
        assert whole.content == text
    if most:
        assert len(whole.calls) <= most
    if CALLS.get(family) and CALLS[family].arguments == "parameters":
        ended = {event.index for event in events if isinstance(event, CallEnd) and event.complete}
        for index in ended:
            assert isinstance(json.loads(whole.calls[index].arguments), dict)


@pytest.mark.parametrize("form", RENDERED)
def test_a_call_says_its_name_once_and_its_arguments_in_pieces(form: str) -> None:
    family, render = RENDERED[form]
    text = render([("f", {"text": "word " * 20, "number": 5})])
    _, events = read(list(text), family)
    assert [event.name for event in events if isinstance(event, CallBegin)] == ["f"]
    pieces = [event.text for event in events if isinstance(event, CallArguments)]
    assert json.loads("".join(pieces)) == {"text": "word " * 20, "number": 5}
    assert len(pieces) > 50 or form == "hermes, turned"  # where the name comes last, all waits for it


@pytest.mark.parametrize("family", [name for name, table in CALLS.items() if table.arguments == "parameters"])
@pytest.mark.parametrize(
    ("text", "value"),
    [("5", 5), ("five", "five"), ("true", "true"), ("[1]", "[1]")],
)
def test_types_are_the_schemas(family: str, text: str, value: object) -> None:
    """A number's parameter takes what is a number, and what is not stays a text."""
    if "deepseek" in family:
        pytest.skip("the format says itself what is a text")
    form = next(
        render
        for name, render in RENDERED.values()
        if name == family or name == {"qwen3_xml": "qwen3_coder"}.get(family)
    )
    rendered = form([("f", {"number": text, "text": text})])
    found = json.loads(read([rendered], family)[0].calls[0].arguments)
    assert found["text"] == text
    assert found["number"] == value or text in ("true", "[1]")


@pytest.mark.parametrize("form", RENDERED)
def test_an_output_that_ends_within_a_call(form: str) -> None:
    """Cut at every place: what was said is a beginning of what was meant."""
    family, render = RENDERED[form]
    text = render([("f", {"text": 'say "é" \\ ', "number": 12})])
    full = read([text], family)[0].calls[0].arguments
    for place in range(len(text)):
        message, events = read([text[:place]], family, cut=True)
        assert len(message.calls) <= 1
        if message.calls:
            assert message.content == ""
            as_said = message.calls[0].arguments.split("<")[0]  # a tag that is one token is never cut
            assert full.startswith(as_said) or CALLS[family].arguments == "parameters"
            assert isinstance(events[-1], CallEnd)
        elif family != HARMONY:
            assert message.content == text[:place]


@settings(max_examples=examples(60), deadline=None)
@given(text=st.text(ALPHABET, max_size=60))
@example(text="a < b and <tool_call> is a tag")
@pytest.mark.parametrize("family", [*CALLS])
def test_plain_text_goes_through_as_it_is(family: str, text: str) -> None:
    message, events = read(list(text), family)
    if not any(isinstance(event, CallBegin) for event in events):
        assert message.content == text and all(isinstance(event, Content) for event in events)


def test_the_schema_of_these_tests_is_one() -> None:
    assert set(SCHEMA["properties"]) == {"text", "maybe", "number", "yes", "many", "deep"}  # type: ignore[call-overload]


@pytest.mark.parametrize("cut_up", [list, lambda text: [text]])
def test_values_without_the_tag_that_ends_them(cut_up: Any) -> None:
    """Qwen3-Coder leaves it out now and then: the next parameter, or the end of the call, ends the value too."""
    begin, end = "<tool_call>\n<function=f>\n", "\n</function>\n</tool_call>"
    text = f"{begin}<parameter=number>\n5\n<parameter=text>\na <b>\nc{end}{begin}<parameter=number>\n7{end}bye"
    message, _ = read(cut_up(text), "qwen3_coder")
    assert [json.loads(call.arguments) for call in message.calls] == [{"number": 5, "text": "a <b>\nc"}, {"number": 7}]
    assert message.content == "bye"
