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


class Texts:
    """Requests that answer with texts that repeat themselves or not, one step after another on a clock of their own."""

    def __init__(self, num: int, draft: float, seed: int) -> None:
        """draft: what each that is verified takes, of a step of one sequence without any."""
        self.speculation = Speculation(NgramDrafter(2, 3), 5, 64)
        self.gate = Gate(self.speculation, adaptive=True, clock=lambda: self.at)
        self.random, self.draft, self.at, self.step = Random(seed), draft, 0.0, 0
        self.requests = [answering(number, [7, 7]) for number in range(num)]
        assert all(map(self.speculation.takes, self.requests))

    def go(self, steps: int, period: int | None) -> float:
        """Tokens per second. period: after so many tokens the texts repeat themselves."""
        tokens, began = 0, self.at
        for _ in range(steps):
            drafts = [self.speculation.propose(request, 5) for request in self.requests]
            counts = [1 + len(some) for some in drafts]
            rows = list(range(len(counts)))
            now = Schedule(self.step, rows=rows, counts=counts, drafts=drafts if any(drafts) else [])
            self.gate.join(StepPlan(self.step, True, False, (now.num_tokens,), (9,)), [self.gate.propose(now)])
            for request, some in zip(self.requests, drafts, strict=True):
                came = []
                for _ in range(1 + len(some)):
                    came.append(self.random.randrange(10**6) if period is None else (request.tokens + came)[-period])
                new = num_new(came, some)
                request.tokens += came[:new]
                request.length = len(request.tokens)
                tokens += new
                if some:
                    self.speculation.observe(request, len(some), new - 1)
            self.at += 0.01 * (1 + self.draft * now.num_drafts / len(rows))
            self.step += 1
        return tokens / (self.at - began)


@settings(max_examples=examples(20), deadline=None)
@given(st.sampled_from([1, 8]), st.floats(0.0, 0.3), st.integers(0, 9))
def test_texts_that_change_are_followed(num: int, draft: float, seed: int) -> None:
    """From texts that do not repeat themselves to some that do, and back."""
    texts = Texts(num, draft, seed)
    texts.go(1500, None)
    plain, best = num / 0.01, num * 6 / (0.01 * (1 + 5 * draft))
    assert texts.go(1000, None) > 0.98 * plain
    texts.go(80, 9)
    assert texts.go(200, 9) > 0.75 * best
    texts.go(150, None)
    assert texts.go(1000, None) > 0.95 * plain
