"""Weights that follow others while a server runs: a store for each version, held by the first process of a machine.

A rank says that it uses a version by a shared lock on one byte of its file (`Store.use`), which the kernel takes back
with the process. It maps the next one when all its parts are full, between two steps, and closes the one before; a
store that no process uses, and that is not the newest full one, is freed. Nothing asks for a new version yet
(docs/memory.md).
"""

from __future__ import annotations

import os

from store.memory import complete_key, in_use, make_store


class Versions:
    """Numbered from 1 on, as they were added."""

    def __init__(self, name: str, file: int, key: str) -> None:
        """file: the store that ranks start with, which this object holds from now on; name: of those that follow."""
        self._name = name
        self._held: dict[int, tuple[int, str]] = {1: (file, key)}
        self._last = 1

    @property
    def held(self) -> tuple[int, ...]:
        """The versions whose memory is held here."""
        return tuple(self._held)

    @property
    def newest_full(self) -> int:
        """What ranks are to use; 0: none is full yet."""
        return max((number for number, (file, key) in self._held.items() if complete_key(file) == key), default=0)

    def add(self, key: str) -> int:
        """An empty store for these weights, which ranks fill together as they filled the first one."""
        self._last += 1
        self._held[self._last] = make_store(f"{self._name}-{self._last}"), key
        return self._last

    def file(self, number: int) -> int:
        """Its descriptor in this process."""
        return self._held[number][0]

    def drop(self, number: int) -> None:
        """Give a version up that is not to be used after all; its memory goes with its last mapping."""
        os.close(self._held.pop(number)[0])

    def free(self) -> tuple[int, ...]:
        """Drop those that came before the newest full one and that no process uses; which they were."""
        newest = self.newest_full
        done = tuple(number for number, (file, _) in self._held.items() if number < newest and not in_use(file))
        for number in done:
            self.drop(number)
        return done

    def close(self) -> None:
        for number in self.held:
            self.drop(number)
