"""Pieces of the grammars that llguidance takes: Lark, with JSON schemas and token ids in its rules.

Special tokens have no text that a model could spell: in a grammar they stand by id, <[7]>. `literal` does that for any
text that holds some.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from front.structured.numbers import NUMBERS, kept

# Between the tokens of JSON: a line and its indentation. Longer runs are refused, or a model could go on with spaces
# for ever.
WHITESPACE = r"[ \t]{1,40}|\r?\n[ \t]{0,40}"
ANY_TEXT = r"(.|\n)*"
TEXT = f"/{ANY_TEXT}/"


class Specials(Protocol):
    """Of front.text.Tokenizer."""

    special_tokens: dict[str, int]


class JsonStyle(NamedTuple):
    """whitespace: a regular expression for what may stand between two tokens; "": nothing."""

    whitespace: str = WHITESPACE
    closed: bool = False  # objects have no properties but those that are named, unless they say otherwise


def literal(text: str, tokenizer: Specials) -> str:
    """An expression for exactly this text, with special tokens as themselves; "" for no text."""
    special = tokenizer.special_tokens
    if not special:
        return quoted(text)
    names = sorted(special, key=len, reverse=True)
    parts = re.split("(" + "|".join(map(re.escape, names)) + ")", text)
    return " ".join(f"<[{special[part]}]>" if part in special else quoted(part) for part in parts if part)


def quoted(text: str) -> str:
    """A string of Lark."""
    return json.dumps(text, ensure_ascii=False) if text else ""


PLAIN = JsonStyle()


def json_rule(schema: object, style: JsonStyle = PLAIN) -> str:
    """An expression for JSON of that schema (a bool, or a decoded object)."""
    if schema is True:
        schema = {}
    elif schema is False:
        raise ValueError("the schema is false: nothing is valid")
    if not isinstance(schema, Mapping):
        raise ValueError(f"a JSON schema is an object, not {type(schema).__name__}")
    plain: dict[str, Any] = plain_schema(schema, style.closed)
    options = {
        "whitespace_pattern": style.whitespace,
        "lenient": False,  # what cannot be followed is refused
        "coerce_one_of": False,
        "json_allow_general_unicode_escapes": True,
    }
    return "%json " + json.dumps({**plain, "x-guidance": options})


def regex_rule(regex: str) -> str:
    """An expression for text that the regular expression matches as a whole."""
    body = re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", regex, flags=re.DOTALL).replace("\n", r"\n")
    return f"/{body}/"


def plain_schema(schema: Any, closed: bool) -> Any:
    """Without keywords that say nothing, as programs write them, which the back end would refuse for their names alone.
    closed: as JsonStyle says."""
    if not isinstance(schema, Mapping):
        return schema
    plain: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _SAYS_NOTHING and _SAYS_NOTHING[key](schema, value):
            continue
        if key in _BY_NAME and isinstance(value, Mapping):
            plain[key] = {name: plain_schema(one, closed) for name, one in value.items()}
        elif key in NUMBERS:
            plain[key] = kept(schema, key)
        elif key in _VALUES:
            plain[key] = value
        else:
            plain[key] = (
                [plain_schema(one, closed) for one in value] if isinstance(value, list) else plain_schema(value, closed)
            )
    kind = schema.get("type")
    may_be_object = kind == "object" or (isinstance(kind, list) and "object" in kind)
    if closed and (may_be_object or isinstance(schema.get("properties"), Mapping)):
        plain.setdefault("additionalProperties", False)
    return plain


_VALUES = frozenset(("default", "examples", "required", "type"))
_BY_NAME = frozenset(("properties", "patternProperties", "dependentSchemas", "$defs", "definitions"))
_SAYS_NOTHING: Mapping[str, Callable[[Mapping[str, Any], object], bool]] = {
    "uniqueItems": lambda _, value: value is False,
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
}
