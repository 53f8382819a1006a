"""Structured output through HTTP and the openai client, on an engine of this process."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import openai
import pytest
from server_parts import Server, server, small_tokenizer
from test_end_to_end import running

from front.messages import AddRequest
from front.params import SamplingParams, StructuredOutputsParams
from front.structured.grammar import checked_grammar
from server.errors import unfinished

pytestmark = pytest.mark.structured
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAG = {"begin": "<f>", "schema": SCHEMA, "end": "</f>"}
FORMAT = {
    "type": "triggered_tags",
    "triggers": ["<f>"],
    "tags": [{"begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}],
}
FORMS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_object"}}, r'"json_schema": \{"type": "object"'),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}}, '"a"'),
    ({"response_format": {"type": "structural_tag", "structures": [TAG], "triggers": ["<f"]}}, r"\[lazy\].*<f"),
    ({"response_format": {"type": "structural_tag", "format": FORMAT}}, r"\[lazy\].*<f>"),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, r'"whitespace_pattern": ""'),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "whitespace_pattern": "[ ]?"}}, r'"whitespace_pattern": "\[ \]\?"'),
    ({"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}}, r'"additionalProperties": false'),
    ({"structured_outputs": {"json_object": True}}, '"json_schema"'),
    ({"structured_outputs": {"regex": "a+/b"}}, r"start: /a\+\\/b/"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, r"start: /yes\|no/"),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, 'start: "a"'),
    ({"structured_outputs": {"grammar": 'start: "a" x\nx: /b/'}}, "x: /b/"),
    ({"structured_outputs": {"structural_tag": json.dumps({"format": FORMAT})}}, r"\[lazy\]"),
    ({"guided_json": SCHEMA, "guided_decoding_backend": "guidance"}, '"a"'),
    ({"guided_regex": "ab"}, "start: /ab/"),
    ({"guided_choice": ["yes"]}, "start: /yes/"),
    ({"guided_grammar": 'start: "a"'}, 'start: "a"'),
]  # fmt: skip


def last_params(s: Server) -> SamplingParams:
    return next(message.params for message in reversed(s.ranks.sent) if isinstance(message, AddRequest))


@pytest.mark.parametrize(("fields", "grammar"), FORMS, ids=lambda value: str(value)[:50])
def test_every_form_reaches_the_ranks_as_a_grammar(fields: dict[str, Any], grammar: str) -> None:
    async def run() -> None:
        async with server() as s:
            for call in (s.chat, s.complete):
                await call(**fields, max_tokens=4)
                params = last_params(s)
                assert params.grammar is not None and params.structured_outputs is None
                assert re.search(grammar, params.grammar.text), params.grammar.text

    asyncio.run(run())


def test_text_is_free() -> None:
    async def run() -> None:
        async with server() as s:
            await s.chat(response_format={"type": "text"}, max_tokens=4)
            assert last_params(s).grammar is None

    asyncio.run(run())


def test_a_back_end_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(ValueError, match=r"structured_outputs: .*pip install 'moesaic\[xgrammar\]'"):
        checked_grammar(StructuredOutputsParams(regex="a missing one", backend="xgrammar"), small_tokenizer())


def test_what_the_engine_could_not_go_on_with() -> None:
    """Is the request's fault where it has a grammar, and nothing else that could fail."""
    structured = StructuredOutputsParams(json_object=True)
    assert unfinished(SamplingParams(structured_outputs=structured)).code == "grammar_too_complex"
    for params in (SamplingParams(), SamplingParams(structured_outputs=structured, extra_args={"a": 1})):
        assert (unfinished(params).status, unfinished(params).code) == (500, "engine_error")


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.slow
def test_the_openai_client(tmp_path: Path) -> None:
    """Two ranks of the embedded model, in processes of their own."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    with (
        running(tmp_path) as (_, _, url),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api,
    ):
        messages: Any = [{"role": "user", "content": "Who is the dog?"}]

        def ask(seed: int, stream: bool = False, **more: Any) -> Any:
            return api.chat.completions.create(
                model="tiny", messages=messages, max_tokens=200, seed=seed, temperature=0.6, stream=stream,
                **({"response_format": form} | more),
            )  # fmt: skip

        whole = [ask(seed).choices[0].message.content for seed in range(4)]
        for text in whole:
            assert json.loads(text).keys() == {"name", "age"}
        scored = ask(1, n=2, logprobs=True, top_logprobs=2)
        assert scored.choices[0].message.content == whole[1]
        assert all(json.loads(choice.message.content) for choice in scored.choices)
        choices = {"guided_choice": ["yes", "no"]}
        assert ask(0, response_format=openai.omit, extra_body=choices).choices[0].message.content in ("yes", "no")
        with pytest.raises(openai.BadRequestError, match="uniqueItems"):
            ask(0, response_format=openai.omit, extra_body={"guided_json": {"type": "array", "uniqueItems": True}})
        many = [{"type": "object", "properties": {f"k{j}": {} for j in range(30)}} for _ in range(60)]
        with pytest.raises(openai.BadRequestError, match="asks for more work at a step"):
            ask(0, response_format=openai.omit, extra_body={"guided_json": {"anyOf": many}})
        for seed in range(4):
            assert "".join(chunk.choices[0].delta.content or "" for chunk in ask(seed, stream=True)) == whole[seed]
