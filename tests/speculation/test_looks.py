"""What is seen of drafts that are looked up without verifying any, and how soon the gate does what follows from it."""

from __future__ import annotations

from random import Random

import pytest
from amounts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.manager import Holding
from engine.agreement import StepPlan
from engine.request import Request, Status
from engine.schedule import Schedule
from engine.speculation.drafter import num_new
from engine.speculation.gate import Gate
from engine.speculation.looks import FIRST_RIGHT, Looks
from engine.speculation.ngram import NgramDrafter
from engine.speculation.speculation import Speculation
from front.messages import AddRequest, SamplingParams

pytestmark = pytest.mark.speculation


def answering(number: int, tokens: list[int]) -> Request:
    """With a prompt of one token."""
    message = AddRequest(
        request_id=number, token_ids=tokens, prompt_len=1, params=SamplingParams(max_tokens=9999), seed=0
    )
    request = Request(message, (float(number),), 9999, Holding())
    request.status = Status.RUNNING
    return request


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=3), st.lists(st.integers(0, 1), min_size=3, max_size=3)))
)
def test_looks_tell_how_many_would_be_right(found_and_came: list[tuple[list[int], list[int]]]) -> None:
    looks, request = Looks(3), answering(1, [5, 5])
    assert looks.tokens(2) == 1 + FIRST_RIGHT + FIRST_RIGHT**2, "until it is known"
    right = []
    for found, came in found_and_came[:15]:
        assert looks.over(request)
        looks.begin(request, found)
        for token in came:
            assert not looks.over(request)
            request.tokens.append(token)
        right.append(num_new(came, found) - 1)
    assert looks.over(request)
    first = [FIRST_RIGHT, FIRST_RIGHT**2, FIRST_RIGHT**3]
    for depth in range(4):
        expected = [sum(num > place for num in right) + first[place] for place in range(depth)]
        assert looks.tokens(depth) == pytest.approx(1 + sum(expected) / (1 + len(right)))
    looks.begin(request, [1])
    looks.forget(request)
    assert looks.over(request), "another one with its number"


def fresh(random: Random, count: int) -> list[int]:
    return [random.randrange(10**6) for _ in range(count)]


def copying(random: Random, count: int, copied: float) -> list[int]:
    """Pieces of it are new, and some such a part copies of what came before."""
    text = fresh(random, 40)
    while len(text) < count:
        length, start = random.randint(5, 40), random.randrange(len(text) - 10)
        text += text[start : start + length] if random.random() < copied else fresh(random, length)
    return text


class Texts:
    """Requests that answer with texts that are given, one step after another on a clock of their own."""

    def __init__(self, num: int, draft: float, always: int | None = None) -> None:
        """draft: what each that is verified takes, of a step of one sequence without any. always: so many drafts."""
        self.speculation = Speculation(NgramDrafter(2, 3), 5, 64)
        self.gate = Gate(self.speculation, adaptive=always is None, clock=lambda: self.at)
        self.draft, self.always, self.at, self.step, self.pace = draft, always, 0.0, 0, 0.01
        self.requests = [answering(number, [7, 7]) for number in range(num)]
        assert all(map(self.speculation.takes, self.requests))

    def go(self, steps: int, texts: list[list[int]]) -> float:
        """Tokens per second. texts: of each; they take as many steps or more."""
        tokens, began = 0, self.at
        begin = [len(request.tokens) for request in self.requests]
        for _ in range(steps):
            if self.always is not None:
                self.speculation.depth = self.always
            drafts = [self.speculation.propose(request, 5) for request in self.requests]
            rows = list(range(len(drafts)))
            counts = [1 + len(some) for some in drafts]
            now = Schedule(self.step, rows=rows, counts=counts, drafts=drafts if any(drafts) else [])
            self.gate.join(StepPlan(self.step, True, False, (now.num_tokens,), (9,)), [self.gate.propose(now)])
            for request, some, text, first in zip(self.requests, drafts, texts, begin, strict=True):
                at = len(request.tokens) - first
                new = num_new(text[at : at + 1 + len(some)], some)
                request.tokens += text[at : at + new]
                request.length = len(request.tokens)
                tokens += new
                if some:
                    self.speculation.observe(request, len(some), new - 1)
            self.at += self.pace * (1 + self.draft * now.num_drafts / len(rows))
            self.step += 1
        return tokens / (self.at - began)


@settings(max_examples=examples(20), deadline=None)
@given(st.sampled_from([1, 8]), st.floats(0.0, 0.3), st.integers(0, 9))
def test_texts_that_change_are_followed(num: int, draft: float, seed: int) -> None:
    """From texts that do not repeat themselves to some that do, and back."""
    random, texts = Random(seed), Texts(num, draft)
    plain, best = num / 0.01, num * 6 / (0.01 * (1 + 5 * draft))
    texts.go(1500, [fresh(random, 9000) for _ in range(num)])
    assert texts.go(1000, [fresh(random, 6000) for _ in range(num)]) > 0.98 * plain
    again = [fresh(random, 9) * 300 for _ in range(num)]
    texts.go(150, again)
    assert texts.go(200, again) > 0.7 * best
    texts.go(150, [fresh(random, 900) for _ in range(num)])
    assert texts.go(1000, [fresh(random, 6000) for _ in range(num)]) > 0.95 * plain


@settings(max_examples=examples(20), deadline=None)
@given(st.sampled_from([1, 8]), st.floats(0.0, 0.4), st.floats(0.0, 0.9), st.integers(0, 9))
def test_texts_of_which_a_part_is_copied(num: int, draft: float, copied: float, seed: int) -> None:
    """Beside each fixed number of drafts."""
    random = Random(seed)
    texts = [copying(random, 18000, copied) for _ in range(num)]
    rates = [Texts(num, draft, always=depth).go(3000, texts) for depth in range(6)]
    assert Texts(num, draft).go(3000, texts) > 0.9 * max(rates)


@pytest.mark.parametrize("num", [1, 8])
def test_a_machine_that_was_slow_when_no_drafts_were_measured_does_not_mislead(num: int) -> None:
    random = Random(1)
    texts = Texts(num, draft=0.6)
    texts.go(32, [copying(random, 400, 0.3) for _ in range(num)])
    texts.pace = 0.03
    texts.go(40, [copying(random, 400, 0.3) for _ in range(num)])
    texts.pace = 0.01
    texts.go(600, [copying(random, 6000, 0.3) for _ in range(num)])
    given = [copying(random, 18000, 0.3) for _ in range(num)]
    rates = [Texts(num, 0.6, always=depth).go(2000, given) for depth in range(6)]
    assert texts.go(2000, given) > 0.9 * max(rates)
