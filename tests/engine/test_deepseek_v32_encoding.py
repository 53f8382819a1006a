"""Conversations as DeepSeek-V3.2 was trained to read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from front.chat.deepseek_v32 import DeepseekV32Encoding
from front.text.tokenizer import Tokenizer
from models.tiny import CHECKPOINT

BEGIN, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALLS = (
    "\n\n<｜DSML｜function_calls>\n"
    '<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Zürich "old"</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="exact" string="false">true</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="units" string="false">["C", "é"]</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
    "</｜DSML｜function_calls>"
)
ARGUMENTS = {"city": 'Zürich "old"', "days": 3, "exact": True, "units": ["C", "é"]}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def calling(arguments: Any, times: int = 1, **more: Any) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return assistant(None, tool_calls=[call] * times, **more)


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "1", "content": text}


def render(*messages: dict[str, Any], tools: list[dict[str, Any]] | None = None, **options: Any) -> str:
    defaults = {"add_generation_prompt": True, "continue_final_message": False}
    return DeepseekV32Encoding().render(messages, tools=tools, **{**defaults, **options})


def test_turns() -> None:
    said = [
        {"role": "system", "content": "Be brief."},
        user("1+1?"),
        assistant("2", reasoning_content="easy"),
        user("2+2?"),
    ]
    first = f"{BEGIN}Be brief.<｜User｜>1+1?<｜Assistant｜></think>2{END}<｜User｜>2+2?<｜Assistant｜>"
    assert render(*said) == f"{first}</think>"
    for switch in ("thinking", "enable_thinking"):
        assert render(*said, **{switch: True}) == f"{first}<think>"
    assert render(*said, add_generation_prompt=False) == first.removesuffix("<｜Assistant｜>")
    assert render(user("a"), assistant("b"), add_generation_prompt=False) == (
        f"{BEGIN}<｜User｜>a<｜Assistant｜></think>b{END}"
    )
    assert render(user("a"), assistant("b c"), add_generation_prompt=False, continue_final_message=True) == (
        f"{BEGIN}<｜User｜>a<｜Assistant｜></think>b c"
    )
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert render(parts) == f"{BEGIN}<｜User｜>ab<｜Assistant｜></think>"
    developer = {"role": "developer", "content": "x"}
    assert render(developer) == f"{BEGIN}<｜User｜>\n\n# The user's message is: x<｜Assistant｜></think>"


@pytest.mark.parametrize("arguments", [ARGUMENTS, json.dumps(ARGUMENTS)])
def test_calls_and_results(arguments: Any) -> None:
    """Reasoning of the turn at hand is kept between calls, that of earlier turns is not."""
    turn = [user("?"), calling(arguments, reasoning_content="look"), result("sun")]
    results = "\n\n<function_results>\n<result>sun</result>\n</function_results>\n\n"
    asked = f"{BEGIN}<｜User｜>?<｜Assistant｜>"
    assert render(*turn) == f"{asked}</think>{CALLS}{END}{results}</think>"
    assert render(*turn, thinking=True) == f"{asked}<think>look</think>{CALLS}{END}{results}<think>"
    later = [*turn, assistant("Sunny.", reasoning_content="so"), user("thanks")]
    assert render(*later, thinking=True) == (
        f"{asked}</think>{CALLS}{END}{results}</think>Sunny.{END}<｜User｜>thanks<｜Assistant｜><think>"
    )


def test_results_of_several_calls_stand_together() -> None:
    text = render(user("?"), calling({}, times=2), result("a"), result("b"))
    assert text.endswith(
        "\n\n<function_results>\n<result>a</result>\n<result>b</result>\n</function_results>\n\n</think>"
    )


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief."}]])
def test_tools_are_told_of_in_the_system_message(system: list[dict[str, Any]]) -> None:
    text = render(*system, user("?"), tools=[WEATHER, WEATHER])
    begins = BEGIN + (system[0]["content"] if system else "")
    assert text.startswith(f"{begins}\n\n## Tools\nYou have access to a set of tools")
    schema = json.dumps(WEATHER["function"])
    assert f"<functions>\n{schema}\n{schema}\n</functions>\n<｜User｜>?<｜Assistant｜></think>" in text
    assert '<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>' in text
    assert "D function" not in text and "<think>...thinking about results</think>" in text


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one"),
        ([{"role": "judge", "content": "x"}], "role 'judge' is unknown"),
        ([user("?"), result("sun")], "must follow the assistant's message"),
        ([user("?"), calling("{"), result("a")], "arguments of the call of weather: not JSON"),
        ([user("?"), calling("[1]")], "a JSON object"),
        ([user("?"), assistant("", tool_calls=[{"function": {}}])], "a function with a name"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "parts of type text"),
    ],
)
def test_what_has_no_place_is_refused(messages: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        render(*messages)
    with pytest.raises(ValueError, match="cannot both be true"):
        render(user("x"), continue_final_message=True)


def test_a_checkpoint_without_a_template_gets_it_by_its_architecture(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((CHECKPOINT / name).read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    for architecture in ("DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "DeepseekV3ForCausalLM"):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
        tokenizer = Tokenizer(tmp_path)
        if architecture != "DeepseekV3ForCausalLM":
            assert tokenizer.apply_chat_template([user("x")]) == f"{BEGIN}<｜User｜>x<｜Assistant｜></think>"
        else:
            with pytest.raises(ValueError, match="no chat template"):
                tokenizer.apply_chat_template([user("x")])
