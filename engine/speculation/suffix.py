"""Drafts from all that was said lately: the way of suffix decoding (arXiv 2411.04975). No torch here.

Each output of the last requests, and each prompt with its output so far, is a *text*. Texts are indexed by the hashes
of their runs, in steps of one token: a run of `depth` tokens and all shorter ones down to `least` each know the places
at which they were lately followed by another token. A draft is what followed the longest run that ends the request's
text, taken from its own text and from the others', token by token the one that followed most often, for as long as it
is likely enough. Memory is bounded by the number of texts and of their tokens; the oldest text goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from engine.request import Request

LEAST = 2  # tokens of a run
PLACES = 4  # at which a run was followed, of each text
MAX_TOKENS = 1 << 20  # of the texts of other requests: each costs an entry for every length of a run
LENGTHS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


class Text:
    """Tokens, and where each of their runs was lately followed by another token."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.tokens: list[int] = []
        self.after: dict[int, tuple[int, ...]] = {}
        self._lengths = lengths

    def extend(self, tokens: list[int]) -> None:
        """tokens: the text as it is now; what it had is its beginning."""
        known = len(self.tokens)
        self.tokens += tokens[known:]
        for place in range(known, len(tokens)):
            for length in self._lengths:
                if length > place:
                    break
                run = hash(tuple(tokens[place - length : place]))
                self.after[run] = (place, *self.after.get(run, ())[: PLACES - 1])

    def places(self, run: tuple[int, ...], key: int) -> Iterator[int]:
        for place in self.after.get(key, ()):
            if tuple(self.tokens[place - len(run) : place]) == run:
                yield place


class SuffixDrafter:
    """Implements Drafter. The names are those of vLLM's suffix_decoding_*: depth, the longest run that is looked for;
    cached_requests, texts that are kept of requests that have ended; spec_factor, drafts for each token of the run that
    was found; token_prob, what a draft and all before it have to reach together, as part of what followed."""

    def __init__(self, depth: int, cached_requests: int, spec_factor: float, token_prob: float) -> None:
        self._lengths = tuple(length for length in LENGTHS if length <= depth)
        self._most_texts, self._factor, self._least_part = cached_requests, spec_factor, token_prob
        self._own: dict[int, Text] = {}
        self._ended: OrderedDict[int, Text] = OrderedDict()
        self._num_kept = 0  # tokens of those
        self._next = 0
        self._where: dict[int, list[int]] = {}  # run -> the texts of requests that have ended, the newest last

    def propose(self, request: Request, limit: int) -> list[int]:
        text = self._own.get(request.request_id)
        if text is None:
            text = self._own[request.request_id] = Text(self._lengths)
        text.extend(request.tokens)
        for length in reversed(self._lengths):
            run = tuple(request.tokens[-length:])
            if len(run) < length:
                continue
            key = hash(run)
            found = [(text, place) for place in text.places(run, key)]
            for ended in self._where.get(key, ()):
                found += [(self._ended[ended], place) for place in self._ended[ended].places(run, key)]
            if found:
                return self._follow(found, min(limit, int(length * self._factor) + 1))
        return []

    def observe(self, request: Request, num_accepted: int) -> None:
        """It remembers nothing but texts."""

    def forget(self, request: Request) -> None:
        text = self._own.pop(request.request_id, None)
        output = request.tokens[request.prompt_len :]
        if text is None or not output or not self._most_texts or len(output) > MAX_TOKENS:
            return
        kept = Text(self._lengths)
        kept.extend(output)
        self._ended[self._next] = kept
        for run in kept.after:
            self._where.setdefault(run, []).append(self._next)
            del self._where[run][:-PLACES]
        self._next += 1
        self._num_kept += len(output)
        while len(self._ended) > self._most_texts or self._num_kept > MAX_TOKENS:
            self._drop()

    def _follow(self, found: list[tuple[Text, int]], limit: int) -> list[int]:
        """Token by token what most of these places go on with."""
        drafts: list[int] = []
        likely = 1.0
        while len(drafts) < limit:
            counts: dict[int, int] = {}
            for text, place in found:
                if place < len(text.tokens):
                    counts[text.tokens[place]] = counts.get(text.tokens[place], 0) + 1
            if not counts:
                break
            token = max(counts, key=lambda one: counts[one])
            likely *= counts[token] / sum(counts.values())
            if likely < self._least_part:
                break
            drafts.append(token)
            found = [
                (text, place + 1) for text, place in found if place < len(text.tokens) and text.tokens[place] == token
            ]
        return drafts

    def _drop(self) -> None:
        number, text = self._ended.popitem(last=False)
        self._num_kept -= len(text.tokens)
        for run in text.after:
            texts = self._where.get(run)
            if texts is not None and number in texts:
                texts.remove(number)
                if not texts:
                    del self._where[run]
