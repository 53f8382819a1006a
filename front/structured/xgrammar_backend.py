"""xgrammar, the second back end: what a request wants as a grammar in its EBNF, and matchers of that.

The only file that imports it, when one is asked for; it imports torch. xgrammar leaves out what it cannot follow of a
schema and goes on; so schemas are checked before (xgrammar_schema.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from front.structured.lark import JsonStyle
from front.structured.vocabulary import Vocabulary
from front.structured.xgrammar_schema import check_counts, followable, whole_pattern
from layers.optional import load

MAX_TEXT = 200_000  # characters of a grammar
MAX_WHITESPACE = 40  # between two tokens of JSON
_ESCAPES = "dDwWsSnrtfvxu0c"  # letters behind a backslash that regular expressions give a meaning
# What xgrammar takes for a character of a string whose length is bound: also control characters, and no escapes. And
# what is one: an escape that stands for half a character is not.
_CHARACTER = r"[^\"\\\r\n]"
_CHARACTER_RULE = (
    r"""bounded_character ::= [^\0-\x1f\"\\] | "\\" [\"\\/bfnrt] | "\\u" [0-9A-Ca-cEFef] [0-9A-Fa-f]{3}"""
    r""" | "\\u" [Dd] [0-7] [0-9A-Fa-f]{2}"""
)


def library() -> Any:
    """ValueError, one line that says what to install, when it cannot be imported."""
    return load("xgrammar", "pip install 'moesaic[xgrammar]'")


def grammar_of(kind: str, value: Any, style: JsonStyle) -> str:
    """EBNF. kind: json (value: a schema, decoded), regex or choice. Grammars of users are refused: a matcher of
    one that is ambiguous may take without bound for a token. ValueError: it cannot be followed."""
    grammars = library().Grammar

    def check_regex(regex: str) -> None:
        _check_escapes(regex)
        grammars.from_regex(regex)

    try:
        if kind == "json":
            schema = json.dumps(followable(value, style.closed, check_regex))
            spaced = style.whitespace != ""
            form = {"max_whitespace_cnt": MAX_WHITESPACE} if spaced else {"separators": (",", ":")}
            made = grammars.from_json_schema(schema, any_whitespace=spaced, strict_mode=False, **form)
            made = grammars.from_ebnf(_with_escapes(str(made)))
        elif kind == "regex":
            check_counts(value)
            check_regex(value)
            made = grammars.from_ebnf(f"root ::= Regex({json.dumps(whole_pattern(value, True))})")
        elif kind == "choice":
            texts = (json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(value))
            made = grammars.from_ebnf(f"root ::= {' | '.join(texts)}")
        else:
            raise ValueError("the back end xgrammar takes json, regex and choice here; guidance takes this too")
        text = str(made)
    except (RuntimeError, TypeError) as error:
        raise ValueError(_reason(error)) from None
    if len(text) > MAX_TEXT:
        raise ValueError(f"the grammar has {len(text)} characters; at most {MAX_TEXT} are taken")
    return text


class Compiler:
    """Of one model's vocabulary. Not thread-safe."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        """vocab_size: of the model. ValueError when the tokenizer has no token that ends a text."""
        xgrammar = library()
        ends = [token_id for token_id in vocabulary.eos_token_ids if token_id < vocab_size]
        if not ends:
            raise ValueError("the model's tokenizer has no token that ends a text, which structured output needs")
        known = range(min(vocabulary.vocab_size, vocab_size))
        # A special token has no text: a grammar's text must not be spelled with one.
        tokens = [b"" if token in vocabulary.special_ids else vocabulary.token_bytes(token) for token in known]
        self.ends: Sequence[int] = ends
        self._info = xgrammar.TokenizerInfo(tokens, vocab_size=vocab_size, stop_token_ids=ends)
        self._compiler = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)
        self._matcher = xgrammar.GrammarMatcher

    def compile(self, text: str) -> Any:
        """Of which `matcher` makes as many as are wanted. ValueError."""
        try:
            return self._compiler.compile_grammar(text)
        except RuntimeError as error:
            raise ValueError(_reason(error)) from None

    def matcher(self, compiled: Any) -> Any:
        """A GrammarMatcher at the beginning."""
        return self._matcher(compiled)


def _with_escapes(text: str) -> str:
    """The grammar with characters as they are. Names and constants cannot hold that class: their quotes have more
    backslashes."""
    lines = text.splitlines()
    changed = [line if "Regex(" in line else line.replace(_CHARACTER, "bounded_character") for line in lines]
    return text if changed == lines else "\n".join([*changed, _CHARACTER_RULE])


def _check_escapes(regex: str) -> None:
    """xgrammar takes escapes that it does not know for the letters themselves."""
    for match in re.finditer(r"\\(.)", regex, re.DOTALL):
        letter = match[1]
        if letter.isalnum() and letter not in _ESCAPES:
            raise ValueError(f"the back end xgrammar does not know the escape {match[0]}")
    if "[[:" in regex:
        raise ValueError("the back end xgrammar does not know classes by name, as [[:alpha:]]")


def _reason(error: Exception) -> str:
    """Without the place in the library's source."""
    return re.sub(r"^\[[\d:]+\] \S+?:\d+: ", "", str(error)).strip()
