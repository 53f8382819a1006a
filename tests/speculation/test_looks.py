"""What is seen of drafts that are looked up without verifying any, and how soon the gate does what follows from it."""

from __future__ import annotations

from random import Random

import pytest
from amounts import examples
from gate_texts import Texts, answering, copying, fresh, misleading
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.speculation.drafter import num_new
from engine.speculation.looks import Looks
from engine.speculation.rights import FIRST_RIGHT, Rights
from engine.speculation.words import Words

pytestmark = pytest.mark.speculation


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=3), st.lists(st.integers(0, 1), min_size=3, max_size=3)))
)
def test_looks_tell_how_many_would_be_right(found_and_came: list[tuple[list[int], list[int]]]) -> None:
    rights = Rights(3)
    looks, request = Looks(rights), answering(1, [5, 5])
    assert rights.tokens(2) == 1 + FIRST_RIGHT + FIRST_RIGHT**2, "until it is known"
    right = []
    for found, came in found_and_came[:15]:
        assert looks.over(request)
        looks.begin(request, found)
        for token in came:
            assert not looks.over(request)
            request.tokens.append(token)
        right.append(min(num_new(came, found) - 1, looks.limit(request)))  # no more are verified
    assert looks.over(request)
    first = [FIRST_RIGHT, FIRST_RIGHT**2, FIRST_RIGHT**3]
    for depth in range(4):
        expected = [sum(num > place for num in right) + first[place] for place in range(depth)]
        assert rights.tokens(depth) == pytest.approx(1 + sum(expected) / (1 + len(right)))
    looks.begin(request, [1])
    looks.forget(request)
    assert looks.over(request), "another one with its number"


@given(
    st.lists(st.tuples(st.integers(0, 9), st.lists(st.floats(0, 1), min_size=9, max_size=9)), min_size=1, max_size=4)
)
def test_ranks_know_the_mean_by_sequences(ranks: list[tuple[int, list[float]]]) -> None:
    """Within what a byte tells; a rank that is left alone knows its own."""
    all_rights = [Rights(9) for _ in ranks]
    for rights, (_, own) in zip(all_rights, ranks, strict=True):
        rights.change(own)
    words = [Words(0, 0, 1 + num, 0, 0) for num, _ in ranks]
    said = [(*some, *rights.words) for some, rights in zip(words, all_rights, strict=True)]
    num = sum(num for num, _ in ranks)
    for rights, (_, own) in zip(all_rights, ranks, strict=True):
        rights.hear(words, said)
        if num:
            mean = [sum(of * right[place] for of, right in ranks) / num for place in range(9)]
            assert rights.tokens(9) == pytest.approx(1 + sum(mean), abs=9 / 255)
        rights.hear(words[:1], said[:1])
        assert rights.tokens(9) == 1 + sum(own)


@settings(max_examples=examples(20), deadline=None)
@given(st.sampled_from([1, 8]), st.floats(0.0, 0.3), st.integers(0, 9))
def test_texts_that_change_are_followed(num: int, draft: float, seed: int) -> None:
    """From texts that do not repeat themselves to some that do, and back."""
    random, texts = Random(seed), Texts([num], draft)
    plain, best = num / 0.01, num * 6 / (0.01 * (1 + 5 * draft))
    texts.go(1500, [[fresh(random, 9000) for _ in range(num)]])
    assert texts.go(1000, [[fresh(random, 6000) for _ in range(num)]]) > 0.98 * plain
    again = [fresh(random, 9) * 300 for _ in range(num)]
    texts.go(150, [again])
    assert texts.go(200, [again]) > 0.7 * best
    texts.go(150, [[fresh(random, 900) for _ in range(num)]])
    assert texts.go(1000, [[fresh(random, 6000) for _ in range(num)]]) > 0.95 * plain


@settings(max_examples=examples(20), deadline=None)
@given(st.sampled_from([1, 8]), st.floats(0.0, 0.4), st.floats(0.0, 0.9), st.integers(0, 9))
def test_texts_of_which_a_part_is_copied(num: int, draft: float, copied: float, seed: int) -> None:
    """Beside each fixed number of drafts."""
    random = Random(seed)
    texts = [copying(random, 18000, copied) for _ in range(num)]
    rates = [Texts([num], draft, always=depth).go(3000, [texts]) for depth in range(6)]
    assert Texts([num], draft).go(3000, [texts]) > 0.9 * max(rates)


@pytest.mark.parametrize("num", [1, 8])
def test_a_machine_that_was_slow_when_no_drafts_were_measured_does_not_mislead(num: int) -> None:
    random = Random(1)
    texts = Texts([num], 0.6)
    texts.go(32, [[copying(random, 400, 0.3) for _ in range(num)]])
    texts.pace = 0.03
    texts.go(40, [[copying(random, 400, 0.3) for _ in range(num)]])
    texts.pace = 0.01
    texts.go(600, [[copying(random, 6000, 0.3) for _ in range(num)]])
    given = [copying(random, 18000, 0.3) for _ in range(num)]
    rates = [Texts([num], 0.6, always=depth).go(2000, [given]) for depth in range(6)]
    assert texts.go(2000, [given]) > 0.9 * max(rates)


@settings(max_examples=examples(10), deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([1, 8]), st.sampled_from([0.0, 0.5, 0.9])), min_size=2, max_size=4),
    st.floats(0.0, 0.4),
    st.integers(0, 9),
)
def test_ranks_whose_texts_differ(ranks: list[tuple[int, float]], draft: float, seed: int) -> None:
    """Whichever leads, and whether it has most sequences or as many as others. Beside each fixed number of drafts."""
    random, nums = Random(seed), [num for num, _ in ranks]
    given = [[copying(random, 9000, copied) for _ in range(num)] for num, copied in ranks]
    rates = [Texts(nums, draft, always=depth).go(1500, given) for depth in range(6)]
    assert Texts(nums, draft).go(1500, given) > 0.85 * max(rates)


@settings(max_examples=examples(10), deadline=None)
@given(st.integers(1, 3), st.integers(2, 6), st.floats(0.05, 0.4), st.integers(0, 9))
def test_texts_that_mislead_do_not_take_drafts_from_others(copies: int, others: int, draft: float, seed: int) -> None:
    """Beside each fixed number of drafts of those that copy alone."""
    random = Random(seed)
    copying_texts = [copying(random, 9000, 0.9) for _ in range(copies)]
    alone = [Texts([copies], draft * copies / (copies + others), always=depth) for depth in range(6)]
    rates = [texts.go(1500, [copying_texts]) + others / (texts.at / 1500) for texts in alone]
    texts = Texts([copies + others], draft)
    assert texts.go(1500, [copying_texts + [misleading(random, 9000) for _ in range(others)]]) > 0.85 * max(rates)


def test_what_is_always_wrong_is_verified_a_few_times_only() -> None:
    random, texts = Random(3), Texts([4], draft=0.1, always=5)
    texts.go(1000, [[misleading(random, 2000) for _ in range(4)]])
    [speculation] = texts.speculations
    assert speculation.num_drafts < 0.06 * 4 * 1000
    again = [fresh(random, 9) * 40 for _ in range(4)]
    assert texts.go(100, [again]) > 0.6 * 4 * 6 / (0.01 * 1.5), "and looked up all the same"
