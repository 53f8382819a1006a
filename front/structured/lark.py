"""Pieces of the grammars that llguidance takes: Lark, with JSON schemas and token ids in its rules.

Special tokens have no text that a model could spell: in a grammar they stand by id, <[7]>. `literal` does that for any
text that holds some.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

# Between the tokens of JSON: a line and its indentation. Longer runs are refused, or a model could go on with spaces
# for ever.
WHITESPACE = r"[ \t]{1,40}|\r?\n[ \t]{0,40}"
TEXT = r"/(.|\n)*/"


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
    if style.closed:
        schema = _closed(schema)
        assert isinstance(schema, Mapping)
    options = {
        "whitespace_pattern": style.whitespace,
        "lenient": False,  # what cannot be followed is refused
        "coerce_one_of": False,
        "json_allow_general_unicode_escapes": True,
    }
    return "%json " + json.dumps({**schema, "x-guidance": options})


def regex_rule(regex: str) -> str:
    """An expression for text that the regular expression matches as a whole."""
    body = re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", regex, flags=re.DOTALL).replace("\n", r"\n")
    return f"/{body}/"


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed = {
        key: value if key in ("const", "enum", "default", "examples") else _closed(value)
        for key, value in schema.items()
    }
    if schema.get("type") == "object" or isinstance(schema.get("properties"), Mapping):
        closed.setdefault("additionalProperties", False)
    return closed
