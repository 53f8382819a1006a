"""The search for tags in a text that comes in pieces."""

from __future__ import annotations

import re
from collections.abc import Iterable


class Tags:
    """A few texts, none of which begins inside of another one."""

    __slots__ = ("_firsts", "_longest", "_pattern", "_tags")

    def __init__(self, tags: Iterable[str]) -> None:
        self._tags = tuple(dict.fromkeys(tag for tag in tags if tag))
        self._pattern = re.compile("|".join(map(re.escape, self._tags)) or "(?!)")
        self._firsts = tuple({tag[0] for tag in self._tags})
        self._longest = max(map(len, self._tags), default=0)

    def absent(self, text: str) -> bool:
        """No tag is in this text, nor the beginning of one."""
        return all(first not in text for first in self._firsts)

    def find(self, text: str) -> tuple[int, str | None]:
        """Where the first tag begins, and which; or what may yet become one (None), at the latest the text's end."""
        match = self._pattern.search(text)
        if match is not None:
            return match.start(), match.group()
        return self.partial(text), None

    def partial(self, text: str) -> int:
        """Where the longest suffix begins that is the beginning of a tag."""
        start = max(0, len(text) - self._longest + 1)
        found = len(text)
        for first in self._firsts:
            at = text.find(first, start, found)
            while at >= 0:
                if self.may_begin(text[at:]):
                    found = at
                    break
                at = text.find(first, at + 1, found)
        return found

    def may_begin(self, text: str) -> bool:
        """text is the beginning of a tag."""
        return any(tag.startswith(text) for tag in self._tags)

    def at_start(self, text: str) -> str | None:
        """The tag that the text begins with."""
        match = self._pattern.match(text)
        return match.group() if match is not None else None


class JsonEnd:
    """Finds where a JSON object or array ends that comes in pieces, or a tag outside of its strings that ends it too.

    depth: how many brackets are open."""

    __slots__ = ("_end", "_escaped", "_outside", "_string", "depth")
    _INSIDE = re.compile(r'["\\]')

    def __init__(self, end: str = "", depth: int = 0) -> None:
        """end: the tag."""
        self.depth = depth
        self._end = end
        self._string = False
        self._escaped = False
        self._outside = re.compile(r'["{}\[\]' + re.escape(end[:1]) + "]")

    def scan(self, text: str) -> tuple[int, bool | None]:
        """(how much of this text belongs to the value, how it goes on): None: with the next piece; True: it has ended;
        False: the tag stands there. What may be the beginning of the tag is not taken: it is to come again."""
        place, size = 0, len(text)
        if self._escaped and size:
            self._escaped, place = False, 1
        while place < size:
            match = (self._INSIDE if self._string else self._outside).search(text, place)
            if match is None:
                return size, None
            mark, place = match.group(), match.end()
            if mark == '"':
                self._string = not self._string
            elif mark == "\\":
                if place == size:
                    self._escaped = True
                place += 1
            elif mark in "{[":
                self.depth += 1
            elif mark in "}]":
                self.depth -= 1
                if self.depth <= 0:
                    return place, True
            elif text.startswith(self._end, place - 1):
                return place - 1, False
            elif self._end.startswith(text[place - 1 :]):
                return place - 1, None
        return min(place, size), None
