"""How far what is looked up is right, wherever drafts are looked up: what was found for a request is compared with what
then came, whether it was verified or not. No torch here."""

from __future__ import annotations

from collections.abc import Sequence

from engine.request import Request, Status

FIRST_RIGHT = 0.8  # of each place, until it is known
RECENT_LOOK = 1 / 16  # of one
PLACES = 7  # whose parts one word of a record holds, as a byte each


class Looks:
    """most: drafts of a request. Each look is over when so many tokens have come. Of this rank's requests; tokens: of
    all ranks'."""

    def __init__(self, most: int) -> None:
        self._right = [FIRST_RIGHT ** (place + 1) for place in range(most)]  # looks of which so many came, lately
        self._right_of_all = self._right
        self._num = 0
        self._said: Sequence[tuple[int, Sequence[int]]] = ()
        self._words: tuple[int, ...] = ()
        self._pending: dict[int, tuple[int, list[int]]] = {}  # by request: tokens that were known, and what was found

    def tokens(self, depth: int) -> float:
        """That a step with so many drafts wanted would bring to a request, as far as looks tell."""
        return 1.0 + sum(self._right_of_all[:depth])

    @property
    def words(self) -> tuple[int, ...]:
        """Of a record: what this rank's requests tell."""
        if not self._words:
            parts = bytes(round(255 * right) for right in self._right)
            self._words = tuple(
                int.from_bytes(parts[at : at + PLACES], "little") for at in range(0, len(parts), PLACES)
            )
        return self._words

    def hear(self, said: Sequence[tuple[int, Sequence[int]]]) -> None:
        """The sequences and the words of every rank."""
        if said == self._said:
            return
        self._said, num, most = said, sum(num for num, _ in said), len(self._right)
        if num:
            ranks = [(num, b"".join(word.to_bytes(PLACES, "little") for word in words)) for num, words in said]
            self._right_of_all = [sum(of * parts[place] for of, parts in ranks) / (255 * num) for place in range(most)]

    def over(self, request: Request) -> bool:
        """Whether there is none under way for that request; what has come of it is counted."""
        pending = self._pending.get(request.request_id)
        if pending is None:
            return True
        begin, found = pending
        came = request.tokens[begin : begin + len(self._right)]
        if len(came) < len(self._right):
            return False
        del self._pending[request.request_id]
        num = 0
        while num < len(found) and found[num] == came[num]:
            num += 1
        self._num += 1
        weight = max(RECENT_LOOK, 1 / (1 + self._num))
        for place in range(len(self._right)):
            self._right[place] += weight * ((place < num) - self._right[place])
        self._words = ()
        return True

    def begin(self, request: Request, found: list[int]) -> None:
        self._pending[request.request_id] = len(request.tokens), found

    def forget(self, request: Request) -> None:
        self._pending.pop(request.request_id, None)


def is_answering(request: Request) -> bool:
    """It has tokens of its own."""
    return request.status is Status.RUNNING and len(request.tokens) > request.prompt_len
