"""How far what is looked up is right, wherever drafts are looked up: what was found for a request is compared with what
then came, whether it was verified or not. No torch here."""

from __future__ import annotations

from engine.request import Request, Status
from engine.speculation.rights import Rights

RECENT_LOOK = 1 / 16  # of one


class Looks:
    """rights: what they tell. Each look is over when as many tokens have come as a request may have drafts."""

    def __init__(self, rights: Rights) -> None:
        self._rights, self._most = rights, len(rights.own)
        self._num = 0
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
        self._num += 1
        weight = max(RECENT_LOOK, 1 / (1 + self._num))
        self._rights.change([right + weight * ((place < num) - right) for place, right in enumerate(self._rights.own)])
        return True

    def begin(self, request: Request, found: list[int]) -> None:
        self._pending[request.request_id] = len(request.tokens), found

    def forget(self, request: Request) -> None:
        self._pending.pop(request.request_id, None)


def is_answering(request: Request) -> bool:
    """It has tokens of its own."""
    return request.status is Status.RUNNING and len(request.tokens) > request.prompt_len
