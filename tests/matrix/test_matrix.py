"""Some pairs of the matrix; `python -m tests.matrix` runs all."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.matrix.features import FEATURES
from tests.matrix.pairs import Cell, References, cell, pairs
from tests.matrix.table import table

pytestmark = pytest.mark.deterministic
SAMPLE = random.Random(20261122).sample(pairs(), 16)


@pytest.fixture(scope="module")
def references() -> References:
    return References()


def check(pair: tuple[str, str], references: References) -> None:
    found = asyncio.run(cell(pair, references))
    assert found.identical, found


@pytest.mark.parametrize(
    "pair",
    [
        ("prefix cache", "preemption"),
        pytest.param(("logprobs", "a kill"), marks=pytest.mark.slow),
        ("MTP drafts", "2 ranks"),
    ],
    ids=" x ".join,
)
def test_a_few(pair: tuple[str, str], references: References) -> None:
    check(pair, references)


@pytest.mark.slow
@pytest.mark.parametrize("pair", SAMPLE, ids=" x ".join)
def test_a_sample(pair: tuple[str, str], references: References) -> None:
    check(pair, references)


def test_the_table_has_every_pair_once() -> None:
    done = [Cell(pair, (), (), 1.0) for pair in pairs()]
    done[3] = Cell(done[3].names, (1,), (), 1.0)
    lines = table(done).splitlines()
    assert len(lines) == 2 + len(FEATURES)
    assert sum(line.count(" = |") for line in lines) == len(done) - 1
    assert sum(line.count("**no**") for line in lines) == 1
    assert all(line.count("|") == lines[0].count("|") for line in lines)
