"""The parser of gpt-oss, whose answers are messages: a header, <|message|>, a body, and a tag that ends it.

    <|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>content<|return|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{arguments}<|call|>

The recipient may also stand behind the role. A message to a recipient is a call, the analysis channel is reasoning, and
all else is content. (The library openai-harmony reads the same of answers, tests/clients/test_harmony.py, but loads its
vocabulary from outside at run time.)
"""

from __future__ import annotations

import re
from collections.abc import Callable

from front.chat.events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from front.chat.tags import Tags

MAX_HEADER = 1024  # characters; what is longer is no header
_HEADER_TAGS = Tags(["<|message|>", "<|end|>", "<|return|>", "<|call|>"])
_BODY_TAGS = Tags(["<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>"])
_BEGINS = ("<|start|>", "<|channel|>", "<|message|>", "to=", "assistant")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?!functions\.(?:[\s<]|$))(?:functions\.)?([^\s<]+)")


class HarmonyParser:
    """events.Parser. reasoning, calls: false: these come as content. max_calls 0: any."""

    def __init__(
        self, *, reasoning: bool, calls: bool, max_calls: int, call_id: Callable[[int], str], in_body: bool = False
    ) -> None:
        """in_body: the prompt ends within a message of the final channel."""
        self.reasoning = False
        self.ended = False
        self._thinks, self._calls = reasoning, calls
        self._max_calls, self._call_id = max_calls, call_id
        self._text = ""
        self._events: list[Event] = []
        self._num_calls = 0
        self._in_call = False
        self._in_body = in_body

    def feed(self, text: str) -> list[Event]:
        self._text += text
        events: list[Event] = []
        self._events = events
        while not self.ended and (self._body() if self._in_body else self._header()):
            pass
        return events

    def finish(self, cut: bool = False) -> list[Event]:
        """The tag that ends a message also ends the output, and is not part of its text."""
        events: list[Event] = []
        self._events = events
        if self.ended:
            return []
        if self._in_body or (_RECIPIENT.search(self._text) is None and _CHANNEL.match(self._text) is None):
            self._say(self._text)
        if self._in_call:
            events.append(CallEnd(self._num_calls - 1, complete=not cut))
        self._text, self._in_call = "", False
        return events

    def _header(self) -> bool:
        text = self._text
        bare = text.lstrip()
        if not any(begin.startswith(bare) or bare.startswith(begin) for begin in _BEGINS):
            self._in_body = True  # an answer without form
            return True
        at, tag = _HEADER_TAGS.find(text)
        if at > MAX_HEADER:
            self._in_body = True
            return True
        if tag is None:
            return False
        self._text = text[at + len(tag) :]
        if tag != "<|message|>":  # a message without a body
            return True
        head = text[:at]
        channel = _CHANNEL.search(head)
        recipient = _RECIPIENT.search(head) if self._calls else None
        self._in_body = True
        self.reasoning = recipient is None and self._thinks and channel is not None and channel[1] == "analysis"
        if recipient is not None:
            index, name = self._num_calls, recipient.group(1)
            self._events.append(CallBegin(index, self._call_id(index), name))
            self._num_calls, self._in_call = index + 1, True
        return True

    def _body(self) -> bool:
        at, tag = _BODY_TAGS.find(self._text)
        self._say(self._text[:at])
        if tag is None:
            self._text = self._text[at:]
            return False
        self._text = self._text[at + (0 if tag in ("<|start|>", "<|channel|>") else len(tag)) :]
        if self._in_call:
            self._events.append(CallEnd(self._num_calls - 1))
            self.ended = self._num_calls == self._max_calls
        self._in_body = self._in_call = self.reasoning = False
        return True

    def _say(self, text: str) -> None:
        if not text:
            return
        if self._in_call:
            self._events.append(CallArguments(self._num_calls - 1, text))
        else:
            self._events.append(Reasoning(text) if self.reasoning else Content(text))
