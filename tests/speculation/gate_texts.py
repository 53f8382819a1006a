"""Requests that answer with texts that are given, on ranks whose steps take as long as their drafts say, on one clock."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from cache.manager import Holding
from engine.agreement import StepPlan
from engine.request import Request, Status
from engine.schedule import Schedule
from engine.speculation.drafter import num_new
from engine.speculation.gate import Gate
from engine.speculation.ngram import NgramDrafter
from engine.speculation.speculation import Speculation
from front.messages import AddRequest
from front.params import SamplingParams


def answering(number: int, tokens: list[int]) -> Request:
    """With a prompt of one token."""
    message = AddRequest(
        request_id=number, token_ids=tokens, prompt_len=1, params=SamplingParams(max_tokens=9999), seed=0
    )
    request = Request(message, (float(number),), 9999, Holding())
    request.status = Status.RUNNING
    return request


def fresh(random: Random, count: int) -> list[int]:
    return [random.randrange(10**6) for _ in range(count)]


def copying(random: Random, count: int, copied: float) -> list[int]:
    """Pieces of it are new, and some such a part copies of what came before."""
    text = fresh(random, 40)
    while len(text) < count:
        length, start = random.randint(5, 40), random.randrange(len(text) - 10)
        text += text[start : start + length] if random.random() < copied else fresh(random, length)
    return text


def misleading(random: Random, count: int) -> list[int]:
    """Runs of two occur again, and what follows is another token."""
    return [random.randrange(40) for _ in range(count)]


class Texts:
    """The requests of the ranks, one step after another."""

    def __init__(self, nums: Sequence[int], draft: float, always: int | None = None) -> None:
        """nums: requests of each rank. draft: what a draft of each request of a rank takes, of a step without any.
        always: so many drafts."""
        self.draft, self.always, self.at, self.step, self.pace = draft, always, 0.0, 0, 0.01
        self.speculations = [Speculation(NgramDrafter(2, 3), 5, 64) for _ in nums]
        self.gates = [
            Gate(speculation, adaptive=always is None, clock=lambda: self.at) for speculation in self.speculations
        ]
        self.requests = [[answering(number, [7, 7]) for number in range(num)] for num in nums]
        for speculation, requests in zip(self.speculations, self.requests, strict=True):
            assert all(map(speculation.takes, requests))

    def go(self, steps: int, texts: Sequence[Sequence[list[int]]]) -> float:
        """Tokens per second of all ranks. texts: of each one's requests; they take as many steps or more."""
        tokens, began = 0, self.at
        firsts = [[len(request.tokens) for request in requests] for requests in self.requests]
        for _ in range(steps):
            steps_of_ranks = [
                self._schedule(speculation, requests)
                for speculation, requests in zip(self.speculations, self.requests, strict=True)
            ]
            plan = StepPlan(self.step, True, False, tuple(now.num_tokens for now in steps_of_ranks), (9,))
            said = [gate.propose(now) for gate, now in zip(self.gates, steps_of_ranks, strict=True)]
            for gate in self.gates:
                gate.join(plan, said)
            for of_rank in zip(self.speculations, steps_of_ranks, self.requests, texts, firsts, strict=True):
                tokens += self._take(*of_rank)
            drafts = max(now.num_drafts / max(1, len(now.rows)) for now in steps_of_ranks)
            self.at += self.pace * (1 + self.draft * drafts)
            self.step += 1
        return tokens / (self.at - began)

    def _schedule(self, speculation: Speculation, requests: list[Request]) -> Schedule:
        if self.always is not None:
            speculation.depth = self.always
        drafts = [speculation.propose(request, 5) for request in requests]
        counts = [1 + len(some) for some in drafts]
        return Schedule(self.step, rows=list(range(len(drafts))), counts=counts, drafts=drafts if any(drafts) else [])

    def _take(
        self,
        speculation: Speculation,
        now: Schedule,
        requests: list[Request],
        texts: Sequence[list[int]],
        first: list[int],
    ) -> int:
        """How many tokens its requests have got."""
        tokens = 0
        drafts = now.drafts or [[] for _ in requests]
        for request, some, text, begin in zip(requests, drafts, texts, first, strict=True):
            at = len(request.tokens) - begin
            new = num_new(text[at : at + 1 + len(some)], some)
            request.tokens += text[at : at + new]
            request.length = len(request.tokens)
            tokens += new
            if some:
                speculation.observe(request, len(some), new - 1)
        return tokens
