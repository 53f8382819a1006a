"""From what a request wants its output to be to a grammar, checked.

The back end is llguidance, or xgrammar where that is asked for (xgrammar_backend.py). The front checks grammars without
a vocabulary (a millisecond; `_checked` remembers them), a rank builds matchers of them (engine/structured).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import llguidance
import msgspec
from llguidance.gbnf_to_lark import any_to_lark

from configs.server import STRUCTURED_BACKENDS
from front.params import Grammar, StructuredOutputsParams
from front.structured.lark import WHITESPACE, JsonStyle, escaped, json_grammar, regex_rule
from front.structured.patterns import check_counts
from front.structured.tags import structural_tag_grammar
from front.structured.vocabulary import Vocabulary, grammar_limits, names_only
from front.structured.xgrammar_backend import grammar_of

MAX_BYTES = 512 << 10  # of a description
MAX_DEPTH = 64  # of a schema
MAX_CHOICES = 4096
MAX_AFTER = 64  # tokens
_PLACE = re.compile(r"^at \d+\(\d+\): (?:failed to compile JSON schema: )?")
_EXCERPT = re.compile(r"\n\s*\d+ \|.*", re.DOTALL)
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")

_encode = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(StructuredOutputsParams)


def checked_grammar(params: StructuredOutputsParams, tokenizer: Vocabulary) -> Grammar:
    """What the ranks get. ValueError, one line that begins with structured_outputs, names the field and the limit."""
    try:
        return _checked(_encode(params), tokenizer)
    except (ValueError, TypeError, msgspec.MsgspecError) as error:
        raise ValueError(f"structured_outputs: {error}") from None


@lru_cache(maxsize=256)
def _checked(described: bytes, tokenizer: Vocabulary) -> Grammar:
    if len(described) > MAX_BYTES:
        raise ValueError(f"the description has {len(described)} bytes; at most {MAX_BYTES} are taken")
    params = _decoder.decode(described)
    _check_after(params.after_token_ids, tokenizer.vocab_size)
    kinds = [
        kind
        for kind in KINDS
        if getattr(params, kind) not in (None, False) or (kind == "json" and params.json is False)
    ]
    if len(kinds) != 1:
        given = f"not {' and '.join(kinds)}" if kinds else "and none is given"
        raise ValueError(f"exactly one of {', '.join(KINDS)} says what the output must be, {given}")
    (kind,) = kinds
    if params.backend not in STRUCTURED_BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(STRUCTURED_BACKENDS)}, not {params.backend[:40]!r}")
    if params.backend == "xgrammar":
        return Grammar(_of_xgrammar(kind, params), params.after_token_ids, xgrammar=True)
    try:
        text = _text_of(kind, params, tokenizer)
        made = llguidance.LLMatcher(names_only(tokenizer), text, log_level=0, limits=grammar_limits())
    except RecursionError:
        raise ValueError(f"{kind}: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{kind}: {_line(error)}") from None
    if made.is_error():
        message = made.get_error()
        raise ValueError(f"{kind}: {_line(message if kind == 'grammar' else _reason(message))}")
    return Grammar(text, params.after_token_ids)


def _text_of(kind: str, params: StructuredOutputsParams, tokenizer: Vocabulary) -> str:
    """Lark, or the library's form of a schema alone."""
    style = _style(params)
    if kind == "json":
        return json_grammar(_schema(params.json), style)
    if kind == "json_object":
        return json_grammar({"type": "object"}, style)
    if kind == "regex":
        assert params.regex is not None
        return f"start: {regex_rule(params.regex)}"
    if kind == "choice":
        assert params.choice is not None
        return f"start: {regex_rule('|'.join(map(escaped, _choices(params.choice))))}"
    if kind == "grammar":
        assert params.grammar is not None
        check_counts(params.grammar)
        return _from_gbnf(params.grammar)
    tag = _decoded(params.structural_tag)
    if not isinstance(tag, Mapping):
        raise ValueError(f"must be an object, not {type(tag).__name__}")
    _check_depth(tag)
    return structural_tag_grammar(tag, style, tokenizer)


def _of_xgrammar(kind: str, params: StructuredOutputsParams) -> str:
    if params.whitespace_pattern is not None:
        raise ValueError("whitespace_pattern cannot be followed by the back end xgrammar; disable_any_whitespace can")
    try:
        value = getattr(params, kind)
        if kind == "choice":
            _choices(value)  # how many, and none empty
        if kind in ("json", "json_object"):
            value = _schema(params.json) if kind == "json" else {"type": "object"}
            kind = "json"
        return grammar_of(kind, value, _style(params))
    except RecursionError:
        raise ValueError(f"{kind}: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{kind}: {_line(error)}") from None


def _style(params: StructuredOutputsParams) -> JsonStyle:
    pattern = params.whitespace_pattern
    if params.disable_any_whitespace and pattern is not None:
        raise ValueError("whitespace_pattern and disable_any_whitespace exclude each other")
    if params.disable_any_whitespace:
        pattern = ""
    return JsonStyle(WHITESPACE if pattern is None else pattern, params.disable_additional_properties)


def _schema(given: object) -> object:
    schema = _decoded(given)
    _check_depth(schema)
    return schema


def _decoded(given: object) -> Any:
    if not isinstance(given, str):
        return given
    try:
        return msgspec.json.decode(given)
    except msgspec.DecodeError as error:
        raise ValueError(f"not JSON: {error}") from None


def _check_depth(value: object) -> None:
    """Of lists and objects in one another."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [child for item in level for child in _children(item)]
        if not level:
            return
    raise ValueError(f"nested more than {MAX_DEPTH} deep")


def _children(item: object) -> Iterator[object]:
    if isinstance(item, Mapping):
        yield from item.values()
    elif isinstance(item, list | tuple):
        yield from item


def _choices(choices: tuple[str, ...]) -> list[str]:
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise ValueError(f"from 1 to {MAX_CHOICES} texts are taken, not {len(choices)}")
    if not all(choices):
        raise ValueError("texts must not be empty")
    return [*dict.fromkeys(choices)]


def _from_gbnf(text: str) -> str:
    try:
        lark: str = any_to_lark(text)
    except Exception as error:  # its own kinds of errors, and those of indexing
        raise ValueError(f"neither Lark nor GBNF: {_line(error)}") from None
    return lark


def _check_after(token_ids: tuple[int, ...], vocab_size: int) -> None:
    if len(token_ids) > MAX_AFTER:
        raise ValueError(f"after_token_ids takes at most {MAX_AFTER} token ids, not {len(token_ids)}")
    wrong = next((token for token in token_ids if token < 0), None)
    if wrong is not None:
        raise ValueError(f"after_token_ids must hold token ids from 0 to {vocab_size - 1}, not {wrong}")


def _reason(message: str) -> str:
    """Of the back end, without the places in the text that was made for it, and that text."""
    bare = _EXCERPT.sub("", _PLACE.sub("", message))
    if "'coerce_one_of'" in bare:
        return "oneOf of schemas that are not evidently disjoint cannot be followed; anyOf can"
    return bare


def _line(error: object) -> str:
    return " ".join(str(error).split())[:500]
