"""Calls that are made by a grammar of the model's own format, as a structural tag (front/structured/tags.py).

A model that is forced into another format than its own derails; so the tags, the order and the line breaks are those of
its template (front/chat/families.py), and the schemas hold within.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from front.chat.families import CALLS, HARMONY, REASONING, CallFormat
from front.chat.format import OutputFormat
from front.chat.values import STRING, kinds_of

Tag = dict[str, Any]
_DEFINITIONS = ("$defs", "definitions")
_SPACES = {"type": "regex", "pattern": r"\n{0,2}"}


def forced_calls(functions: Sequence[Mapping[str, Any]], format: OutputFormat, *, required: bool) -> Tag:
    """functions: name, parameters. required: the answer is one call, or several; else text in which calls may stand."""
    several = format.max_calls != 1
    if format.calls == HARMONY:
        return {"type": "structural_tag", "format": _harmony(functions, required)}
    table = CALLS[format.calls]
    calls = [_call(function, table) for function in functions]
    body = _answer(calls, table, several) if required else _triggered(calls, table, several)
    if format.reasoning in REASONING and format.begins_reasoning is None:
        thinks = REASONING[format.reasoning]
        block = {"type": "tag", "begin": thinks.begin, "content": {"type": "any_text"}, "end": thinks.end}
        body = _sequence({"type": "optional", "content": _sequence(_SPACES, block, _SPACES)}, body)
    return {"type": "structural_tag", "format": body}


def _text(value: str) -> Tag:
    return {"type": "const_string", "value": value}


def _sequence(*elements: Tag) -> Tag:
    """Texts that follow one another become one: a grammar reads the longest text that it may, and never goes back."""
    flat = [part for item in elements for part in (item["elements"] if item["type"] == "sequence" else [item])]
    parts: list[Tag] = []
    for item in flat:
        if parts and item["type"] == parts[-1]["type"] == "const_string":
            parts[-1] = _text(parts[-1]["value"] + item["value"])
        elif item != _text(""):
            parts.append(item)
    return {"type": "sequence", "elements": parts}


def _optional(content: Tag) -> Tag:
    return {"type": "optional", "content": content}


def _either(elements: Sequence[Tag]) -> Tag:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


# ---- answers ------------------------------------------------------------------------------------------------------


def _separator(table: CallFormat) -> str:
    """What stands between calls."""
    return "" if table.own_ids or table.named == "<｜tool▁sep｜>" else "\n"


def _inner_space(table: CallFormat) -> str:
    """What stands between a section's tag and a call's."""
    return "\n" if table.arguments == "parameters" and table.section is not None else ""


def _section_each(table: CallFormat) -> bool:
    """Each call has a section of its own (Qwen3-Coder)."""
    return table.section is not None and table.bare and table.arguments == "parameters"


def _several(call: Tag, table: CallFormat, several: bool) -> Tag:
    if not several:
        return call
    return _sequence(call, {"type": "star", "content": _behind(_separator(table), call)})


def _behind(text: str, tag: Tag) -> Tag:
    """The tag with a text in front, in each of its forms."""
    if tag["type"] == "or":
        return {**tag, "elements": [_behind(text, item) for item in tag["elements"]]}
    return _sequence(_text(text), tag)


def _answer(calls: Sequence[Tag], table: CallFormat, several: bool) -> Tag:
    call = _either(calls)
    if table.section is None:
        return _sequence(_SPACES, _several(call, table, several))
    begin, end = table.section
    space = _inner_space(table)
    if _section_each(table):
        section = _either([_sequence(_text(begin + space), item, _text(space + end)) for item in calls])
        return _sequence(_SPACES, _several(section, table, several))
    return _sequence(_SPACES, _behind(begin + space, _several(call, table, several)), _text(space + end))


def _triggered(calls: Sequence[Tag], table: CallFormat, several: bool) -> Tag:
    """Text, and behind the tag that begins calls what makes them."""
    trigger = table.section[0] if table.section is not None else table.begin
    shared = table.section is not None and not _section_each(table)
    answer = _answer(calls, table, several and shared)
    tag = {"begin": trigger, "content": _without(answer, trigger), "end": ""}
    return {
        "type": "triggered_tags",
        "triggers": [trigger],
        "tags": [{"type": "tag", **tag}],
        "stop_after_first": not several or shared,
    }


def _without(tag: Tag, begin: str) -> Tag:
    """The tag without the text that it begins with."""
    if tag["type"] == "const_string":
        assert tag["value"].startswith(begin)
        return _text(tag["value"][len(begin) :])
    if tag["type"] == "or":
        return {**tag, "elements": [_without(item, begin) for item in tag["elements"]]}
    first, *others = [item for item in tag["elements"] if item is not _SPACES]
    return _sequence(_without(first, begin), *others)


# ---- calls --------------------------------------------------------------------------------------------------------


def _call(function: Mapping[str, Any], table: CallFormat) -> Tag:
    """A function without parameters takes any object where its format holds one."""
    name, schema = function["name"], function.get("parameters") or {}
    if table.arguments == "named_json":
        begin = f'{table.begin}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
        return _sequence(_text(begin), _json(schema), _text(f"}}\n{table.end}"))
    if table.arguments == "json":
        begin, index = f"{table.begin}{table.before_name}{name}", []
        if table.own_ids:
            begin = f"{table.begin}functions.{name}:"
            index = [{"type": "regex", "pattern": "[0-9]{1,3}"}]
        fence = ("\n".join(["", table.fence[1]]) if table.fence[1] else "") + table.end
        opened = table.named + (f"{table.fence[0]}\n" if table.fence[0] else "")
        return _sequence(_text(begin), *index, _text(opened), _json(schema), _text(fence))
    return _parameters(name, schema, table)


def _json(schema: Mapping[str, Any]) -> Tag:
    return {"type": "json_schema", "json_schema": {"type": "object", **schema}}


def _parameters(name: str, schema: Mapping[str, Any], table: CallFormat) -> Tag:
    """In the order of the schema."""
    properties = schema.get("properties")
    required = schema.get("required")
    elements = [_text(f"{table.begin}{name}{table.named or ''}\n")]
    for key, own in (properties if isinstance(properties, Mapping) else {}).items():
        one = _parameter(key, own, schema, table)
        elements.append(one if isinstance(required, list) and key in required else _optional(one))
    return _sequence(*elements, _text(table.end))


def _parameter(key: str, own: object, schema: Mapping[str, Any], table: CallFormat) -> Tag:
    kinds = kinds_of(schema, key)
    is_text = not kinds or "string" in kinds
    begin = f"{table.key_begin}{key}"
    if "DSML" in table.key_begin:
        begin += f'" string="{str(is_text).lower()}"'
    begin += table.key_end + (f"\n{table.value_begin}" if table.value_begin else "")
    line = "\n" if table.newlines else ""
    end = f"{line}{table.value_end}"
    choices = own.get("enum") if isinstance(own, Mapping) else None
    if not is_text:
        definitions = {field: schema[field] for field in _DEFINITIONS if field in schema}
        value: Tag = {
            "type": "json_schema",
            "json_schema": {**definitions, **(own if isinstance(own, Mapping) else {})},
        }
    elif kinds == STRING and isinstance(choices, list) and choices:
        value = _either([_text(str(choice)) for choice in choices])
    else:
        return _sequence(
            {"type": "tag", "begin": begin + line, "content": {"type": "any_text"}, "end": end}, _text("\n")
        )
    return _sequence(_text(begin + line), value, _text(end + "\n"))


def _harmony(functions: Sequence[Mapping[str, Any]], required: bool) -> Tag:
    """Reasoning and preambles, and one call: the token that ends it ends the answer."""
    calls = [
        _sequence(
            _text(f"<|channel|>commentary to=functions.{function['name']} <|constrain|>json<|message|>"),
            _json(function.get("parameters") or {"properties": {}}),
        )
        for function in functions
    ]
    if not required:
        calls.append(_sequence(_text("<|channel|>final<|message|>"), {"type": "any_text"}))
    before = [
        {"type": "tag", "begin": f"<|channel|>{channel}<|message|>", "content": {"type": "any_text"}, "end": "<|end|>"}
        for channel in (["analysis"] if required else ["analysis", "commentary"])
    ]
    said = _sequence(_either(before), _text("<|start|>assistant"))
    return _sequence(_optional(said) if required else {"type": "star", "content": said}, _either(calls))
