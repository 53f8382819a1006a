"""Calls as the models of each family write them, and what a parser makes of a text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from front.chat.events import CallArguments, CallBegin, CallEnd, Event, Message
from front.chat.families import CALLS, HARMONY, HARMONY_REASONING
from front.chat.format import OutputFormat

Calls = list[tuple[str, dict[str, Any]]]
Text = Callable[[Calls], str]


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def plain(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def hermes(calls: Calls) -> str:
    bodies = [dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def hermes_turned(calls: Calls) -> str:
    bodies = [dumps({"id": 3, "arguments": arguments, "name": name}) for name, arguments in calls]
    return "\n".join(f"<tool_call>{body}</tool_call>" for body in bodies)


def qwen3_coder(calls: Calls) -> str:
    text = ""
    for name, arguments in calls:
        text += f"\n<tool_call>\n<function={name}>\n"
        for key, value in arguments.items():
            text += f"<parameter={key}>\n{plain(value)}\n</parameter>\n"
        text += "</function>\n</tool_call>"
    return text


def deepseek_v3(calls: Calls) -> str:
    each = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumps(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(each) + "<｜tool▁calls▁end｜>"


def deepseek_v31(calls: Calls) -> str:
    each = [
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumps(arguments)}<｜tool▁call▁end｜>" for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "".join(each) + "<｜tool▁calls▁end｜>"


def dsml(section: str) -> Text:
    def render(calls: Calls) -> str:
        text = f"\n\n<｜DSML｜{section}>\n"
        for name, arguments in calls:
            text += f'<｜DSML｜invoke name="{name}">\n'
            for key, value in arguments.items():
                is_text = str(isinstance(value, str)).lower()
                text += f'<｜DSML｜parameter name="{key}" string="{is_text}">{plain(value)}</｜DSML｜parameter>\n'
            text += "</｜DSML｜invoke>\n"
        return text + f"</｜DSML｜{section}>"

    return render


def kimi_k2(calls: Calls) -> str:
    each = [
        f"<|tool_call_begin|>functions.{name}:{place}<|tool_call_argument_begin|>{dumps(arguments)}<|tool_call_end|>"
        for place, (name, arguments) in enumerate(calls)
    ]
    return "<|tool_calls_section_begin|>" + "".join(each) + "<|tool_calls_section_end|>"


def glm(gap: str) -> Text:
    def render(calls: Calls) -> str:
        text = ""
        for name, arguments in calls:
            text += f"\n<tool_call>{name}{gap}"
            for key, value in arguments.items():
                text += f"<arg_key>{key}</arg_key>{gap}<arg_value>{plain(value)}</arg_value>{gap}"
            text += "</tool_call>"
        return text

    return render


def minimax_m2(calls: Calls) -> str:
    text = "\n<minimax:tool_call>\n"
    for name, arguments in calls:
        text += f'<invoke name="{name}">\n'
        for key, value in arguments.items():
            text += f'<parameter name="{key}">{plain(value)}</parameter>\n'
        text += "</invoke>\n"
    return text + "</minimax:tool_call>"


def harmony(calls: Calls) -> str:
    header = "<|start|>assistant<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"
    return "".join(header.format(name, dumps(arguments)) for name, arguments in calls)


RENDERED: dict[str, tuple[str, Text]] = {
    "hermes": ("hermes", hermes),
    "hermes, turned": ("hermes", hermes_turned),
    "qwen3_coder": ("qwen3_coder", qwen3_coder),
    "deepseek_v3": ("deepseek_v3", deepseek_v3),
    "deepseek_v31": ("deepseek_v31", deepseek_v31),
    "deepseek_v32": ("deepseek_v32", dsml("function_calls")),
    "deepseek_v4": ("deepseek_v4", dsml("tool_calls")),
    "kimi_k2": ("kimi_k2", kimi_k2),
    "glm45": ("glm45", glm("\n")),
    "glm47": ("glm47", glm("")),
    "minimax_m2": ("minimax_m2", minimax_m2),
    "openai": (HARMONY, harmony),
}
SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "number": {"type": "integer"},
        "yes": {"type": "boolean"},
        "many": {"type": "array"},
        "deep": {"$ref": "#/$defs/deep"},
    },
    "$defs": {"deep": {"type": "object"}},
}


def tags_of_family(calls: str) -> list[str]:
    if calls == HARMONY:
        return [
            "<|start|>",
            "<|channel|>",
            "<|message|>",
            "<|end|>",
            "<|call|>",
            "assistant",
            "analysis",
            "to=functions.f",
        ]
    table = CALLS[calls]
    tags = [table.begin, table.end, table.named, table.before_name, *(table.section or ()), *table.fence]
    return [tag for tag in [*tags, table.key_begin, table.key_end, table.value_begin, table.value_end] if tag]


def read(
    pieces: Iterable[str], calls: str, reasoning: str = "", *, cut: bool = False, **more: Any
) -> tuple[Message, list[Event]]:
    """The events joined, and each of them."""
    parser = OutputFormat(calls=calls, reasoning=reasoning, tools={"f": SCHEMA}, **more).parser("request", 0)
    events = [event for piece in pieces for event in parser.feed(piece)]
    events += parser.finish(cut)
    check_order(events)
    message = Message()
    message.add(events)
    return message, events


def check_order(events: list[Event]) -> None:
    """Calls are counted from 0, do not overlap, and every one that begins ends."""
    count, is_open = 0, False
    for event in events:
        if isinstance(event, CallBegin):
            assert not is_open and event.index == count and event.name
            count, is_open = count + 1, True
        elif isinstance(event, CallArguments | CallEnd):
            assert is_open and event.index == count - 1
            is_open = isinstance(event, CallArguments)
        else:
            assert not is_open and event.text
    assert not is_open


def reasoning_of(calls: str) -> str:
    return {HARMONY: HARMONY_REASONING, "kimi_k2": "kimi_k2", "hermes": "qwen3"}.get(calls, "glm45")
