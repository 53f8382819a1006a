"""Structured output on ranks: what comes is what a grammar allows, and the same however it is computed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from moesaic import LLM, SamplingParams, StructuredOutputsParams

pytestmark = pytest.mark.structured
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PROMPTS = ["Once upon a time", "The dog"]


def asks(**kinds: object) -> StructuredOutputsParams:
    return StructuredOutputsParams(**kinds)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_model_len=256) as llm:
        yield llm


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_what_was_asked_for(llm: LLM, temperature: float) -> None:
    def text(structured: StructuredOutputsParams) -> list[str]:
        params = SamplingParams(max_tokens=100, temperature=temperature, seed=3, structured_outputs=structured)
        results = [result.outputs[0] for result in llm.generate(PROMPTS, params)]
        assert all(result.finish_reason == "stop" for result in results)
        return [result.text for result in results]

    for found in text(asks(json=SCHEMA, disable_any_whitespace=True)):
        assert json.loads(found).keys() == {"name", "age"}
    assert all(found in ("yes", "no", "maybe") for found in text(asks(choice=("yes", "no", "maybe"))))
    assert all(re.fullmatch(r"[a-c]{2} \d{3}", found) for found in text(asks(regex=r"[a-c]{2} \d{3}")))
    assert all(found in ("ac", "bc") for found in text(asks(grammar='root ::= ("a" | "b") end\nend ::= "c"\n')))


def test_spaces_do_not_eat_the_answer(llm: LLM) -> None:
    """A model that goes on with spaces as long as it may has said little when its tokens are spent."""
    params = SamplingParams(max_tokens=160, temperature=1.0, seed=1, n=8, structured_outputs=asks(json=SCHEMA))
    for result in llm.generate(PROMPTS, params):
        for output in result.outputs:
            assert output.finish_reason == "stop" and json.loads(output.text).keys() == {"name", "age"}, output.text
