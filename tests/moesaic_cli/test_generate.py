"""What `moesaic generate` writes while texts come, and the lengths of answers."""

from __future__ import annotations

import io

import moesaic
from front.outputs import Delta
from moesaic.generate import InOrder


def test_texts_are_written_in_order_while_they_come() -> None:
    stream = io.StringIO()
    writer = InOrder(["a:", "b:"], False, stream)
    writer.add(1, Delta(1, "x", [1]))
    assert stream.getvalue() == ""
    writer.add(0, Delta(0, "1", [1]))
    writer.add(0, Delta(0, "2", [1]))
    assert stream.getvalue() == "a:12"
    writer.add(0, Delta(0, "", [], finish_reason="stop"))
    assert stream.getvalue() == "a:12\nb:x"
    writer.add(1, Delta(1, "y", [1], finish_reason="length"))
    assert stream.getvalue() == "a:12\nb:xy\n"


def test_json_is_a_line_per_prompt() -> None:
    stream = io.StringIO()
    writer = InOrder(["a", "b"], True, stream)
    writer.add(1, Delta(1, "x", [1], finish_reason="stop"))
    writer.add(0, Delta(0, "y", [1]))
    assert stream.getvalue() == ""
    writer.add(0, Delta(0, "", [], finish_reason="length"))
    assert stream.getvalue().splitlines() == [
        '{"prompt": "a", "text": "y", "finish_reason": "length"}',
        '{"prompt": "b", "text": "x", "finish_reason": "stop"}',
    ]


def test_a_chat_answer_is_not_cut_after_a_few_tokens() -> None:
    """The stories of the embedded model end by themselves, long after the 16 tokens of a completion."""
    with moesaic.LLM(max_model_len=512) as llm:
        parts: list[tuple[int, str]] = []
        params = moesaic.SamplingParams(max_tokens=4, temperature=0.0)
        (whole,) = llm.generate("Once", params, on_delta=lambda number, delta: parts.append((number, delta.text)))
        assert "".join(text for _, text in parts) == whole.outputs[0].text and {number for number, _ in parts} == {0}
        (answer,) = llm.chat([{"role": "user", "content": "Tell me a story about a cat."}])
        assert len(answer.outputs[0].token_ids) > 16
