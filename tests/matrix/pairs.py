"""Every pair of features beside an engine without them."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from tests.matrix.features import FEATURES, exclude
from tests.matrix.runs import Result, run


@dataclass(frozen=True)
class Cell:
    """Of one pair. wrong: requests whose results differ. unseen: features that were not at work. losses: ranks that were
    lost beyond those that the features lose; below 0, one was not lost."""

    names: tuple[str, ...]
    wrong: tuple[int, ...]
    unseen: tuple[str, ...]
    seconds: float
    error: str = ""
    losses: int = 0

    @property
    def identical(self) -> bool:
        return not self.wrong and not self.unseen and not self.error and not self.losses


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
    features = [FEATURES[name] for name in names]
    try:
        result, seen = await run(features, expected.tokens, references.deterministic)
    except Exception as error:
        return Cell(names, (), (), time.monotonic() - began, f"{type(error).__name__}: {error}")
    unseen = tuple(name for name in names if not FEATURES[name].seen(seen))
    losses = seen.losses - sum(feature.losses for feature in features)
    return Cell(names, result.differing(expected), unseen, time.monotonic() - began, losses=losses)


def part(names: Sequence[tuple[str, ...]], deterministic: bool, quiet: bool) -> list[Cell]:
    """The cells of some pairs, each told when it is done; quiet: only those that are not identical."""
    references, done = References(deterministic), list[Cell]()
    for each in names:
        one = asyncio.run(cell(each, references))
        done.append(one)
        lost = f" lost {one.losses:+d}" if one.losses else ""
        verdict = "identical" if one.identical else f"WRONG {one.wrong} unseen {one.unseen}{lost} {one.error}"
        if quiet and one.identical:
            continue
        print(f"{' x '.join(one.names)}: {verdict}, {one.seconds:.1f} s", file=sys.stderr, flush=True)
    return done


def cells(
    names: Sequence[tuple[str, ...]], deterministic: bool = True, workers: int = 1, quiet: bool = False
) -> list[Cell]:
    """By some processes side by side; pairs that share their reference stay together."""
    ordered = sorted(names, key=lambda pair: tuple(name for name in pair if FEATURES[name].own))
    bounds = [len(ordered) * worker // workers for worker in range(workers + 1)]
    parts = [ordered[begin:end] for begin, end in itertools.pairwise(bounds)]
    if workers == 1:
        return part(ordered, deterministic, quiet)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        return [
            one
            for found in pool.map(part, parts, itertools.repeat(deterministic), itertools.repeat(quiet))
            for one in found
        ]
