"""What the gate tries, what it learns of it, and what that costs: the rate of many steps, on a clock of their own."""

from __future__ import annotations

import statistics
from collections import Counter
from itertools import accumulate
from operator import mul
from random import Random

import pytest
from amounts import examples
from gate_steps import Paces, Steps, decodes, expected_tokens, filled, gate_of, of_rank, practised, waiting
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.agreement import StepPlan
from engine.schedule import Schedule
from engine.speculation.costs import SHARE
from engine.speculation.drafter import Drafter
from engine.speculation.gate import Gate
from engine.speculation.model_drafts import ModelDrafts
from engine.speculation.ngram import NgramDrafter
from engine.speculation.speculation import Speculation
from engine.speculation.times import MARGIN, StepTimes, Usual
from engine.speculation.trials import FIRST, PROOF
from engine.speculation.words import DECODES, LEADS, TRYING

pytestmark = pytest.mark.speculation


def test_what_is_not_known_is_tried_while_it_may_be_the_best() -> None:
    gate = gate_of(StepTimes(), [0.8, 0.7, 0.6, 0.5])
    made = Steps(gate, 1, [0.1, 0.11, 0.13, 0.3, 0.32], length=60, prompt=0.1).go(240)
    assert set(made[-8:]) == {2} and 0 in made, made
    assert 4 not in made[1:], "three were much worse than two"
    assert gate.propose(decodes(1, warm=False))[:4] == (0, 0, 2, DECODES | LEADS), "none of them can have any"


@pytest.mark.parametrize("num", [1, 64])
def test_what_does_not_pay_costs_little(num: int) -> None:
    """Two in a hundred of all tokens, with what has to be tried at first."""
    gate = gate_of(StepTimes(), [0.5, 0.5, 0.5])
    steps = Steps(gate, num, [0.01, 0.02, 0.03, 0.04], length=100, prompt=1e-9)
    steps.go(6000)
    assert steps.tokens / steps.at > 0.98 * num / 0.01


ACCEPTANCE = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=4)
STEPS_OF = st.lists(st.floats(0.0, 2.0), min_size=4, max_size=4)  # what each draft more takes, of a step without


@settings(max_examples=examples(40), deadline=None)
@given(ACCEPTANCE, STEPS_OF, st.sampled_from([1, 64]), st.integers(20, 300), st.floats(0.0, 3.0))
def test_it_comes_to_within_two_in_a_hundred_of_the_best(
    acceptance: list[float], more: list[float], num: int, length: int, prompts: float
) -> None:
    """Of the rate with the best fixed number of drafts, trials included, or of that without drafts where no number is
    better by what is asked of one. Whatever steps and passes over prompts take, as long as more drafts do not take
    less."""
    gate = gate_of(StepTimes(), acceptance)
    seconds = [0.01 * value for value in accumulate([1.0, *more[: len(acceptance)]])]
    steps = Steps(gate, num, seconds, length, prompt=0.02, prompt_drafts=0.01 * prompts)
    steps.go(4000)
    began, tokens = steps.at, steps.tokens
    steps.go(4000)
    rates = [steps.fixed(depth) for depth in range(1 + gate._choice.most_of(num))]
    assert (steps.tokens - tokens) / (steps.at - began) > 0.98 * max(rates[0], max(rates) / (1 + MARGIN))


@settings(max_examples=examples(40), deadline=None)
@given(ACCEPTANCE, STEPS_OF, st.sampled_from([1, 64]), st.integers(20, 300), st.floats(0.5, 4.0))
def test_with_times_from_practice_it_is_there_from_the_first_step_on(
    acceptance: list[float], more: list[float], num: int, length: int, slower: float
) -> None:
    """Whatever all steps take longer than in practice, where only how they compare counts."""
    gate = gate_of(StepTimes(), acceptance)
    seconds = [0.01 * value for value in accumulate([1.0, *more[: len(acceptance)]])]
    gate.meter.times = practised(num, seconds)
    steps = Steps(gate, num, [slower * value for value in seconds], length, prompt=0.02)
    steps.go(4000)
    rates = [steps.fixed(depth) for depth in range(1 + gate._choice.most_of(num))]
    assert steps.tokens / steps.at > 0.98 * max(rates[0], max(rates) / (1 + MARGIN))


@settings(max_examples=examples(20), deadline=None)
@given(ACCEPTANCE, STEPS_OF, st.sampled_from([1, 8]), st.integers(20, 150), st.integers(0, 4), st.floats(1.0, 2.0))
def test_what_took_longer_in_practice_is_not_given_up(
    acceptance: list[float], more: list[float], num: int, length: int, which: int, longer: float
) -> None:
    """All steps of practice with one number took longer by chance: soon its rate is the same as without that. Trials may
    cost a hundredth of the time from the first step on, and some of these last ones what the others left."""
    gate, which = gate_of(StepTimes(), acceptance), which % (1 + len(acceptance))
    seconds = [0.01 * value for value in accumulate([1.0, *more[: len(acceptance)]])]
    practice = [value * (longer if depth == which else 1.0) for depth, value in enumerate(seconds)]
    gate.meter.times = practised(num, practice)
    steps = Steps(gate, num, seconds, length, prompt=0.02, prompt_drafts=0.01)
    steps.go(9000)
    began, tokens = steps.at, steps.tokens
    steps.go(8000)
    rates = [steps.fixed(depth) for depth in range(1 + gate._choice.most_of(num))]
    trials = SHARE * steps.at / (steps.at - began)
    assert (steps.tokens - tokens) / (steps.at - began) > (0.99 - trials) * max(rates[0], max(rates) / (1 + MARGIN))


@pytest.mark.parametrize("three", [0.02, 0.04])
def test_a_machine_that_is_slower_for_a_while_does_not_change_the_choice(three: float) -> None:
    """Every second thousand of steps takes twice as long."""
    gate = gate_of(StepTimes(), [0.9, 0.8, 0.7])
    steps = Steps(gate, 1, [0.01, 0.015, 0.018, three], 120, prompt=0.02)
    steps.noise = lambda: 1.0 + (steps.step // 1000 % 2)
    made = steps.go(20000)[4000:]
    best = max(range(4), key=steps.fixed)
    assert sum(depth == best for depth in made) > 0.8 * len(made)  # one near to it is tried again and again


def test_none_at_all_is_compared_with_what_is_measured_behind_it() -> None:
    """Its requests go on without drafts after the trial: steps of these prove nothing of what was chosen. From the
    trial on all steps take less."""
    gate = gate_of(practised(1, [0.01, 0.0142]), [0.9])
    steps = Steps(gate, 1, [0.01, 0.0142], length=100, prompt=0.02)
    while not (gate._trials and gate._without):
        assert steps.step < 5000
        steps.go(1)
    steps.noise = lambda: 0.7
    steps.go(int(100 - steps.done))
    assert set(steps.go(50)) == {1}, "the request behind it has drafts to its end"


@pytest.mark.parametrize("slower", [0.8, 1.0, 1.3])
def test_it_is_not_misled_by_what_else_the_machine_does(slower: float) -> None:
    """Every step takes longer by chance, some of them much; three drafts make so much more or less than none, and an
    earlier start remembers the contrary."""
    random, acceptance = Random(0), [0.9, 0.8, 0.7]
    three = 0.01 * expected_tokens(acceptance, 3) * slower
    gate = gate_of(filled({1: 0.03}, {(1, 3): 0.01 / slower, (1, 1): 0.05, (1, 2): 0.05}, Usual), acceptance)
    noise = lambda: random.uniform(0.8, 1.2) * (10.0 if random.random() < 0.01 else 1.0)  # noqa: E731
    steps = Steps(gate, 1, [0.01, 0.03, 0.05, three], 120, prompt=0.02, prompt_drafts=0.002, noise=noise)
    steps.go(8000)
    began, tokens = steps.at, steps.tokens
    steps.go(8000)
    usual = 1.0 + 0.01 * 9  # of the noise
    rate = (steps.tokens - tokens) / (steps.at - began) * usual
    assert rate > 0.95 * max(steps.fixed(0), steps.fixed(3) / (1 + MARGIN))


def test_none_at_all_is_measured_soon_where_it_may_be_as_good() -> None:
    """What else the machine does comes and goes, and practice found drafts to be a tenth better than they are: one is
    2 % worse than none, and the others are much worse. What it takes to find out is no more than 2.5 %."""
    acceptance, rates = [0.85, 0.9, 0.9, 0.9], []
    seconds = [0.01 * expected_tokens(acceptance, depth) * (1 + 0.02 * depth * depth) for depth in range(5)]
    practice = [value * (0.9 if depth else 1.0) for depth, value in enumerate(seconds)]
    for seed in range(8):
        gate = gate_of(practised(64, practice), acceptance)
        gate._speculation.max_in_step = 256
        steps = Steps(gate, 64, seconds, 120, prompt=0.03, prompt_drafts=0.004)
        steps.noise = Paces(Random(seed), 0.1).next
        made = Counter(steps.go(1700))
        tokens = sum(count * expected_tokens(acceptance, depth) for depth, count in made.items())
        rates.append(tokens / sum(count * seconds[depth] for depth, count in made.items()) * seconds[0])
    assert statistics.fmean(rates) > 0.975


def test_a_trial_is_compared_with_what_was_measured_before_and_behind_it() -> None:
    """The machine is faster while one is made, and for a while behind it."""
    acceptance, seconds = [0.9, 0.9, 0.9], [0.01, 0.012, 0.014, 0.016]
    gate = gate_of(practised(1, seconds), acceptance)
    steps, fast, chosen = Steps(gate, 1, seconds, 120, prompt=0.02), 0, set()

    def noise() -> float:
        nonlocal fast
        fast = FIRST + PROOF if gate._trial else max(0, fast - 1)
        chosen.add(gate._trials[1].chosen)
        return 0.88 if fast else 1.0

    steps.noise = noise
    assert set(steps.go(6000)) == {0, 1, 2, 3}
    assert chosen == {3}


def test_the_trials_of_two_ranks_are_those_of_one() -> None:
    """One stream alternates between them. What one tries the other has tried, too, and what it learns of it."""
    acceptance, seconds = [0.9, 0.9, 0.9], [0.01, 0.012, 0.014, 0.016]
    both = [gate_of(practised(1, seconds), acceptance) for _ in range(2)]
    alone = Steps(
        gate_of(practised(1, seconds), acceptance),
        1,
        seconds,
        120,
        prompt=0.02,
    )
    steps = Steps(both[0], 1, seconds, 120, prompt=0.02, other=both[1])
    tried, of_two = (Counter(one.go(1000)) for one in (alone, steps))
    assert sum(of_two.values()) - of_two[3] <= 1.1 * (sum(tried.values()) - tried[3]), (tried, of_two)
    assert [gate._trials[1].chosen for gate in both] == [3, 3]
    assert both[0]._trials[1].tried == both[1]._trials[1].tried
    assert both[0].times.told() == both[1].times.told()


@pytest.mark.parametrize("drafter", [ModelDrafts(), NgramDrafter(2, 3)])
def test_trials_are_those_of_all(drafter: Drafter) -> None:
    """Of a rank without requests, too. Drafts that the model does not make are verified in the step behind."""
    speculation = Speculation(drafter, 2, 64)
    waiting(speculation)
    gate, models = Gate(speculation, adaptive=True), speculation.models
    for step in range(2):
        words = gate.propose(Schedule(step))
        gate.join(
            StepPlan(step, True, False, (0, 2), (9, 9)), [words, of_rank(gate, 1, 1, 2, TRYING | DECODES | LEADS, 0)]
        )
        assert (gate.meter.last.trying, gate.meter.last.depth) == ((False, 2) if not step and not models else (True, 1))
    assert gate._trials[1].tried == {1: 1}
    for step in range(2):  # of the next epoch
        words = gate.propose(Schedule(step))
        gate.join(
            StepPlan(step, True, False, (0, 2), (9, 9)), [words, of_rank(gate, 1, 1, 2, TRYING | DECODES | LEADS, 0)]
        )
    assert gate._trials[1].tried == {1: 2}


@settings(max_examples=examples(40), deadline=None)
@given(ACCEPTANCE, st.floats(0.0, 0.5), st.sampled_from([1, 8]), st.floats(0.0, 1.0), st.integers(0, 9))
def test_where_only_some_requests_have_drafts(
    acceptance: list[float], draft: float, num: int, part: float, seed: int
) -> None:
    """As when drafts are looked up. draft: what one more takes, of a step of that many without."""
    speculation = Speculation(NgramDrafter(2, 3), len(acceptance), 64)
    speculation.rights.change([part * right for right in accumulate(acceptance, mul)])  # as looks would tell
    waiting(speculation)
    gate, random, rows, at = Gate(speculation, adaptive=True, clock=lambda: at), Random(seed), list(range(num)), 0.0

    def go(count: int) -> float:
        """Tokens per second."""
        nonlocal at
        tokens, began, first = 0.0, at, gate.meter.last.step + 1
        for step in range(max(first, 0), max(first, 0) + count):
            drafts = [[0] * speculation.depth if random.random() < part else [] for _ in rows]
            drafted = sum(map(len, drafts))
            counts = [1 + len(some) for some in drafts]
            now = Schedule(step, rows=rows, counts=counts, drafts=drafts if drafted else [])
            assert gate.join(StepPlan(step, True, False, (sum(counts),), (9,)), [gate.propose(now)]) is None
            at += 0.01 * (1 + draft * drafted / num)
            made = [
                next((at for at, p in enumerate(acceptance[: len(d)]) if random.random() >= p), len(d)) for d in drafts
            ]
            speculation.num_accepted_tokens += sum(made)
            tokens += num + sum(made)
        return tokens / (at - began)

    go(2000)
    fixed = [
        100 * num * (1 + part * (expected_tokens(acceptance, depth) - 1)) / (1 + draft * part * depth)
        for depth in range(1 + len(acceptance))
    ]
    assert go(4000) > 0.98 * fixed[0] and go(4000) > 0.9 * max(fixed) / (1 + MARGIN)
