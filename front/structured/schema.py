"""JSON schemas as back ends take them: without what says nothing, and in the words that they follow."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from front.structured.disjoint import Disjoint
from front.structured.formats import name_format
from front.structured.names import names_as_properties
from front.structured.numbers import NUMBERS, beside_zero, kept
from front.structured.patterns import check_counts

MAX_OPTIONAL = 480  # properties of an object: the back end's limit of what may come next
_OLD_DRAFT = re.compile(r"//json-schema\.org/draft-0[3467]/")
_BESIDE_OLD_REFERENCES = frozenset(("$ref", "definitions", "$defs", "title", "description"))
MAX_ALTERNATIVES = 128  # of a oneOf that is looked at
Schema = Mapping[str, Any]


def plain_schema(schema: Any, closed: bool, top: object = None, narrow: bool = False) -> Any:
    """Without keywords that say nothing, as programs write them, which the back end would refuse for their names alone;
    `oneOf` of schemas that are evidently disjoint is `anyOf`. ValueError names what would cost too much.

    closed: as JsonStyle says. top: the document in which references point; None: this one. narrow: for llguidance, see
    numbers.beside_zero.
    """
    top = schema if top is None else top
    if not isinstance(schema, Mapping):
        return schema
    if "$ref" in schema and schema is not top and _of_old_draft(top):
        schema = {key: value for key, value in schema.items() if key in _BESIDE_OLD_REFERENCES}

    def inner(one: Any) -> Any:
        return plain_schema(one, closed, top, narrow)

    plain: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _SAYS_NOTHING and _SAYS_NOTHING[key](schema, value):
            continue
        if key in _BY_NAME and isinstance(value, Mapping):
            plain[key] = {name: inner(one) for name, one in value.items()}
        elif key in NUMBERS:
            plain[key] = kept(schema, key)
        elif key in _VALUES:
            plain[key] = value
        elif key in _COUNTS and isinstance(value, float) and value.is_integer():
            plain[key] = int(value)
        else:
            plain[key] = [inner(one) for one in value] if isinstance(value, list) else inner(value)
    if narrow:
        if "propertyNames" in plain:
            names_as_properties(plain, Disjoint(top).found)
        beside_zero(plain)
    _check(plain)
    _name_one_of(plain, top)
    name_format(plain, narrow)
    kind = schema.get("type")
    may_be_object = kind == "object" or (isinstance(kind, list) and "object" in kind)
    if closed and (may_be_object or isinstance(schema.get("properties"), Mapping)):
        plain.setdefault("additionalProperties", False)
    return plain


def _of_old_draft(top: object) -> bool:
    """Up to the seventh a reference stands for itself: what is beside it says nothing."""
    draft = top.get("$schema") if isinstance(top, Mapping) else None
    return isinstance(draft, str) and _OLD_DRAFT.search(draft) is not None


def _check(schema: Schema) -> None:
    properties, required, patterns = (schema.get(key) for key in ("properties", "required", "patternProperties"))
    if isinstance(properties, Mapping):
        optional = len(properties.keys() - {name for name in _list(required) if isinstance(name, str)})
        if optional > MAX_OPTIONAL:
            raise ValueError(f"properties: {optional} that are not required are more than the {MAX_OPTIONAL} allowed")
    lengths = [schema[key] for key in ("minLength", "maxLength") if isinstance(schema.get(key), int)]
    if isinstance(schema.get("pattern"), str):
        check_counts(schema["pattern"], max(lengths, default=0))
    for pattern in patterns if isinstance(patterns, Mapping) else ():
        check_counts(pattern)


def _name_one_of(schema: dict[str, Any], top: object) -> None:
    found = schema.get("oneOf")
    if isinstance(found, list) and 1 < len(found) <= MAX_ALTERNATIVES and Disjoint(top).pairwise(found):
        del schema["oneOf"]
        if "anyOf" not in schema:
            schema["anyOf"] = found
        else:
            schema["allOf"] = [*_list(schema.get("allOf")), {"anyOf": found}]


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _counts_nothing(key: str) -> Callable[[Schema, object], bool]:
    def says_nothing(schema: Schema, value: object) -> bool:
        """A bound of the number of properties that their names hold already."""
        if isinstance(value, bool) or not isinstance(value, int):
            return False
        if key == "minProperties":
            return value <= len({name for name in _list(schema.get("required")) if isinstance(name, str)})
        properties = schema.get("properties")
        closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
        return closed and isinstance(properties, Mapping) and len(properties) <= value

    return says_nothing


_VALUES = frozenset(("default", "examples", "required", "type"))
_COUNTS = frozenset(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"))
_BY_NAME = frozenset(("properties", "patternProperties", "dependentSchemas", "$defs", "definitions"))
_SAYS_NOTHING: Mapping[str, Callable[[Schema, object], bool]] = {
    "uniqueItems": lambda schema, value: value is False or schema.get("maxItems") in (0, 1),
    "propertyNames": lambda _, value: value in (True, {}, {"type": "string"}),
    "unevaluatedProperties": lambda _, value: value in (True, {}),
    "unevaluatedItems": lambda _, value: value in (True, {}),
    "dependencies": lambda _, value: value == {},
    "dependentRequired": lambda _, value: value == {},
    "dependentSchemas": lambda _, value: value == {},
    "not": lambda _, value: value is False,
    "if": lambda schema, _: "then" not in schema and "else" not in schema,
    "then": lambda schema, _: "if" not in schema,
    "else": lambda schema, _: "if" not in schema,
    "minContains": lambda schema, _: "contains" not in schema,
    "maxContains": lambda schema, _: "contains" not in schema,
    "minProperties": _counts_nothing("minProperties"),
    "maxProperties": _counts_nothing("maxProperties"),
}
