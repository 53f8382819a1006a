"""Structural tags: free text in which tags hold what a schema, a regular expression or a grammar says.

Two forms. {"type": "structural_tag", "format": FORMAT}, where FORMAT is of type const_string, json_schema, regex,
grammar, any_text, sequence, or, optional, star, plus, tag, triggered_tags or tags_with_separator (xgrammar's
structural tags); and {"type": "structural_tag", "structures": [{"begin", "schema", "end"}, ...], "triggers": [...]}:
text is free until a trigger has come, and then one of the tags that begin with it follows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from front.params import StructuredOutputsParams
from front.structured.lark import ANY_TEXT, TEXT, JsonStyle, Specials, escaped, json_rule, literal, regex_rule
from front.structured.patterns import check_counts

MAX_DEPTH = 32  # of formats
MAX_TAGS = 512


def structural_tag_grammar(tag: Mapping[str, Any], style: JsonStyle, tokenizer: Specials) -> str:
    """Lark. ValueError says what is wrong."""
    writer = _Writer(style, tokenizer)
    if "format" in tag:
        start = writer.expression(tag["format"], 0)
    elif "structures" in tag:
        start = writer.old_form(tag)
    else:
        raise ValueError("a structural tag has a format, or structures and triggers")
    return "\n".join([f"start: {start}", *writer.rules])


def either_of(tag: Mapping[str, Any], answer: StructuredOutputsParams) -> StructuredOutputsParams:
    """What that structural tag says (of the form with a format), or what `answer` does. ValueError: the two do not go
    together."""
    if answer.json is not None:
        schema = json.loads(answer.json) if isinstance(answer.json, str) else answer.json
        form: dict[str, Any] = {"type": "json_schema", "json_schema": schema}
    elif answer.json_object:
        form = {"type": "json_schema", "json_schema": {"type": "object"}}
    elif answer.regex is not None:
        form = {"type": "regex", "pattern": answer.regex}
    elif answer.choice:
        form = {"type": "or", "elements": [{"type": "const_string", "value": text} for text in answer.choice]}
    elif answer.grammar is not None:
        form = {"type": "grammar", "grammar": answer.grammar}
    else:
        raise ValueError("tools and structural tags do not go together")
    whole = {"type": "structural_tag", "format": {"type": "or", "elements": [tag["format"], form]}}
    return msgspec.structs.replace(
        answer, json=None, json_object=None, regex=None, choice=None, grammar=None, structural_tag=whole
    )


class _Writer:
    """rules: of everything that needs a name."""

    def __init__(self, style: JsonStyle, tokenizer: Specials) -> None:
        self.rules: list[str] = []
        self._style, self._tokenizer = style, tokenizer
        self._num_names = self._num_tags = 0
        self._kinds: dict[str, Callable[[Mapping[str, Any], int], str]] = {
            "const_string": lambda form, depth: self._literal(_text(form, "value")),
            "json_schema": lambda form, depth: json_rule(_given(form, "json_schema"), self._style),
            "regex": lambda form, depth: regex_rule(_text(form, "pattern")),
            "grammar": lambda form, depth: self._grammar(_text(form, "grammar")),
            "any_text": lambda form, depth: self._named(TEXT),
            "sequence": lambda form, depth: " ".join(self._each(form, "elements", depth)),
            "or": lambda form, depth: "(" + " | ".join(self._each(form, "elements", depth)) + ")",
            "optional": lambda form, depth: f"({self.expression(_given(form, 'content'), depth + 1)})?",
            "star": lambda form, depth: f"({self.expression(_given(form, 'content'), depth + 1)})*",
            "plus": lambda form, depth: f"({self.expression(_given(form, 'content'), depth + 1)})+",
            "tag": self._tag,
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
        }

    def expression(self, form: object, depth: int) -> str:
        if depth > MAX_DEPTH:
            raise ValueError(f"formats may be nested {MAX_DEPTH} deep")
        if not isinstance(form, Mapping):
            raise ValueError(f"a format is an object with a type, not {type(form).__name__}")
        kind = form.get("type")
        if kind not in self._kinds:
            raise ValueError(f"the format type {kind!r} is not one of {', '.join(self._kinds)}")
        return self._kinds[kind](form, depth) or '""'

    def old_form(self, tag: Mapping[str, Any]) -> str:
        tags = [
            {
                "begin": _text(structure, "begin"),
                "content": {"type": "json_schema", "json_schema": structure.get("schema", {})},
                "end": structure.get("end", ""),
            }
            for structure in _list(tag, "structures")
        ]
        return self._triggered({"triggers": tag.get("triggers"), "tags": tags}, 0)

    # ---- formats ----

    def _literal(self, text: str) -> str:
        return literal(text, self._tokenizer) or '""'

    def _named(self, body: str, lazy: bool = False) -> str:
        self._num_names += 1
        name = f"part_{self._num_names}"
        self.rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def _grammar(self, text: str) -> str:
        check_counts(text)
        return self._named("%lark {\n" + text + "\n}")

    def _each(self, form: Mapping[str, Any], field: str, depth: int) -> list[str]:
        return [self.expression(item, depth + 1) for item in _list(form, field)]

    def _tag(self, form: Mapping[str, Any], depth: int) -> str:
        return f"{self._literal(_text(form, 'begin'))} {self._inside(form, depth)}"

    def _inside(self, form: Mapping[str, Any], depth: int) -> str:
        """What follows a tag's beginning, and its end."""
        self._num_tags += 1
        if self._num_tags > MAX_TAGS:
            raise ValueError(f"more than {MAX_TAGS} tags")
        ends = form.get("end", "")
        ends = [ends] if isinstance(ends, str) else ends
        if not isinstance(ends, Sequence) or not ends or not all(isinstance(end, str) for end in ends):
            raise ValueError("a tag's end is a text, or a list of texts")
        content = _given(form, "content")
        if isinstance(content, Mapping) and content.get("type") == "any_text" and any(ends):
            return "(" + " | ".join(self._until(end) for end in ends if end) + ")"
        end = " | ".join(self._literal(end) for end in ends)
        return f"{self.expression(content, depth + 1)} ({end})"

    def _until(self, end: str) -> str:
        """Any text up to the first place where `end` stands, and that."""
        special = self._tokenizer.special_tokens
        if end in special:
            return f"{self._named(TEXT)} {self._literal(end)}"
        begins = [end.index(name) for name in special if name in end]
        if begins:  # the token ends a text that ends with what stands before it
            before = end[: min(begins)]
            return f"{self._named(regex_rule(ANY_TEXT + escaped(before)))} {self._literal(end[len(before) :])}"
        return self._named(f"{TEXT} {self._literal(end)}", lazy=True)

    def _triggered(self, form: Mapping[str, Any], depth: int) -> str:
        """Free text up to a trigger, then the rest of one of the tags that begin with it; again and again."""
        triggers = _list(form, "triggers")
        tags = _list(form, "tags")
        branches: list[str] = []
        for trigger in triggers:
            if not isinstance(trigger, str) or not trigger:
                raise ValueError("triggers must be texts, none of them empty")
            own = [tag for tag in tags if _text(tag, "begin").startswith(trigger)]
            if not own:
                raise ValueError(f"no tag begins with the trigger {trigger!r}")
            rests = []
            for tag in own:
                rest = tag["begin"][len(trigger) :]
                rests.append(f"{self._literal(rest) if rest else ''} {self._inside(tag, depth)}".strip())
            branches.append(f"{self._until(trigger)} ({' | '.join(rests)})")
        for tag in tags:
            if not any(tag["begin"].startswith(trigger) for trigger in triggers):
                raise ValueError(f"the tag that begins with {tag['begin']!r} begins with no trigger")
        call = self._named(" | ".join(branches))
        if form.get("stop_after_first"):
            return call if form.get("at_least_one") else f"({call} | {self._named(TEXT)})"
        times = "+" if form.get("at_least_one") else "*"
        return f"{call}{times} {self._named(TEXT)}"

    def _separated(self, form: Mapping[str, Any], depth: int) -> str:
        tag = self._named(" | ".join(self._tag(tag, depth) for tag in _list(form, "tags")))
        if form.get("stop_after_first"):
            return tag if form.get("at_least_one") else f"{tag}?"
        separator = _text(form, "separator")
        several = f"{tag} ({self._literal(separator)} {tag})*"
        return several if form.get("at_least_one") else f"({several})?"


def _given(form: Mapping[str, Any], field: str) -> Any:
    if field not in form:
        raise ValueError(f"a format of type {form.get('type', 'tag')!r} has a {field}")
    return form[field]


def _text(form: object, field: str) -> str:
    if not isinstance(form, Mapping):
        raise ValueError(f"{json.dumps(form)[:50]} is not an object")
    value = form.get(field)
    if not isinstance(value, str):
        raise ValueError(f"{field} must be a text")
    return value


def _list(form: Mapping[str, Any], field: str) -> Sequence[Any]:
    value = form.get(field)
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ValueError(f"{field} must be a list that is not empty")
    return value
