"""How much is run: everything in `make test-all`, a fifth of what is drawn at random and some of the products in `make test`
(tests/conftest.py)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings

WHOLE = 100  # Hypothesis' own number of examples: the profile of `make test` has fewer
LEAST = 4


def examples(number: int) -> int:
    """Of the examples that a property gets in `make test-all`, those that it gets now."""
    return max(min(number, LEAST), number * settings.default.max_examples // WHOLE)


def combined(*choices: Sequence[Any], names: Sequence[Sequence[str]] = ()) -> list[Any]:
    """Every combination, as parameters of a test. `make test` has those in which no more than one choice is another than
    its first, and as many in which all are others, each value once; the rest is slow. names: of the values, in test ids."""
    every: list[Any] = []
    for places in itertools.product(*(range(len(choice)) for choice in choices)):
        others = sum(place > 0 for place in places)
        turn = max(places)
        together = all(place == turn % len(choice) for place, choice in zip(places, choices, strict=True))
        values = [choice[place] for place, choice in zip(places, choices, strict=True)]
        labels = [str(names[axis][place]) if names else str(values[axis]) for axis, place in enumerate(places)]
        marks = [] if others <= 1 or together else [pytest.mark.slow]
        every.append(pytest.param(*values, id="-".join(labels), marks=marks))
    return every
