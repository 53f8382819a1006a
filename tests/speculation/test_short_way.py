"""Where a step is like the last one the gate says what it has said: the same as where it thinks about each."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from amounts import examples
from gate_steps import waiting
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.agreement import StepPlan
from engine.hooks import StepHook
from engine.schedule import NewRow, Schedule
from engine.speculation.drafter import Drafter
from engine.speculation.gate import Gate
from engine.speculation.model_drafts import ModelDrafts
from engine.speculation.ngram import NgramDrafter
from engine.speculation.speculation import Speculation
from front.params import SamplingParams

pytestmark = pytest.mark.speculation


class LongWay(Gate):
    """It thinks about each step."""

    def _go_on_so(self, schedule: Schedule, num: int) -> None:
        pass

    def join(self, plan: StepPlan, said: Sequence[Sequence[int]]) -> StepHook | None:
        self._said = None
        return super().join(plan, said)


def steps_of(random: Random, models: bool, speculation: Speculation, step: int, num: int, cold: bool) -> Schedule:
    """Now and then a request begins, with one token that is not in the cache or more, or a grammar has drafts."""
    chance, rows = random.random(), list(range(num))
    begin, length = chance < 0.02, random.choice([1, 9])
    new = [NewRow(num - 1, num - 1, [1], 1, SamplingParams(), 0, ())] if begin else []
    wanted = 0 if cold and models else speculation.depth
    drafts = [[0] * wanted if random.random() < 0.6 or models else [] for _ in rows]
    if chance > 0.99:
        drafts[0] = [0]
    counts = [1 + len(some) for some in drafts]
    counts[-1] = length if begin else counts[-1]
    warm = [not cold] * num if models and cold else []
    return Schedule(step, [], new, rows=rows, counts=counts, drafts=drafts if any(drafts) else [], warm=warm)


def compare(models: bool, most: int, right: float, draft: float, seed: int) -> int:
    """draft: what one more takes, of a step without. How many steps went the short way."""
    ways: list[tuple[Gate, Speculation]] = []
    at = 0.0
    for kind in (Gate, LongWay):
        drafter: Drafter = ModelDrafts() if models else NgramDrafter(2, 3)
        speculation = Speculation(drafter, most, 64)
        speculation._acceptance = [right] * most
        waiting(speculation)
        ways.append((kind(speculation, adaptive=True, clock=lambda: at), speculation))
    short = 0
    chances = [Random(seed), Random(seed)]
    num, cold = 4, False
    for step in range(3000):
        num = 1 + chances[0].randrange(6) if step % 400 == 399 else num
        chances[1].setstate(chances[0].getstate())
        made = []
        for (gate, speculation), random in zip(ways, chances, strict=True):
            now = steps_of(random, models, speculation, step, num, cold)
            words = gate.propose(now)
            hook = gate.join(StepPlan(step, True, False, (now.num_tokens,), (9,)), [words])
            speculation.num_accepted_tokens += sum(right > random.random() for some in now.drafts for _ in some)
            made.append((tuple(words), hook is None, speculation.depth, now.counts, gate.times.told()))
        assert made[0] == made[1], step
        short += ways[0][0]._past > 0
        cold = models and not made[0][0][1] and chances[0].random() < 0.9
        at += 0.01 * (1 + draft * speculation.depth) * chances[0].uniform(0.9, 1.1)
    return short


@settings(max_examples=examples(40), deadline=None)
@given(st.booleans(), st.integers(1, 3), st.floats(0.0, 1.0), st.floats(0.0, 0.6), st.integers(0, 99))
def test_both_ways_say_the_same(models: bool, most: int, right: float, draft: float, seed: int) -> None:
    compare(models, most, right, draft, seed)


@pytest.mark.parametrize("models", [False, True])
def test_most_steps_go_the_short_way_where_no_drafts_pay(models: bool) -> None:
    assert compare(models, 2, 0.0, 0.5, 0) > 1500
