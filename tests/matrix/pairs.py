"""Every pair of features beside an engine without them."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tests.matrix.features import FEATURES, exclude
from tests.matrix.runs import Result, run


@dataclass(frozen=True)
class Cell:
    """Of one pair. wrong: requests whose results differ. unseen: features that were not at work."""

    names: tuple[str, ...]
    wrong: tuple[int, ...]
    unseen: tuple[str, ...]
    seconds: float
    error: str = ""

    @property
    def identical(self) -> bool:
        return not self.wrong and not self.unseen and not self.error


def pairs(names: Iterable[str] = FEATURES) -> list[tuple[str, str]]:
    found = itertools.combinations(names, 2)
    return [(one, other) for one, other in found if not exclude(FEATURES[one], FEATURES[other])]


class References:
    """What an engine gives that has nothing but those features of a run that change results; each is run once."""

    def __init__(self, deterministic: bool = True) -> None:
        self.deterministic = deterministic
        self._known: dict[tuple[str, ...], Result] = {}

    async def of(self, names: Iterable[str]) -> Result:
        own = tuple(name for name in names if FEATURES[name].own)
        if own not in self._known:
            self._known[own], _ = await run([FEATURES[name] for name in own], deterministic=self.deterministic)
        return self._known[own]


async def cell(names: tuple[str, ...], references: References) -> Cell:
    expected = await references.of(names)
    began = time.monotonic()
    try:
        result, seen = await run([FEATURES[name] for name in names], expected.tokens, references.deterministic)
    except Exception as error:
        return Cell(names, (), (), time.monotonic() - began, f"{type(error).__name__}: {error}")
    unseen = tuple(name for name, at_work in zip(names, seen, strict=True) if not at_work)
    return Cell(names, result.differing(expected), unseen, time.monotonic() - began)


def cells(names: Iterable[tuple[str, ...]], deterministic: bool = True) -> Iterator[Cell]:
    references = References(deterministic)
    for each in names:
        yield asyncio.run(cell(each, references))
