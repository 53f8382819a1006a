"""How far drafts are right, by their place: of one rank's requests, and of all ranks'."""

from __future__ import annotations

from collections.abc import Sequence

from engine.speculation.words import NUM_FIELDS, Words

FIRST_RIGHT = 0.8  # of each place, if all before it were right, until it is known
PLACES = 7  # that one word of a record tells of, in a byte each


class Rights:
    """own: of this rank's requests, lately, the part of the drafts that were right with all before them; most: places.
    The record tells it to the others, so that all know the mean by sequences, whichever rank decides."""

    def __init__(self, most: int) -> None:
        self.own = [FIRST_RIGHT ** (place + 1) for place in range(most)]
        self._of_all = self.own
        self._told: list[tuple[int, Sequence[int]]] = []  # sequences and words of every rank
        self._words: tuple[int, ...] | None = None

    def tokens(self, depth: int) -> float:
        """That a step with so many drafts probably brings to a sequence."""
        return 1.0 + sum(self._of_all[:depth])

    def change(self, own: Sequence[float]) -> None:
        self.own[:] = own
        self._words = None

    @property
    def words(self) -> tuple[int, ...]:
        if self._words is None:
            parts = bytes(round(255 * right) for right in self.own)
            firsts = range(0, len(parts), PLACES)
            self._words = tuple(int.from_bytes(parts[first : first + PLACES], "little") for first in firsts)
        return self._words

    def hear(self, words: Sequence[Words], said: Sequence[Sequence[int]]) -> None:
        """said: all that the ranks have said of drafts, of which `words` are the first."""
        if len(said) == 1:
            self._of_all = self.own
            return
        told = [(some.num - 1, all_words[NUM_FIELDS:]) for some, all_words in zip(words, said, strict=True)]
        if told == self._told and self._of_all is not self.own:
            return
        self._told, num = told, sum(num for num, _ in told)
        bytes_of = [(num, b"".join(word.to_bytes(PLACES, "little") for word in rest)) for num, rest in told]
        if num:
            places = range(len(self.own))
            self._of_all = [sum(of * parts[place] for of, parts in bytes_of) / (255 * num) for place in places]
