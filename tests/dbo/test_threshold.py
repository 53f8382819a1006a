"""From measured times to a crossover, from that to wishes, and from wishes to what all do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dbo.threshold import MARGIN, NEVER, Crossover, Sample, Threshold, agree, between, search

SIZES = [16, 32, 64, 128, 256, 512, 1024, 2048]


def run(sizes: Sequence[int], measure: Callable[[int], Sample | None]) -> tuple[int, list[int]]:
    """The crossover, and what was measured for it."""
    searching, asked = search(sizes), list[int]()
    try:
        asked.append(next(searching))
        while True:
            asked.append(searching.send(measure(asked[-1])))
    except StopIteration as done:
        return done.value, asked


def network(fixed: float, per_token: float, extra: float) -> Callable[[int], Sample]:
    """Exchanges take per_token, arithmetic takes 1 per token, and `fixed` for each part of a step; a split hides half of the exchange, and
    costs `extra` more."""

    def sample(tokens: int) -> Sample:
        exchange = per_token * tokens
        whole = fixed + tokens + exchange
        return Sample(tokens, exchange, whole, whole - exchange / 2 + fixed + extra * tokens)

    return sample


@given(st.floats(0, 1000), st.floats(0, 3), st.floats(0, 0.5))
@example(2.5625, 1.470703125, 0.45175752283182113)  # at 32 tokens it nearly pays
@settings(max_examples=200, deadline=None)
def test_the_crossover_divides_the_sizes(fixed: float, per_token: float, extra: float) -> None:
    sample = network(fixed, per_token, extra)
    crossover, asked = run(SIZES, sample)
    assert len(asked) <= 4
    for size in SIZES:
        one = sample(size)
        if size >= crossover:
            assert one.pays
        elif one.exchange > one.whole * MARGIN:
            assert not one.pays
    if crossover == NEVER:
        assert not any(sample(size).pays for size in asked)


def test_a_split_that_only_seems_to_pay() -> None:
    """Nothing is waited for: what was saved was something else."""
    assert run(SIZES, lambda tokens: Sample(tokens, 0.01, 1.0, 0.5)) == (NEVER, [256])
    assert run(SIZES, lambda tokens: Sample(tokens, 0.06, 1.0, 0.5)) == (NEVER, [256, 1024, 2048])


def test_what_cannot_be_measured_does_not_pay() -> None:
    assert run(SIZES, lambda _: None) == (NEVER, [256])
    assert run(SIZES, lambda tokens: None if tokens > 256 else Sample(tokens, 0.5, 1.0, 1.0)) == (NEVER, [256, 1024])
    assert run(SIZES, lambda tokens: None if tokens < 256 else Sample(tokens, 0.5, 1.0, 0.6)) == (256, [256, 64])
    assert run([], lambda _: None) == (NEVER, [])
    assert run([5], lambda tokens: Sample(tokens, 0.5, 1.0, 0.6)) == (5, [5])


def test_between_two_sizes_the_crossover_is_where_enough_is_saved() -> None:
    worse = Sample(100, 0.5, 1.0, 1.0 - MARGIN + 0.1)
    better = Sample(200, 0.5, 1.0, 1.0 - MARGIN - 0.1)
    assert between(worse, better) == 150


def test_a_gate_does_not_go_to_and_fro() -> None:
    threshold = Threshold(2, Crossover(100, 200), slack=0.1)
    decodes = [threshold.propose(tokens, False) for tokens in (99, 100, 95, 90, 89, 95, 99, 100)]
    assert decodes == [1, 2, 2, 2, 1, 1, 1, 2]
    assert [threshold.propose(tokens, True) for tokens in (199, 200, 180, 179, 199)] == [1, 2, 2, 1, 1], (
        "each kind for itself"
    )
    exact = Threshold(3, Crossover(100, NEVER))
    assert [exact.propose(tokens, False) for tokens in (100, 99)] == [3, 1]
    assert exact.propose(1 << 20, True) == 1


@pytest.mark.parametrize(
    ("tokens", "wishes", "parts"),
    [
        ([500, 10], [2, 1], 2),
        ([500, 600], [2, 1], 1),
        ([300, 300], [1, 2], 2),
        ([0, 0], [1, 1], 1),
        ([100, 0, 0, 0], [3, 1, 1, 1], 3),
        ([10, 10], [2, 3], 3),
    ],
)
def test_who_has_most_of_the_tokens_decides(tokens: list[int], wishes: list[int], parts: int) -> None:
    assert agree(tokens, wishes) == parts
