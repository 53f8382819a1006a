"""Drafts from the request's own text: what followed the last time that its last tokens occurred (method "ngram", also
called prompt lookup). No torch here."""

from __future__ import annotations

from collections.abc import Sequence

from engine.request import Request


class NgramIndex:
    """Where each run of `least` to `most` tokens of a growing text was last followed by another. A token costs one
    entry of a dictionary for every length, when it comes; a lookup costs as many lookups of it."""

    def __init__(self, least: int, most: int) -> None:
        self._lengths = range(most, least - 1, -1)
        self._after: dict[int, int] = {}  # hash of a run -> place of the token behind it
        self._num_indexed = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """tokens: the text as it is now; what was indexed is its beginning."""
        after = self._after
        for place in range(self._num_indexed, len(tokens)):
            for length in self._lengths:
                if length <= place:
                    after[hash(tuple(tokens[place - length : place]))] = place
        self._num_indexed = len(tokens)

    def find(self, text: Sequence[int], tail: Sequence[int]) -> int | None:
        """The place in `text`, which is what was indexed, behind the longest run that ends `tail`."""
        for length in self._lengths:
            if length <= len(tail):
                run = tuple(tail[-length:])
                place = self._after.get(hash(run))
                if place is not None and tuple(text[place - length : place]) == run:
                    return place
        return None


class NgramDrafter:
    """Implements Drafter. least, most: tokens of a run that has to occur again, prompt_lookup_min and _max."""

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._indices: dict[int, NgramIndex] = {}

    def propose(self, request: Request, limit: int) -> list[int]:
        index = self._indices.get(request.request_id)
        if index is None:
            index = self._indices[request.request_id] = NgramIndex(self._least, self._most)
        tokens = request.tokens
        index.extend(tokens)
        place = index.find(tokens, tokens[-self._most :])
        if place is None:
            return []
        period = len(tokens) - place  # a text that repeats itself goes on doing so
        return [tokens[place + at % period] for at in range(limit)]

    def observe(self, request: Request, num_accepted: int) -> None:
        """It remembers nothing but the text."""

    def forget(self, request: Request) -> None:
        self._indices.pop(request.request_id, None)
