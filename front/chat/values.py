"""Arguments that a model writes as plain text between tags, as JSON: what type one has, its schema says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

_DEPTH = 8  # references and alternatives that are followed
_ENCODE = msgspec.json.Encoder().encode
_PYTHON = {"True": "true", "False": "false", "None": "null"}  # what models write for these now and then
_OF_TYPE: dict[type, tuple[str, ...]] = {
    str: ("string",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    dict: ("object",),
    list: ("array",),
    type(None): ("null",),
}
STRING = frozenset({"string"})
NOT_STRING = frozenset({"boolean", "integer", "number", "object", "array", "null"})
Kinds = frozenset[str]


def quoted(text: str) -> str:
    return _ENCODE(text).decode()


def inside(text: str) -> str:
    """A piece of a JSON string, without the quotes."""
    return _ENCODE(text)[1:-1].decode()


def kinds_of(parameters: Mapping[str, Any], key: str) -> Kinds:
    """The JSON types that a tool's parameter may have; none: nothing is known. parameters: the tool's schema."""
    properties = parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    return frozenset(_kinds(schema, parameters, _DEPTH))


def _kinds(schema: object, root: Mapping[str, Any], depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or not depth:
        return set()
    declared = schema.get("type")
    if isinstance(declared, str):
        return {declared}
    if isinstance(declared, list):
        return {name for name in declared if isinstance(name, str)}
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return _kinds(_referred(reference, root), root, depth - 1)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return {_OF_TYPE.get(type(value), ("string",))[0] for value in values}
    found: set[str] = set()
    for name in ("anyOf", "oneOf", "allOf"):
        choices = schema.get(name)
        if isinstance(choices, list):
            each = [_kinds(choice, root, depth - 1) for choice in choices]
            if name != "allOf" and not all(each):
                return set()
            found.update(*each)
    return found


def _referred(reference: str, root: Mapping[str, Any]) -> object:
    """What #/a/b stands for in the tool's own schema."""
    place: object = root
    if not reference.startswith("#/"):
        return None
    for part in reference[2:].split("/"):
        place = place.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
    return place


def as_json(text: str, kinds: Kinds) -> str:
    """The JSON value that was meant: the text itself where it is JSON of one of these types, else a string."""
    plain = text.strip()
    if "boolean" in kinds or "null" in kinds or not kinds:
        plain = _PYTHON.get(plain, plain)
    try:
        value = msgspec.json.decode(plain)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return quoted(text)
    if isinstance(value, str) and (not kinds or "string" in kinds):
        return quoted(text)  # strings are written without quotes: these are its own
    if "string" in kinds and not kinds.intersection(_OF_TYPE[type(value)]):
        return quoted(text)
    return plain
