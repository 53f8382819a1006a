"""Which JSON schemas the back end xgrammar follows: it leaves out keywords that it does not know, or that stand beside
others, without a word. Those are refused here by name; some are said in another way that it follows."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from front.structured.schema import plain_schema

Schema = Mapping[str, Any]

# Constraints, by the type of value that they speak of.
_OF_TYPE = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "object": ("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
}
_CONSTRAINTS = {keyword: kind for kind, keywords in _OF_TYPE.items() for keyword in keywords}
_WHOLE = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")  # one says what a value is; others beside it are lost
_SAID_BESIDE = frozenset(
    ("$schema", "$comment", "$defs", "definitions", "title", "description", "default", "examples", "deprecated")
) | {"readOnly", "writeOnly"}
_FORMATS = frozenset(("date", "time", "date-time", "duration", "email", "ipv4", "ipv6", "uuid", "uri", "json-pointer"))
_ANY = r"[\s\S]*"
_IN_REGEX = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_COUNTS = re.compile(r"[{,](\d+)\}")
MAX_REPEATS = 1000  # twice as many have been seen to take 1.7 s
_TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")


def followable(schema: object, closed: bool, check_regex: Callable[[str], None]) -> object:
    """The same schema in what xgrammar follows. ValueError names the keyword that it does not. closed: objects have no
    properties but those that are named, unless they say otherwise. check_regex: ValueError for patterns that cannot be
    followed."""
    if schema is False:
        raise ValueError("the schema is false: nothing is valid")
    plain = plain_schema(schema, closed)
    if plain is True:
        return {}
    if not isinstance(plain, Mapping):
        raise ValueError(f"a JSON schema is an object, not {type(schema).__name__}")
    without_id = {keyword: value for keyword, value in plain.items() if keyword != "$id"}
    return _Follower(without_id, check_regex).one(without_id)


class _Follower:
    """top: the whole document, in which references point."""

    def __init__(self, top: Schema, check_regex: Callable[[str], None]) -> None:
        self._top, self._check_regex = top, check_regex

    def one(self, schema: object) -> object:
        if schema is True:
            return {}
        if not isinstance(schema, Mapping):
            raise ValueError(f"the back end xgrammar takes no schema {str(schema)[:40]!r} here")
        made = dict(schema)
        for keyword in schema:
            if keyword not in _SAID_BESIDE and keyword not in _CONSTRAINTS and keyword not in (*_WHOLE, "type"):
                raise ValueError(f"{keyword} cannot be followed by the back end xgrammar")
        for keyword in ("$defs", "definitions"):
            if keyword in schema:
                made[keyword] = {name: self.one(value) for name, value in _map(schema, keyword).items()}
        whole = [keyword for keyword in _WHOLE if keyword in schema]
        if whole:
            self._whole(whole[0], schema, made)
        else:
            self._typed(schema, made)
        return made

    def _whole(self, keyword: str, schema: Schema, made: dict[str, Any]) -> None:
        own = {keyword, "type"} if keyword in ("enum", "const") else {keyword}
        beside = next((other for other in schema if other not in _SAID_BESIDE | own), None)
        if beside is not None:
            raise ValueError(f"{beside} beside {keyword} cannot be followed by the back end xgrammar")
        value = schema[keyword]
        if keyword == "$ref":
            self._check_reference(value)
        elif keyword in ("enum", "const"):
            values = _list(schema, keyword) if keyword == "enum" else [value]
            types = _types(made.pop("type")) if "type" in made else _TYPES
            fitting = [one for one in values if any(_is_of(one, kind) for kind in types)]
            if not fitting:
                raise ValueError(f"no value of {keyword} is of the type")
            made.pop(keyword)
            made["enum"] = fitting
        else:
            value = _list(schema, keyword)
            if keyword == "allOf" and len(value) > 1:
                raise ValueError("allOf of several schemas cannot be followed by the back end xgrammar")
            if keyword == "oneOf" and not _disjoint(value):
                raise ValueError("oneOf of schemas that are not of different types cannot be followed by xgrammar")
            made[keyword] = [self.one(one) for one in value]

    def _typed(self, schema: Schema, made: dict[str, Any]) -> None:
        constrained = {_CONSTRAINTS[keyword] for keyword in schema if keyword in _CONSTRAINTS}
        if "type" not in schema:
            if len(constrained) > 1:
                raise ValueError("a schema without type that speaks of values of several types cannot be followed")
            if not constrained:
                return
            made["type"] = next(iter(constrained))
        types = {"number" if kind == "integer" else kind for kind in _types(made["type"])}
        for keyword in schema:
            if keyword in _CONSTRAINTS and _CONSTRAINTS[keyword] not in types:
                del made[keyword]  # it speaks of other values
        if "string" in types:
            self._write_string(made)
        if "number" in types:
            _check_numbers(made, _OF_TYPE["number"])
        if "array" in types:
            self._write_array(made)
        if "object" in types:
            self._write_object(made)

    def _write_string(self, made: dict[str, Any]) -> None:
        given = [keyword for keyword in ("format", "pattern", "minLength", "maxLength") if keyword in made]
        if given and given[0] in ("format", "pattern") and len(given) > 1:
            raise ValueError(f"{given[1]} beside {given[0]} cannot be followed by the back end xgrammar")
        if "format" in made and made["format"] not in _FORMATS:
            raise ValueError(f"format {str(made['format'])[:40]!r} cannot be followed by the back end xgrammar")
        if "pattern" in made:
            if not isinstance(made["pattern"], str):
                raise ValueError("pattern must be a text")
            check_counts(made["pattern"])
            self._check_regex(made["pattern"])
            made["pattern"] = whole_pattern(made["pattern"])
        _check_numbers(made, ("minLength", "maxLength"), integers=True)

    def _write_array(self, made: dict[str, Any]) -> None:
        _check_numbers(made, ("minItems", "maxItems"), integers=True)
        if "prefixItems" in made:
            made["prefixItems"] = [self.one(one) for one in _list(made, "prefixItems")]
        if "items" in made and not (made["items"] is False and "prefixItems" in made):
            made["items"] = self.one(made["items"])

    def _write_object(self, made: dict[str, Any]) -> None:
        _check_numbers(made, ("minProperties", "maxProperties"), integers=True)
        if made.get("minProperties", 0) > 1:
            raise ValueError("minProperties of more than 1 cannot be followed by the back end xgrammar")
        properties = {name: self.one(value) for name, value in _map(made, "properties").items()}
        others = made.get("additionalProperties", True)
        if not isinstance(others, bool):
            made["additionalProperties"] = others = self.one(others)
        required = made.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise ValueError("required must be a list of names")
        for name in required:
            if name not in properties:
                if others is False:
                    raise ValueError(f"required: {name[:40]!r} is none of the properties, and there are no others")
                properties[name] = {} if others is True else others
        if properties or "properties" in made:
            made["properties"] = properties

    def _check_reference(self, reference: object) -> None:
        """It is to a schema of the document that is checked on its own, and that is more than a reference."""
        seen = set()
        while True:
            if not isinstance(reference, str) or (reference != "#" and not reference.startswith("#/")):
                raise ValueError(f"$ref {str(reference)[:60]!r} does not point into the document")
            if reference in seen:
                raise ValueError(f"$ref {reference[:60]!r} points to itself")
            seen.add(reference)
            found: Any = self._top
            steps = [] if reference == "#" else reference[2:].split("/")
            for place, step in enumerate(steps):
                in_a_map = place % 2 == 0 and step in ("$defs", "definitions", "properties")
                if not isinstance(found, Mapping) or step not in found or not (in_a_map or place % 2):
                    raise ValueError(f"$ref {reference[:60]!r} cannot be followed by the back end xgrammar")
                found = found[step]
            if len(steps) % 2:
                raise ValueError(f"$ref {reference[:60]!r} cannot be followed by the back end xgrammar")
            if not isinstance(found, Mapping) or "$ref" not in found:
                return
            reference = found["$ref"]


def _types(given: object) -> list[str]:
    types: list[Any] = given if isinstance(given, list) else [given]
    wrong = next((kind for kind in types if kind not in _TYPES), None)
    if wrong is not None or not types:
        raise ValueError(f"type must be one of {', '.join(_TYPES)}, or a list of them")
    return types


def _is_of(value: object, kind: str) -> bool:
    if isinstance(value, bool) or value is None:
        return kind == ("null" if value is None else "boolean")
    if isinstance(value, int | float):
        return kind == "number" or (kind == "integer" and value == int(value))
    if isinstance(value, str | list):
        return kind == ("string" if isinstance(value, str) else "array")
    return kind == "object"


def _disjoint(schemas: list[Any]) -> bool:
    """Whether they are evidently of different types."""
    met: set[str] = set()
    for schema in schemas:
        if not isinstance(schema, Mapping) or "type" not in schema:
            return False
        kinds = {"number" if kind == "integer" else kind for kind in _types(schema["type"])}
        if kinds & met:
            return False
        met |= kinds
    return True


def _map(schema: Schema, keyword: str) -> Mapping[str, Any]:
    value = schema.get(keyword, {})
    if not isinstance(value, Mapping):
        raise ValueError(f"{keyword} must be an object")
    return value


def _list(schema: Schema, keyword: str) -> list[Any]:
    value = schema[keyword]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{keyword} must be a list that is not empty")
    return value


def _check_numbers(made: Schema, keywords: Sequence[str], integers: bool = False) -> None:
    """integers: from 0 on."""
    for keyword in keywords:
        value = made.get(keyword, 0)
        if not _is_of(value, "integer" if integers else "number") or (integers and value < 0):
            raise ValueError(f"{keyword} must be {'an integer from 0 on' if integers else 'a number'}")


def check_counts(pattern: str) -> None:
    """ValueError: it would take long."""
    if prod(int(count) for count in _COUNTS.findall(pattern)) > MAX_REPEATS:
        raise ValueError(f"pattern: its counts make more than {MAX_REPEATS} if multiplied; too many for xgrammar")


def whole_pattern(pattern: str, anchored: bool = False) -> str:
    """Of whole strings that hold a match of the pattern; anchored: that are one. ValueError: an anchor is within it."""
    bare = _IN_REGEX.sub(lambda match: "x" * len(match[0]), pattern)  # without escapes and classes
    begins, ends = bare.startswith("^"), bare.endswith("$")
    body = pattern[begins : len(pattern) - ends]
    if "^" in bare[begins:] or "$" in bare[: len(bare) - ends]:
        raise ValueError(f"pattern {pattern[:60]!r}: an anchor within it cannot be followed by the back end xgrammar")
    return f"^{'' if begins or anchored else _ANY}({body}){'' if ends or anchored else _ANY}$"
