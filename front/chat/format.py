"""How the text of a request's choices is to be read, and the parsers that read it."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from front.chat.events import Parser
from front.chat.families import CALLS, HARMONY, HARMONY_REASONING, REASONING, tags_of
from front.chat.harmony import HarmonyParser
from front.chat.parser import TableParser


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True):
    """calls, reasoning: names of families (front/chat/families.py); "": that kind is not looked for.

    begins_reasoning: the prompt ends inside of reasoning, or behind it; None: it does not say. max_calls: behind so
    many calls a choice ends; 0: never. tools: schemas of parameters by name.
    """

    calls: str = ""
    reasoning: str = ""
    begins_reasoning: bool | None = None
    max_calls: int = 0
    tools: dict[str, dict[str, Any]] = {}

    def parser(self, request_id: str, choice: int) -> Parser:
        """For one choice. Calls are named by request, choice and index, so that a replay names them alike."""

        def call_id(index: int) -> str:
            return "call_" + hashlib.blake2b(f"{request_id}/{choice}/{index}".encode(), digest_size=12).hexdigest()

        if self.calls == HARMONY or self.reasoning == HARMONY_REASONING:
            return HarmonyParser(
                reasoning=bool(self.reasoning), calls=bool(self.calls), max_calls=self.max_calls, call_id=call_id
            )
        return TableParser(
            REASONING[self.reasoning] if self.reasoning else None,
            CALLS[self.calls] if self.calls else None,
            tools=self.tools,
            begins_reasoning=self.begins_reasoning,
            max_calls=self.max_calls,
            call_id=call_id,
        )

    def after(self, prompt: str) -> OutputFormat:
        """For an output that follows this prompt."""
        if self.reasoning not in REASONING:
            return self
        table, end = REASONING[self.reasoning], prompt.rstrip()
        if end.endswith((table.begin, table.end)):
            return msgspec.structs.replace(self, begins_reasoning=end.endswith(table.begin))
        return self

    def going_on(self, text: str) -> OutputFormat:
        """For an output that goes on with a message that has this text so far."""
        if self.reasoning not in REASONING:
            return self
        table = REASONING[self.reasoning]
        return msgspec.structs.replace(self, begins_reasoning=text.rfind(table.begin) > text.rfind(table.end))

    @property
    def starts_with_reasoning(self) -> bool:
        """For certain."""
        if self.reasoning not in REASONING:
            return False
        return REASONING[self.reasoning].assumed if self.begins_reasoning is None else self.begins_reasoning

    @property
    def end_of_reasoning(self) -> str:
        return REASONING[self.reasoning].end

    @property
    def tags(self) -> tuple[str, ...]:
        """What the parser must see, though it may be written in special tokens."""
        return tags_of(self.calls, self.reasoning)


def output_format(
    families: tuple[str, str],
    tools: dict[str, dict[str, Any]] | None,
    prompt: str,
    goes_on: str | None,
    max_calls: int = 0,
) -> OutputFormat | None:
    """families: of calls and of reasoning. tools: schemas by name; None: nothing can be called. goes_on: the text of
    the message that the output goes on with. None: there is nothing to look for."""
    calls, reasoning = "" if tools is None else families[0], families[1]
    if not (calls or reasoning):
        return None
    schemas = (tools or {}) if calls else {}
    found = OutputFormat(calls=calls, reasoning=reasoning, max_calls=max_calls, tools=schemas)
    return found.after(prompt) if goes_on is None else found.going_on(goes_on)
