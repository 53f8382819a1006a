"""One incremental parser for all families whose format is a table (front/chat/families.py).

It is a machine of states. A state takes what it can from the text at hand, and returns whether there may be more to
take at once. It decides by what the text says, never by where a piece of it ends: what cannot be decided yet stays.
Spaces around reasoning and calls are nothing's. What looks like the beginning of a call and is none comes as content.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from front.chat.calls import SCANNERS, CallScanner, Tools, tables_of
from front.chat.events import CallEnd, Content, Event, Reasoning
from front.chat.families import CallFormat, ReasoningFormat
from front.chat.tags import Tags


class TableParser:
    """events.Parser. reasoning, calls None: that kind is not looked for, and comes as content.

    begins_reasoning: how the prompt ends: inside of reasoning or behind it; None: it does not say. max_calls 0: any.
    call_id: makes the id of the call with this index.
    """

    def __init__(
        self,
        reasoning: ReasoningFormat | None,
        calls: CallFormat | None,
        *,
        tools: Tools,
        begins_reasoning: bool | None,
        max_calls: int,
        call_id: Callable[[int], str],
    ) -> None:
        self.ended = False
        self.reasoning = False
        self._thinks, self._calls = reasoning, calls
        self._max_calls, self._call_id = max_calls, call_id
        self._text = ""  # not taken yet
        self._before = ""  # spaces and tags before what may be a call
        self._events: list[Event] = []
        self._num_calls = 0
        self._scanner: CallScanner | None = None
        section = calls.section or ("", "") if calls is not None else ("", "")
        begins = [] if calls is None else [section[0], calls.begin if calls.bare else ""]
        self._begins = Tags(begins)
        self._thought = Tags([reasoning.end, *(begins if reasoning.calls_end else ())] if reasoning else [])
        self._section_end = section[1]
        if calls is not None:
            self._tables = tables_of(calls, tools)
            self._behind_tags = Tags([calls.begin, calls.end, section[1], calls.fence[1]])
        self._state: Callable[[Any], bool] = TableParser._content
        self._strip = False  # spaces that come next are nothing's
        if reasoning is not None:
            if begins_reasoning or (begins_reasoning is None and reasoning.assumed):
                self._state, self._strip, self.reasoning = TableParser._reason, True, True
            elif begins_reasoning is None:
                self._state = TableParser._opening

    def feed(self, text: str) -> list[Event]:
        if self._is_plain(text):
            return [Content(text)]
        if self.ended:
            return []
        self._text += text
        events: list[Event] = []
        self._events = events
        while self._state(self) and not self.ended:
            pass
        return events

    def _is_plain(self, text: str) -> bool:
        """As most pieces are, and nothing is held before it."""
        return (
            self._state is TableParser._content
            and not (self._text or self._strip or text[-1:].isspace())
            and bool(text)
            and self._begins.absent(text)
        )

    def finish(self, cut: bool = False) -> list[Event]:
        events: list[Event] = []
        self._events = events
        if self.ended:
            return []
        scanner, text = self._scanner, self._text
        if cut and self._state is TableParser._behind:
            text = ""  # a part of the tag that ends a call
        self._text = ""
        if scanner is not None and scanner.committed:
            scanner.finish(text, events, cut)
        elif scanner is not None:
            self._say(Content, self._before + scanner.raw + text)
        else:
            self._say(Reasoning if self.reasoning else Content, self._before + (text.lstrip() if self._strip else text))
        self._scanner, self._before = None, ""
        return events

    # ---- reasoning and content ----

    def _opening(self) -> bool:
        """Nothing but spaces has come: the output may begin with reasoning."""
        assert self._thinks is not None
        bare = self._text.lstrip()
        if bare.startswith(self._thinks.begin):
            self._text = bare[len(self._thinks.begin) :]
            self._state, self._strip, self.reasoning = TableParser._reason, True, True
            return True
        if self._thinks.begin.startswith(bare):
            return False
        self._state = TableParser._content
        return True

    def _reason(self) -> bool:
        assert self._thinks is not None
        begin, end = self._thinks.begin, self._thinks.end
        if self._strip:
            self._text = self._text.lstrip()
            if self._text.startswith(begin):  # a model that says once more what its prompt said
                self._text = self._text[len(begin) :]
                return True
            if begin.startswith(self._text):
                return False
            self._strip = False
        text = self._text
        at, tag = self._thought.find(text)
        last = len(text[:at].rstrip())
        self._say(Reasoning, text[:last])
        if tag is None:
            self._text = text[last:]
            return False
        self._text = text[at + len(tag) :] if tag == end else text[at:]
        self._state, self._strip, self.reasoning = TableParser._content, True, False
        return True

    def _content(self) -> bool:
        if self._strip:
            self._text = self._text.lstrip()
            if not self._text:
                return False
            self._strip = False
        text = self._text
        at, tag = self._begins.find(text)
        last = len(text[:at].rstrip()) if self._calls is not None else at
        self._say(Content, text[:last])
        if tag is None:
            self._text = text[last:]
            return False
        self._before, self._text = text[last : at + len(tag)], text[at + len(tag) :]
        assert self._calls is not None
        if tag == self._calls.begin:
            return self._open_call()
        self._state = TableParser._in_front
        return True

    def _say(self, kind: type[Content] | type[Reasoning], text: str) -> None:
        if text:
            self._events.append(kind(text))

    # ---- calls ----

    def _in_front(self) -> bool:
        """Behind the tag that begins a section: spaces, and then a call."""
        assert self._calls is not None
        bare, begin = self._text.lstrip(), self._calls.begin
        if bare.startswith(begin):
            self._before += self._text[: len(self._text) - len(bare)] + begin
            self._text = bare[len(begin) :]
            return self._open_call()
        return False if begin.startswith(bare) else self._no_call("")

    def _open_call(self) -> bool:
        assert self._calls is not None
        kind = SCANNERS[self._calls.arguments]
        self._scanner = kind(self._tables, self._num_calls, self._call_id(self._num_calls))
        self._state = TableParser._call
        return True

    def _no_call(self, raw: str) -> bool:
        self._say(Content, self._before + raw)
        self._before, self._scanner = "", None
        self._state = TableParser._content
        return True

    def _call(self) -> bool:
        scanner = self._scanner
        assert scanner is not None
        self._text = scanner.take(self._text, self._events)
        if scanner.done is False:
            return self._no_call(scanner.raw)
        if scanner.committed and self._before:
            self._before = ""
            self._num_calls += 1
        if self._events and isinstance(self._events[-1], CallEnd):
            self.ended = self._num_calls == self._max_calls
        if not scanner.done:
            return False
        self._scanner = None
        self._state, self._strip = TableParser._behind, True
        return True

    def _behind(self) -> bool:
        """Behind a call: what ends it and its section, spaces, and perhaps another call."""
        assert self._calls is not None
        bare = self._text.lstrip()
        tag = self._behind_tags.at_start(bare)
        if tag is None:
            if self._behind_tags.may_begin(bare):
                return False
            self._text, self._state = bare, TableParser._content
            return True
        self._text = bare[len(tag) :]
        if tag == self._calls.begin:
            self._before = tag
            return self._open_call()
        if tag == self._section_end:
            self._state = TableParser._content
        return True
