"""Which parsers a model gets: what its template says, or the server's options; and where its reasoning begins."""

from __future__ import annotations

from pathlib import Path

import pytest
from tool_formats import RENDERED

from front.chat.families import CALLS, HARMONY, HARMONY_REASONING, REASONING, chosen_families, families_of
from front.chat.format import OutputFormat
from front.text.tokenizer import Tokenizer
from server.api.conversation import message_dict
from server.api.openai import ChatMessage, FunctionCall, ToolCall

pytestmark = pytest.mark.tools
EMBEDDED = Path(__file__).parents[2] / "models" / "tiny" / "checkpoint"
# What stands in the templates of the models, as far as it tells them apart.
MARKS = {
    "<tool_call>\\n{\"name\": ": ("hermes", ""),
    "<tool_call>\\n{\"name\": <think></think>": ("hermes", "qwen3"),
    "<tool_call>\\n<function=": ("qwen3_coder", ""),
    "<tool_call>\\n<function=</think>": ("qwen3_coder", "deepseek_r1"),
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' ```json </think>": ("deepseek_v3", "deepseek_r1"),
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' <think></think>": ("deepseek_v31", "deepseek_v31"),
    "<|tool_calls_section_begin|>": ("kimi_k2", ""),
    "<|tool_calls_section_begin|><think></think>": ("kimi_k2", "kimi_k2"),
    "<tool_call>{name}\\n<arg_key>{k}</arg_key> <think></think>": ("glm45", "glm45"),
    "<minimax:tool_call><think></think>": ("minimax_m2", "minimax_m2"),
    "<|start|>assistant<|channel|>final<|message|>": (HARMONY, HARMONY_REASONING),
    "{{ message.content }}": ("", ""),
}  # fmt: skip


@pytest.mark.parametrize("template", MARKS)
def test_the_template_says_it(template: str) -> None:
    calls, reasoning = families_of(template)
    assert (calls, reasoning) == MARKS[template]
    assert not calls or calls in CALLS or calls == HARMONY
    assert not reasoning or reasoning in REASONING or reasoning == HARMONY_REASONING


def test_options_come_first() -> None:
    template = "<tool_call> <think></think>"
    assert chosen_families(template, None, None) == ("hermes", "qwen3")
    assert chosen_families(template, "glm45", "") == ("glm45", "")
    assert chosen_families("<|channel|><|message|>", "hermes", None) == ("hermes", "")
    with pytest.raises(ValueError, match="do not go together"):
        chosen_families(template, HARMONY, None)


@pytest.mark.parametrize("begins", [None, True, False])
def test_the_prompt_says_whether_reasoning_has_begun(begins: bool | None) -> None:
    end = {None: "<|assistant|>\n", True: "<|assistant|><think>\n", False: "<think>\n\n</think>\n\n"}[begins]
    found = OutputFormat(reasoning="qwen3").after(f"What does <think> mean?{end}")
    assert found.begins_reasoning is begins and found.starts_with_reasoning is bool(begins)
    assert OutputFormat(reasoning="deepseek_r1").after(end).starts_with_reasoning is (begins is not False)
    going = OutputFormat(reasoning="qwen3")
    assert (
        going.going_on("<think>and so").begins_reasoning and not going.going_on("<think>a</think> b").begins_reasoning
    )


def test_the_embedded_models_template_takes_tools_and_their_results() -> None:
    tokenizer = Tokenizer(EMBEDDED)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    call = ToolCall(id="c1", function=FunctionCall(name="f", arguments='{"text": "é", "number": 3}'))
    messages = [
        message_dict(ChatMessage(role="user", content="Hello"), 0),
        message_dict(ChatMessage(role="assistant", tool_calls=[call, call]), 1),
        message_dict(ChatMessage(role="tool", tool_call_id="c1", content="12"), 2),
    ]
    text = tokenizer.apply_chat_template(messages, tools=[tool])
    assert RENDERED["hermes"][1]([("f", {"text": "é", "number": 3})] * 2) in text
    assert "<tool_response>\n12\n</tool_response>" in text and '{"name": "f", "parameters": {"type": "object"}}' in text
    plain = tokenizer.apply_chat_template(messages[:1])
    assert plain == "<|bos|><|user|>Hello<|assistant|>"  # as it was trained
    assert chosen_families(tokenizer.format_marks, None, None) == ("hermes", "")


def test_special_tokens_that_are_tags_are_seen_and_others_are_not() -> None:
    tokenizer = Tokenizer(EMBEDDED)
    ids = [*tokenizer.special_ids, *tokenizer.encode(" a", add_special_tokens=False)]
    shown = next(iter(tokenizer.special_ids))
    tag = f"<{tokenizer.token_str(shown)}>"
    assert tokenizer.detokenizer([5], True, (tag,)).push(ids).strip() == f"{tokenizer.token_str(shown)} a"
    assert tokenizer.detokenizer([5], True).push(ids) == " a"
