"""Grammars of forced calls: they accept what a model of the family would write, and nothing else; what they accept is
parsed into the calls that were meant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import llguidance
import pytest
from tool_formats import RENDERED, harmony, hermes

from front.chat.families import HARMONY
from front.chat.forced import forced_calls
from front.chat.format import OutputFormat
from front.params import StructuredOutputsParams
from front.structured.grammar import checked_grammar
from front.structured.vocabulary import grammar_tokenizer
from front.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.tools, pytest.mark.structured]
FUNCTION = {
    "name": "f",
    "parameters": {
        "type": "object",
        "properties": {"text": {"type": "string"}, "number": {"type": "integer"}, "kind": {"enum": ["a", "b"]}},
        "required": ["text"],
        "additionalProperties": False,
    },
}
OTHER = {"name": "other", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
FORMS = [form for form in RENDERED if form not in ("hermes, turned", "openai")]
TOKENIZER = Tokenizer(Path(__file__).parents[2] / "models" / "tiny" / "checkpoint")
VOCABULARY = grammar_tokenizer(TOKENIZER, TOKENIZER.vocab_size)


def accepts(family: str, text: str, *, required: bool, **format: Any) -> bool:
    """As a whole answer."""
    found = OutputFormat(calls=family, **format)
    tag = forced_calls([FUNCTION, OTHER], found, required=required)
    grammar = checked_grammar(StructuredOutputsParams(structural_tag=tag), TOKENIZER)
    matcher = llguidance.LLMatcher(VOCABULARY, grammar.text)
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    taken = matcher.try_consume_tokens(ids)
    assert not matcher.get_error(), matcher.get_error()
    return taken == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("form", FORMS)
def test_calls_as_the_model_writes_them(form: str) -> None:
    family, render = RENDERED[form]
    if form == "glm47":
        pytest.skip("its grammar is that of glm45, with line breaks")
    one = render([("f", {"text": 'a "b" < c', "number": 5, "kind": "b"})])
    two = render([("f", {"text": "x"}), ("other", {})])
    for text in (one, two):
        assert accepts(family, text, required=True), text
        assert accepts(family, "Let me see." + text.lstrip(), required=False)
    assert accepts(family, one, required=True, max_calls=1)
    assert not accepts(family, two, required=True, max_calls=1)


@pytest.mark.parametrize("form", FORMS)
def test_nothing_else(form: str) -> None:
    family, render = RENDERED[form]
    assert accepts(family, "No call, a < b.", required=False)
    wrong = ["No call.", render([("g", {"text": "x"})]), render([("f", {"text": "x", "number": "many"})])]
    wrong += [render([("f", {"number": 3})]), render([("f", {"text": "x", "kind": "c"})])]
    for text in wrong:
        assert not accepts(family, text, required=True), text
    for text in wrong[1:]:
        assert not accepts(family, text.lstrip(), required=False), text


def test_reasoning_may_stand_before_forced_calls() -> None:
    text = hermes([("f", {"text": "x"})])
    more: dict[str, Any] = {"required": True, "reasoning": "qwen3"}
    assert accepts("hermes", f"<think>\nhm < that\n</think>\n\n{text}", **more)
    assert accepts("hermes", text, **more)
    assert not accepts("hermes", f"<think>\nhm\n</think>\n\n{text}", begins_reasoning=False, **more)


def test_gpt_oss() -> None:
    text = harmony([("f", {"text": "x"})]).removeprefix("<|start|>assistant").removesuffix("<|call|>")
    wrong = harmony([("f", {"number": 3})]).removeprefix("<|start|>assistant").removesuffix("<|call|>")
    final = "<|channel|>final<|message|>x, f(3)"
    thinks, says = (
        f"<|channel|>{channel}<|message|>hm<|end|><|start|>assistant" for channel in ("analysis", "commentary")
    )
    for before in ("", thinks):
        assert accepts(HARMONY, before + text, required=True)
        assert not accepts(HARMONY, before + final, required=True)
    for before in ("", thinks, thinks + says, says):
        assert accepts(HARMONY, before + text, required=False)
        assert accepts(HARMONY, before + final, required=False)
        assert not accepts(HARMONY, before + wrong, required=False)


@pytest.mark.parametrize("required", [False, True])
def test_tags_of_which_a_part_is_a_special_token(required: bool) -> None:
    """As DeepSeek-V3.2's tokenizer may have it: text ends with what stands before the token, then comes the token."""
    special = next(name for name, token in TOKENIZER.special_tokens.items() if token not in TOKENIZER.eos_token_ids)

    def taken(answer: str) -> bool:
        tag = forced_calls([FUNCTION, OTHER], OutputFormat(calls="deepseek_v32"), required=required)
        own = json.loads(json.dumps(tag, ensure_ascii=False).replace("｜DSML｜", special))
        grammar = checked_grammar(StructuredOutputsParams(structural_tag=own), TOKENIZER)
        matcher = llguidance.LLMatcher(VOCABULARY, grammar.text)
        ids = TOKENIZER.encode(answer.replace("｜DSML｜", special), add_special_tokens=False)
        count = matcher.try_consume_tokens(ids)
        assert not matcher.get_error(), matcher.get_error()
        return count == len(ids) and matcher.is_accepting()

    render = RENDERED["deepseek_v32"][1]
    one = render([("f", {"text": 'a "b" < c </ d', "number": 5, "kind": "b"})])
    assert taken(one) and taken(render([("f", {"text": "x"}), ("other", {})]))
    assert not taken(render([("f", {"number": 3})])) and not taken(one.replace(">5<", ">five<"))
    assert taken("No call, a < b.") != required
    assert taken("I look it up. <" + one) != required
