"""Pieces of the grammars that llguidance takes: Lark, with JSON schemas and token ids in its rules.

Special tokens have no text that a model could spell: in a grammar they stand by id, <[7]>. `literal` does that for any
text that holds some.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from front.structured.patterns import check_counts
from front.structured.schema import plain_schema

# Between the tokens of JSON: what programs and models write there, which is a space or a line break with its
# indentation. Longer runs are refused: a model that has begun with spaces goes on with them, and spends on them the
# tokens that the answer needs.
WHITESPACE = r"[ \t]{1,2}|\r?\n[ \t]{0,40}"
ANY_TEXT = r"(.|\n)*"
TEXT = f"/{ANY_TEXT}/"


class Specials(Protocol):
    """Of front.text.tokenizer.Tokenizer."""

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


def escaped(text: str) -> str:
    """A regular expression for exactly this text, as the back end reads them."""
    return "".join(map(_escaped, text))


def _escaped(letter: str) -> str:
    if letter.isascii() and not letter.isprintable():
        return f"\\x{ord(letter):02x}"
    return f"\\{letter}" if letter in _MEANT else letter


PLAIN = JsonStyle()
_MEANT = frozenset("\\.+*?()|[]{}^$#&-~")


def json_rule(schema: object, style: JsonStyle = PLAIN) -> str:
    """An expression for JSON of that schema (a bool, or a decoded object)."""
    return "%json " + _followed(schema, style)


def json_grammar(schema: object, style: JsonStyle = PLAIN) -> str:
    """A whole grammar of the same, in the library's other form: to read Lark takes it longer than to make a matcher of
    most schemas."""
    return '{"grammars": [{"json_schema": ' + _followed(schema, style) + "}]}"


def _followed(schema: object, style: JsonStyle) -> str:
    """The schema with what the library is to do with it, as JSON."""
    if schema is True:
        schema = {}
    elif schema is False:
        raise ValueError("the schema is false: nothing is valid")
    if not isinstance(schema, Mapping):
        raise ValueError(f"a JSON schema is an object, not {type(schema).__name__}")
    plain: dict[str, Any] = plain_schema(schema, style.closed, narrow=True)
    options = {
        "whitespace_pattern": style.whitespace,
        "lenient": False,  # what cannot be followed is refused
        "coerce_one_of": False,
        "json_allow_general_unicode_escapes": True,
    }
    return json.dumps({**plain, "x-guidance": options})


def regex_rule(regex: str) -> str:
    """An expression for text that the regular expression matches as a whole. ValueError: it would cost too much."""
    check_counts(regex)
    body = re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", regex, flags=re.DOTALL).replace("\n", r"\n")
    return f"/{body}/"
