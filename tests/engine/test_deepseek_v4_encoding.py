"""Conversations as DeepSeek-V4 was trained to read them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from front.chat.deepseek_v4 import DeepseekV4Encoding

BEGIN, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALL = '<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
CALL += "</｜DSML｜invoke>"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def assistant(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def calling(*names: str, **more: Any) -> dict[str, Any]:
    calls = [
        {"id": name, "type": "function", "function": {"name": "weather", "arguments": {"days": 3}}} for name in names
    ]
    return assistant(None, tool_calls=calls, **more)


def result(name: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "content": text}


def called(times: int = 1) -> str:
    return "\n\n<｜DSML｜tool_calls>\n" + "\n".join([CALL] * times) + f"\n</｜DSML｜tool_calls>{END}"


def render(*messages: dict[str, Any], tools: list[dict[str, Any]] | None = None, **options: Any) -> str:
    defaults = {"add_generation_prompt": True, "continue_final_message": False}
    return DeepseekV4Encoding().render(messages, tools=tools, **{**defaults, **options})


def test_turns() -> None:
    said = [system("Be brief."), user("1+1?"), assistant("2", reasoning_content="easy"), user("2+2?")]
    first = f"{BEGIN}Be brief.<｜User｜>1+1?<｜Assistant｜></think>2{END}<｜User｜>2+2?"
    assert render(*said) == f"{first}<｜Assistant｜></think>"
    assert render(*said, add_generation_prompt=False) == first
    assert render(*said, enable_thinking=True) == f"{first}<｜Assistant｜><think>"
    assert render(*said[:3], add_generation_prompt=False, continue_final_message=True) == (
        f"{BEGIN}Be brief.<｜User｜>1+1?<｜Assistant｜></think>2"
    )
    reminder = {"role": "latest_reminder", "content": "It is Monday."}
    assert render(reminder, user("?")) == f"{BEGIN}<｜latest_reminder｜>It is Monday.<｜User｜>?<｜Assistant｜></think>"


@pytest.mark.parametrize("effort", ["max", "xhigh", "high", None])
def test_the_greatest_effort_is_asked_for_in_words(effort: str | None) -> None:
    text = render(system("S"), user("?"), thinking=True, reasoning_effort=effort)
    words = text.removeprefix(BEGIN).removesuffix("S<｜User｜>?<｜Assistant｜><think>")
    assert words.startswith("Reasoning Effort: Absolute maximum") if effort in ("max", "xhigh") else words == ""
    assert render(user("?"), reasoning_effort=effort) == f"{BEGIN}<｜User｜>?<｜Assistant｜></think>"


def test_results_are_part_of_the_users_turn_in_the_order_of_the_calls() -> None:
    turn = [user("?"), calling("a", "b"), result("b", "rain"), result("a", "sun"), user("well?")]
    results = "<｜User｜><tool_result>sun</tool_result>\n\n<tool_result>rain</tool_result>\n\nwell?"
    assert render(*turn) == f"{BEGIN}<｜User｜>?<｜Assistant｜></think>{called(2)}{results}<｜Assistant｜></think>"


def test_reasoning_is_kept_beside_tools() -> None:
    turn = [user("?"), calling("a", reasoning_content="look"), result("a", "sun")]
    results = "<｜User｜><tool_result>sun</tool_result><｜Assistant｜><think>"
    for tools, reasoning in ((None, "</think>"), ([WEATHER], "<think>look</think>")):
        assert render(*turn, thinking=True, tools=tools).endswith(f"?<｜Assistant｜>{reasoning}{called()}{results}")


@pytest.mark.parametrize("instructions", [[], [system("Be brief.")]])
def test_tools_are_told_of_in_the_system_message(instructions: list[dict[str, Any]]) -> None:
    text = render(*instructions, user("?"), tools=[WEATHER, WEATHER])
    begins = BEGIN + (instructions[0]["content"] if instructions else "")
    assert text.startswith(f"{begins}\n\n## Tools\n\nYou have access to a set of tools")
    schema = json.dumps(WEATHER["function"])
    assert f"### Available Tool Schemas\n\n{schema}\n{schema}\n\nYou MUST strictly" in text
    assert '"<｜DSML｜tool_calls>" block' in text and text.endswith("tool calls.\n<｜User｜>?<｜Assistant｜></think>")


def test_what_has_no_place_is_refused() -> None:
    with pytest.raises(ValueError, match="role 'judge' is unknown to DeepSeek-V4"):
        render({"role": "judge", "content": "x"})
    with pytest.raises(ValueError, match="each needs a function"):
        render(user("?"), tools=[{"type": "function"}])
