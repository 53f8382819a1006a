"""What the text of a choice turns out to be, piece by piece: content, reasoning and calls of tools. No HTTP here.

The pieces of one kind joined are the whole: a reader appends them, and never looks back. A call is CallBegin, then
CallArguments whose texts joined are a JSON object, then CallEnd; calls do not overlap, and are counted from 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec
from msgspec import Struct


class Content(msgspec.Struct, frozen=True, gc=False, tag=True):
    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False, tag=True):
    text: str


class CallBegin(msgspec.Struct, frozen=True, gc=False, tag=True):
    """id: what the result of the call is to name; the model's own where its format has one (Kimi-K2)."""

    index: int
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True, gc=False, tag=True):
    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True, gc=False, tag=True):
    """complete: false where the output ended inside of the call, whose arguments are then cut as they are."""

    index: int
    complete: bool = True


Event = Content | Reasoning | CallBegin | CallArguments | CallEnd


class Parser(Protocol):
    """For one choice. reasoning: what comes next belongs to the reasoning, as far as is known. ended: as many calls
    have ended as were wanted, and the choice need not go on."""

    reasoning: bool
    ended: bool

    def feed(self, text: str) -> list[Event]:
        """What is certain now. However a text is cut into pieces, the events joined are the same."""
        ...

    def finish(self, cut: bool = False) -> list[Event]:
        """What was held back, once no more text comes. cut: the model would have gone on (length, abort)."""
        ...


def content_of(events: Iterable[Event]) -> str:
    return "".join([event.text for event in events if isinstance(event, Content)])


def joined(events: list[Event]) -> list[Event]:
    """Neighbours of one kind as one event."""
    if len(events) < 2:
        return events
    result = events[:1]
    for event in events[1:]:
        last = result[-1]
        if isinstance(event, CallArguments) and isinstance(last, CallArguments):
            result[-1] = CallArguments(event.index, last.text + event.text)
        elif isinstance(event, Content) and isinstance(last, Content):
            result[-1] = Content(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            result[-1] = Reasoning(last.text + event.text)
        else:
            result.append(event)
    return result


class Call(Struct):
    id: str
    name: str
    arguments: str = ""


class Message(Struct):
    """The events of a choice, joined."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = []

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Content):
                self.content += event.text
            elif isinstance(event, Reasoning):
                self.reasoning += event.text
            elif isinstance(event, CallBegin):
                self.calls.append(Call(event.id, event.name))
            elif isinstance(event, CallArguments):
                self.calls[-1].arguments += event.text
