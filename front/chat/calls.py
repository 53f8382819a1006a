"""One call of a tool, in each of the three ways in which families write its arguments (front/chat/families.py).

A scanner is fed what stands behind the tag that begins a call. It is none until its name is known and its arguments
begin: until then `raw` keeps what was taken. From there on arguments go out as they come. Scanners decide by what the
text says, never by where a piece of it ends: what cannot be decided yet is handed back, to come again with more.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from front.chat.events import CallArguments, CallBegin, CallEnd, Event
from front.chat.families import CallFormat
from front.chat.tags import JsonEnd, Tags
from front.chat.values import NOT_STRING, STRING, Kinds, as_json, inside, kinds_of, quoted

MAX_NAME = 512  # characters; what is longer is no name of a function, or of a parameter
Tools = Mapping[str, Mapping[str, Any]]  # schemas of parameters by name
_HEAD_CHARACTERS = 2048  # within which a named_json call says its name and begins its arguments, to be streamed
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_KEY_WITH_TYPE = re.compile(r'(.*)" string="(true|false)"', re.DOTALL)
_OWN_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")
_NO_NAME = re.compile(r"[<>\n{}]")


class _Named(msgspec.Struct):
    """The whole of a named_json call."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


_named = msgspec.json.Decoder(_Named)


class Tables(Struct, frozen=True):
    """What all calls of a parser share."""

    format: CallFormat
    header: Tags  # what ends a name that has no tag of its own
    between: Tags  # what may follow a parameter
    value: Tags  # what ends a value; models that write line breaks forget its own tag, and go on with the next one
    tools: Tools


def tables_of(format: CallFormat, tools: Tools) -> Tables:
    header = Tags([format.named or format.key_begin, "" if format.named else format.end])
    between = [format.key_begin, format.end]
    value = [format.value_end, *(f"\n{tag}" for tag in between if format.newlines)]
    return Tables(format, header, Tags(between), Tags(value), tools)


class CallScanner(ABC):
    """committed: it is a call. State functions return True when there may be more to do at once."""

    def __init__(self, tables: Tables, index: int, call_id: str) -> None:
        self.raw = ""
        self.committed = False
        self.done: bool | None = None
        self._tables, self._format = tables, tables.format
        self._index, self._id = index, call_id
        self._text = ""
        self._events: list[Event] = []
        self._state: Callable[[Any], bool] = type(self)._header

    def take(self, text: str, events: list[Event]) -> str:
        """What is left of the text. `done` says what of: None: it is to come again, with more; True: the call has
        ended; False: it was none, and `raw` is text."""
        self._text, self._events = text, events
        while self.done is None and self._state(self):
            pass
        return self._text

    @abstractmethod
    def _header(self) -> bool: ...

    @abstractmethod
    def finish(self, rest: str, events: list[Event], cut: bool) -> None:
        """The output ends within the call, which is committed."""

    def _begin(self, name: str, rest: str) -> None:
        self.committed, self._text = True, rest
        self._events.append(CallBegin(self._index, self._id, name))

    def _say(self, text: str) -> None:
        if text:
            self._events.append(CallArguments(self._index, text))

    def _end(self, complete: bool = True) -> None:
        self._events.append(CallEnd(self._index, complete))

    def _no_call(self) -> bool:
        self.done = False
        return False

    def _named(self) -> tuple[str, str] | None:
        """Name and the rest where the format has a text that ends the name. None: not yet, or `done`: no call."""
        text, before, named = self._text, self._format.before_name, self._format.named
        if not text.startswith(before):
            if not before.startswith(text):
                self._no_call()
            return None
        start = len(before)
        at = text.find(named, start, start + MAX_NAME + len(named))
        end = at if at >= 0 else self._tables.header.partial(text)
        name = text[start:end].strip()
        if _NO_NAME.search(name) is not None or end - start > MAX_NAME:
            self._no_call()
            return None
        if at < 0:
            return None
        if self._format.own_ids and name:
            match = _OWN_ID.fullmatch(name)
            self._id, name = name, match.group(1) if match is not None else name
        if not name:
            self._no_call()
            return None
        return name, text[at + len(named) :]


class JsonCall(CallScanner):
    """NAME, then an object."""

    def __init__(self, tables: Tables, index: int, call_id: str) -> None:
        super().__init__(tables, index, call_id)
        self._json = JsonEnd(self._format.end)

    def _header(self) -> bool:
        found = self._named()
        if found is None:
            return False
        name, rest = found
        fence, end = self._format.fence[0], self._format.end
        bare = rest.lstrip()
        if fence and bare.startswith(fence):
            bare = bare[len(fence) :].lstrip()
        elif fence.startswith(bare):
            return False
        if bare.startswith(end):
            self._begin(name, bare)
            self._say("{}")
            self._end()
            self.done = True
        elif bare.startswith("{"):
            self._begin(name, bare)
            self._state = JsonCall._arguments
            return True
        elif not end.startswith(bare):
            self._no_call()
        return False

    def _arguments(self) -> bool:
        """They end where the object does. An object that does not before its tag goes out as it is."""
        taken, ended = self._json.scan(self._text)
        self._say(self._text[:taken])
        self._text = self._text[taken:]
        if ended is not None:
            self._end()
            return self._behind(ended)
        return False

    def _behind(self, ended: bool) -> bool:
        self.done = True
        return False

    def finish(self, rest: str, events: list[Event], cut: bool) -> None:
        self._events = events
        self._say(rest)
        self._end(complete=False)


class NamedJsonCall(JsonCall):
    """An object that holds name and arguments: streamed where they stand first and in this order, else as a whole."""

    def __init__(self, tables: Tables, index: int, call_id: str) -> None:
        super().__init__(tables, index, call_id)
        self._whole = JsonEnd(self._format.end)
        self._looks = True  # for the head
        self._closed = False  # the arguments have ended, and their object is to be closed

    def _header(self) -> bool:
        if not self._whole.depth:
            bare = self._text.lstrip()
            if not bare:
                return False
            if bare[0] != "{":
                return self._no_call()
        taken, ended = self._whole.scan(self._text)
        self.raw += self._text[:taken]
        self._text = self._text[taken:]
        if self._looks and (match := _HEAD.match(self.raw[:_HEAD_CHARACTERS])) is not None:
            rest = self.raw[match.end() :] + self._text
            self._begin(msgspec.json.decode(match.group(1)), rest)
            self._state = JsonCall._arguments
            return True
        self._looks = len(self.raw) < _HEAD_CHARACTERS
        if ended is None:
            return False
        if ended and self._as_a_whole():
            self.done = True
            return False
        return self._no_call()

    def _as_a_whole(self) -> bool:
        try:
            found = _named.decode(self.raw)
            arguments = bytes(found.arguments) or bytes(found.parameters) or b"{}"
            if arguments[:1] == b'"':  # written as a text
                arguments = msgspec.json.decode(arguments, type=str).encode() or b"{}"
            msgspec.json.decode(arguments, type=dict[str, Any] | None)
        except (msgspec.DecodeError, RecursionError, UnicodeError):
            return False
        if not found.name:
            return False
        self._begin(found.name, self._text)
        self._say("{}" if arguments == b"null" else arguments.decode().strip())
        self._end()
        return True

    def _behind(self, ended: bool) -> bool:
        self._closed = True
        self._state = NamedJsonCall._closing
        return True

    def _closing(self) -> bool:
        """The rest of the object, which says nothing that is wanted."""
        bare = self._text.lstrip()
        if not bare:
            return False
        if bare[0] in "},":
            self._whole = JsonEnd(self._format.end, depth=1)
            self._state, self._text = NamedJsonCall._more, bare
            return True
        self.done, self._text = True, bare
        return False

    def _more(self) -> bool:
        taken, ended = self._whole.scan(self._text)
        self._text = self._text[taken:]
        self.done = None if ended is None else True
        return False

    def finish(self, rest: str, events: list[Event], cut: bool) -> None:
        if not self._closed:
            super().finish(rest, events, cut)


class ParameterCall(CallScanner):
    """NAME, then keys and values, each value as plain text."""

    def __init__(self, tables: Tables, index: int, call_id: str) -> None:
        super().__init__(tables, index, call_id)
        self._schema: Mapping[str, Any] = {}
        self._first = True  # no parameter has come
        self._key = ""
        self._kinds: Kinds = STRING
        self._fresh = True  # of the value, nothing has come
        self._value: list[str] = []  # of a value whose type is known at its end

    def _header(self) -> bool:
        if self._format.named:
            found = self._named()
            if found is None:
                return False
            name, rest = found
        else:  # a line break or the next tag ends the name
            bare = self._text.lstrip()
            match = _NO_NAME.search(bare)
            name, rest = (bare, "") if match is None else (bare[: match.start()], bare[match.start() :].lstrip())
            name = name.strip()
            if len(name) > MAX_NAME or (match is not None and not name):
                return self._no_call()
            header = self._tables.header
            if not rest or header.at_start(rest) is None:
                return self._no_call() if rest and not header.may_begin(rest) else False
        self._begin(name, rest)
        self._schema = self._tables.tools.get(name, {})
        self._state = ParameterCall._between
        return True

    def _between(self) -> bool:
        bare = self._text.lstrip()
        tag = self._tables.between.at_start(bare)
        if tag is None:
            if self._tables.between.may_begin(bare):
                return False
            self._text = bare
            return self._close()
        self._text = bare[len(tag) :]
        if tag == self._format.end:
            return self._close()
        self._state = ParameterCall._in_key
        return True

    def _close(self) -> bool:
        self._say("{}" if self._first else "}")
        self._end()
        self.done = True
        return False

    def _in_key(self) -> bool:
        text, end = self._text, self._format.key_end
        at = text.find(end, 0, MAX_NAME + len(end))
        if at < 0 and len(text) < MAX_NAME + len(end):
            return False
        rest = text[at + len(end) :]
        if between := self._format.value_begin:
            bare = rest.lstrip()
            if at >= 0 and bare != between and between.startswith(bare):
                return False
            at = at if bare.startswith(between) else -1
            rest = bare[len(between) :]
        if at < 0:  # no parameter: the call has ended before it
            self._text = self._format.key_begin + text
            return self._close()
        key = text[:at]
        match = _KEY_WITH_TYPE.fullmatch(key)
        if match is not None:
            key, self._kinds = match.group(1), STRING if match.group(2) == "true" else NOT_STRING
        else:
            key = key.strip().strip('"')
            self._kinds = kinds_of(self._schema, key)
        quote = '"' if self._kinds == STRING else ""
        self._say(f"{'{' if self._first else ', '}{quoted(key)}: {quote}")
        self._text, self._first, self._fresh = rest, False, True
        self._value.clear()
        self._state = ParameterCall._in_value
        return True

    def _in_value(self) -> bool:
        text = self._text
        if self._fresh and text:
            self._fresh = False
            if self._format.newlines:
                text = text.removeprefix("\n")
        at, tag = self._tables.value.find(text)
        if tag is None:
            if self._format.newlines and text[:at].endswith("\n"):
                at -= 1
            self._piece(text[:at])
            self._text = text[at:]
            return False
        piece = text[:at]
        self._piece(piece.removesuffix("\n") if self._format.newlines else piece)
        self._text = text[at + len(tag) :] if tag == self._format.value_end else text[at:]
        self._say('"' if self._kinds == STRING else as_json("".join(self._value), self._kinds))
        self._state = ParameterCall._between
        return True

    def _piece(self, text: str) -> None:
        if self._kinds == STRING:
            self._say(inside(text))
        else:
            self._value.append(text)

    def finish(self, rest: str, events: list[Event], cut: bool) -> None:
        """Arguments that lack nothing but the tag behind them are closed, unless the model would have gone on."""
        self._events = events
        if self._state is ParameterCall._in_value:
            self._say(inside(rest) if self._kinds == STRING else "".join(self._value) + rest)
        elif self._state is ParameterCall._between and not cut:
            self._say("{}" if self._first else "}")
        self._end(complete=False)


SCANNERS: dict[str, type[CallScanner]] = {
    "json": JsonCall,
    "named_json": NamedJsonCall,
    "parameters": ParameterCall,
}
