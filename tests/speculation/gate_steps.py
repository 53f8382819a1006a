"""A gate with times that a test gives it, and steps that take as long as a table says, on a clock of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from cache.manager import Holding
from engine.agreement import StepPlan
from engine.request import Request
from engine.schedule import NewRow, Schedule
from engine.speculation.gate import Gate
from engine.speculation.model_drafts import ModelDrafts
from engine.speculation.speculation import Speculation
from engine.speculation.times import StepTimes, Usual
from engine.speculation.words import DECODES
from ep.recorder import Kind
from front.messages import AddRequest
from front.params import SamplingParams


def expected_tokens(acceptance: Sequence[float], depth: int) -> float:
    """Of a sequence and step with so many drafts. acceptance: of each place, if all before it were right."""
    total = reached = 1.0
    for right in acceptance[:depth]:
        reached *= right
        total += reached
    return total


def waiting(speculation: Speculation) -> None:
    """A request that may have drafts."""
    message = AddRequest(request_id=1, token_ids=[1, 2], prompt_len=2, params=SamplingParams(max_tokens=9), seed=0)
    speculation.takes(Request(message, (0.0,), 64, Holding()))


def measured(seconds: float) -> Usual:
    usual = Usual()
    for _ in range(4):
        usual.add(seconds)
    return usual


def filled(
    steps: dict[int, float], drafting: dict[tuple[int, int], float], usual: Callable[[float], Usual] = measured
) -> StepTimes:
    times = StepTimes()
    without = {(size, 0): seconds for size, seconds in steps.items()}
    times.usuals = {key: usual(seconds) for key, seconds in (without | drafting).items()}
    return times


def practised(num: int, seconds: list[float]) -> StepTimes:
    """Of steps of so many sequences, by what they draft."""
    return filled({num: seconds[0]}, {(num, depth): seconds[depth] for depth in range(1, len(seconds))}, Usual)


def gate_of(times: StepTimes, acceptance: list[float]) -> Gate:
    speculation = Speculation(ModelDrafts(), len(acceptance), 64)
    speculation._acceptance = acceptance
    waiting(speculation)
    gate = Gate(speculation, adaptive=True)
    gate.meter.times = times
    return gate


def of_rank(gate: Gate, *words: int) -> tuple[int, ...]:
    """What another rank says whose drafts are right as often as this one's."""
    return (*words, *gate._speculation.rights.words)


def idle(gate: Gate) -> tuple[int, ...]:
    return of_rank(gate, 0, 0, 1, DECODES, 0)


def decodes(num: int, warm: bool = True) -> Schedule:
    return Schedule(0, rows=list(range(num)), counts=[1] * num, warm=[] if warm else [False] * num)


class Paces:
    """Factors of what steps take: for 5 to 40 of them the same, by chance, and each a little more or less."""

    def __init__(self, random: Random, spread: float) -> None:
        self.random, self.spread, self.left, self.pace = random, spread, 0, 1.0

    def next(self) -> float:
        if not self.left:
            self.left, self.pace = self.random.randint(5, 40), self.random.lognormvariate(0, self.spread)
        self.left -= 1
        return self.pace * self.random.uniform(0.9, 1.1)


@dataclass
class Steps:
    """Requests, `num` of them at a time, of `length` tokens each, whose steps take as long as a table says by what they
    draft, and bring what may be expected. A request that was in a step without drafts has none any more."""

    gate: Gate
    num: int
    seconds: list[float]  # of a step by what it drafts
    length: float = 1e9
    prompt: float = 0.0  # seconds of a step with prompts, and what drafts of them take
    prompt_drafts: float = 0.0
    noise: Callable[[], float] = lambda: 1.0
    other: Gate | None = None  # another rank's: requests alternate between them
    at: float = 0.0
    step: int = 0
    drafts: int = 0
    warm: bool = True
    done: float = 0.0  # tokens of each request that runs
    tokens: float = 0.0
    accepted: float = 0.0  # that are not counted yet

    def go(self, count: int) -> list[int]:
        """What is drafted in each of so many steps."""
        self.gate.meter.clock = lambda: self.at
        if self.other is not None:
            self.other.meter.clock = self.gate.meter.clock
        return [self._one() for _ in range(count)]

    def _one(self) -> int:
        rows, begins = list(range(self.num)), self.prompt > 0 and not self.done
        if begins:
            self.warm, self.drafts = True, 0
        counts = [9 if begins else 1 + self.drafts] * self.num
        drafts = [[0] * self.drafts] * self.num if self.drafts else []
        new = [NewRow(row, row, [1], 1, SamplingParams(), 0, ()) for row in rows] if begins else []
        now = Schedule(self.step, [], new, rows=rows, counts=counts, drafts=drafts, warm=[] if self.warm else [False])
        words = self.gate.propose(now)
        plan = StepPlan(self.step, True, False, (sum(counts), 0), (9, 9))
        said = [words, idle(self.gate)] if self.other is None else [words, self.other.propose(Schedule(self.step))]
        hook = self.gate.join(plan, said)
        if self.other is not None:
            self.other.join(plan, said)
        if hook is not None:
            hook.begin(now)
        depth = now.draft_depth if self.warm else 0
        if begins:
            self.at += self.prompt * self.noise()
            if hook is not None and depth:
                hook.ended(Kind.SAMPLING, self.num)
                self.at += self.prompt_drafts * self.noise()
                hook.ended(Kind.DRAFTING, self.num)
        else:
            self.at += self.seconds[depth] * self.noise()
        made = expected_tokens(self.gate._speculation.acceptance, self.drafts)
        self.tokens += self.num * made
        self.accepted += self.num * (made - 1)
        self.gate._speculation.num_accepted_tokens += int(self.accepted)
        self.accepted %= 1.0
        self.warm, self.done, self.step = self.warm and depth > 0, self.done + made, self.step + 1
        self.drafts = min(self.gate._speculation.depth, depth)
        if self.done >= self.length:
            self.gate._speculation.usual_output, self.done = self.length, 0.0
            self.gate, self.other = (self.gate, None) if self.other is None else (self.other, self.gate)
        return depth

    def fixed(self, depth: int) -> float:
        """Tokens per second with always so many drafts."""
        made = expected_tokens(self.gate._speculation.acceptance, depth)
        steps = self.seconds[depth] * (self.length - 1) / made
        return self.num * self.length / (self.prompt + bool(depth) * self.prompt_drafts + steps)
