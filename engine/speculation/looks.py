"""How far what is looked up is right, wherever drafts are looked up: what was found for a request is compared with what
then came, whether it was verified or not. No torch here."""

from __future__ import annotations

from collections.abc import Sequence

from engine.request import Request, Status
from engine.speculation.rights import Rights

RECENT_LOOK, RECENT_OF_ONE = 1 / 16, 1 / 4  # of a look: of all requests; of its own
WORTH = 0.15  # of a place's drafts of a request: with fewer right none is verified


class Looks:
    """rights: what they tell. Each look is over when as many tokens have come as a request may have drafts."""

    def __init__(self, rights: Rights) -> None:
        self._rights, self._most = rights, len(rights.own)
        self._first = list(rights.own)
        self._num = 0
        # By request: looks that found something, how far they were right, and drafts that are worth it.
        self._of_one: dict[int, tuple[int, list[float], int]] = {}
        self._pending: dict[int, tuple[int, list[int]]] = {}  # by request: tokens that were known, and what was found

    def over(self, request: Request) -> bool:
        """Whether there is none under way for that request; what has come of it is counted."""
        pending = self._pending.get(request.request_id)
        if pending is None:
            return True
        begin, found = pending
        came = request.tokens[begin : begin + self._most]
        if len(came) < self._most:
            return False
        del self._pending[request.request_id]
        num = 0
        while num < len(found) and found[num] == came[num]:
            num += 1
        verified = min(num, self.limit(request))
        self._num += 1
        self._rights.change(_mean(self._rights.own, verified, max(RECENT_LOOK, 1 / (1 + self._num))))
        if found:
            count, right, _ = self._of_one.get(request.request_id, (0, self._first, 0))
            count += 1
            weight, known = max(RECENT_OF_ONE, 1 / (1 + count)), len(found)
            right = [*_mean(right[:known], num, weight), *right[known:]]
            self._of_one[request.request_id] = count, right, sum(part >= WORTH for part in right)
        return True

    def limit(self, request: Request) -> int:
        """So many drafts of that request, at most, are worth to be verified, by its looks that found something."""
        known = self._of_one.get(request.request_id)
        return self._most if known is None else known[2]

    def begin(self, request: Request, found: list[int]) -> None:
        self._pending[request.request_id] = len(request.tokens), found

    def forget(self, request: Request) -> None:
        self._pending.pop(request.request_id, None)
        self._of_one.pop(request.request_id, None)


def _mean(right: Sequence[float], num: int, weight: float) -> list[float]:
    """With one more of which so many were right."""
    return [part + weight * ((place < num) - part) for place, part in enumerate(right)]


def is_answering(request: Request) -> bool:
    """It has tokens of its own."""
    return request.status is Status.RUNNING and len(request.tokens) > request.prompt_len
