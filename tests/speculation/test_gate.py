"""How many drafts there are: as many as make most tokens per second, the same on all ranks."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from amounts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_parts import Job, drive, mailbox_ranks, make_plan

from configs.speculation import SpeculativeConfig
from engine.agreement import StepPlan
from engine.build import build_rank
from engine.process.local_ranks import LocalRanks
from engine.schedule import NewRow, Schedule
from engine.speculation.costs import SHARE
from engine.speculation.drafter import Drafter
from engine.speculation.gate import PRACTICE_SECONDS, Gate
from engine.speculation.model_drafts import ModelDrafts
from engine.speculation.ngram import NgramDrafter
from engine.speculation.speculation import Speculation
from engine.speculation.times import LATELY, MARGIN, StepTimes, Usual, expected_tokens, size_of, tokens_per_second
from engine.speculation.trials import AGAIN, FIRST, PROOF, TRIALS
from ep.recorder import Kind
from front.messages import SamplingParams
from models.tiny import CHECKPOINT

pytestmark = pytest.mark.speculation
torch.set_num_threads(1)


def measured(seconds: float) -> Usual:
    usual = Usual()
    for _ in range(4):
        usual.add(seconds)
    return usual


def filled(
    steps: dict[int, float], drafting: dict[tuple[int, int], float], usual: Callable[[float], Usual] = measured
) -> StepTimes:
    times = StepTimes()
    times.steps = {size: usual(seconds) for size, seconds in steps.items()}
    times.drafting = {key: usual(seconds) for key, seconds in drafting.items()}
    return times


def test_what_steps_usually_took_lately() -> None:
    usual = Usual()
    for seconds in (9.0, 3.0, 5.0):  # the first one compiles
        usual.add(seconds)
    assert (usual.known, usual.measured) == (False, False)
    usual.add(4.0)
    assert (usual.known, usual.value) == (True, pytest.approx(4.0))
    usual.add(400.0)  # something else had the core
    assert usual.value == pytest.approx((3 + 5 + 4 + 3 * 5) / 4)
    for _ in range(LATELY):
        usual.add(6.0)
    assert usual.value == pytest.approx(6.0)


def test_of_two_trials_the_lesser_counts_until_it_is_used() -> None:
    usual = measured(8.0)
    usual.again()
    for _ in range(4):
        assert (usual.measured, usual.value) == (True, 8.0 if len(usual._last) < 3 else pytest.approx(5.0))
        usual.add(5.0, trying=True)
    usual.again()
    for _ in range(4):
        usual.add(6.0, trying=True)
    assert usual.value == pytest.approx(5.0)
    usual.scale(2.0)
    assert usual.value == pytest.approx(10.0)
    usual.add(12.0)
    assert usual.value == pytest.approx(12.0)


def test_what_is_remembered_holds_until_it_is_measured() -> None:
    usual = Usual(7.0)
    assert (usual.known, usual.measured, usual.value) == (True, False, 7.0)
    for _ in range(4):
        usual.add(5.0)
    assert (usual.known, usual.measured, usual.value) == (True, True, pytest.approx(5.0))


def test_between_two_trials_on_a_straight_line() -> None:
    times = filled({1: 1.0, 4: 1.6, 64: 7.6}, {})
    assert times.step(1) == 1.0 and times.step(2) == pytest.approx(1.2) and times.step(34) == pytest.approx(4.6)
    assert times.step(65) is None and times.usual(1, 1) is None
    assert [size_of(count) for count in (1, 7, 100, 9999)] == [1, 8, 128, 512]


def test_what_is_to_be_expected() -> None:
    assert expected_tokens([0.8, 0.5, 0.5], 0) == 1
    assert expected_tokens([0.8, 0.5, 0.5], 3) == pytest.approx(1 + 0.8 + 0.4 + 0.2)
    times = filled({1: 1.0, 2: 1.5}, {(1, 1): 1.6})
    assert tokens_per_second(times, [0.8], 1, 1.0, 1, True) == pytest.approx(1.8 / 1.6)
    assert tokens_per_second(times, [0.8], 1, 1.0, 1, False) == pytest.approx(1.8 / 1.5)
    assert tokens_per_second(times, [0.8], 1, 0.5, 1, False) == pytest.approx(1.4 / 1.5)
    assert tokens_per_second(times, [0.8, 0.8], 1, 1.0, 2, True) is None


def test_it_is_remembered(tmp_path: Path) -> None:
    times = filled({1: 1e-3, 2: 2e-3}, {(1, 1): 5e-3})
    times.write(tmp_path / "deep" / "file")
    found = StepTimes.read(tmp_path / "deep" / "file")
    assert found is not None and found.told() == times.told()
    assert "1: 1, 2: 2" in found.told() and "1x1: 5" in found.told()
    for text in (
        "",
        "[]",
        '{"format": 3}',
        '{"format": 2, "steps": [], "drafting": []}',
        '{"format": 3, "steps": [[1]], "drafting": []}',
    ):
        (tmp_path / "broken").write_text(text)
        assert StepTimes.read(tmp_path / "broken") is None
    assert StepTimes.read(tmp_path / "none") is None


def gate_of(times: StepTimes, acceptance: list[float]) -> Gate:
    speculation = Speculation(ModelDrafts(), len(acceptance), 64)
    speculation._acceptance = acceptance
    speculation._open.add(1)
    gate = Gate(speculation, adaptive=True)
    gate.times = times
    return gate


def decodes(num: int, warm: bool = True) -> Schedule:
    return Schedule(0, rows=list(range(num)), counts=[1] * num, warm=[] if warm else [False] * num)


STEPS = {1: 1.0, 64: 10.0}
DRAFTING = {(1, 1): 1.3, (1, 2): 1.6, (64, 1): 19.0, (64, 2): 27.5}


@pytest.mark.parametrize(
    ("acceptance", "num", "best"), [([0.8, 0.7], 1, 2), ([0.8, 0.1], 1, 1), ([0.1, 0.1], 1, 0), ([0.8, 0.7], 64, 0)]
)
def test_it_takes_the_best(acceptance: list[float], num: int, best: int) -> None:
    assert gate_of(filled(STEPS, DRAFTING), acceptance).propose(decodes(num)) == (best, best, 1 + num, 0)


def test_none_at_all_is_tried_again_where_its_trials_broke_off() -> None:
    """All requests lose the thread and end before a step without drafts is measured."""
    gate = gate_of(filled({}, DRAFTING), [0.8, 0.7])
    for _ in range(TRIALS + 2):
        for _ in range(3 * AGAIN):
            gate.propose(decodes(1))
        gate.propose(decodes(1, warm=False))
    assert gate._trials[1].tried[0] > TRIALS


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

    def go(self, count: int) -> list[int]:
        """What is drafted in each of so many steps."""
        self.gate._clock = lambda: self.at
        if self.other is not None:
            self.other._clock = self.gate._clock
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
        said = [words, (0, 0, 1, 0)] if self.other is None else [words, self.other.propose(Schedule(self.step))]
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


def test_what_is_not_known_is_tried_while_it_may_be_the_best() -> None:
    gate = gate_of(StepTimes(), [0.8, 0.7, 0.6, 0.5])
    made = Steps(gate, 1, [0.1, 0.11, 0.13, 0.3, 0.32], length=60, prompt=0.1).go(240)
    assert set(made[-8:]) == {2} and 0 in made, made
    assert 4 not in made[1:], "three were much worse than two"
    assert gate.propose(decodes(1, warm=False)) == (0, 0, 2, 0), "none of them can have any"


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
    rates = [steps.fixed(depth) for depth in range(1 + gate._most_of(num))]
    assert (steps.tokens - tokens) / (steps.at - began) > 0.98 * max(rates[0], max(rates) / (1 + MARGIN))


@settings(max_examples=examples(40), deadline=None)
@given(ACCEPTANCE, STEPS_OF, st.sampled_from([1, 64]), st.integers(20, 300), st.floats(0.5, 4.0))
def test_with_times_from_practice_it_is_there_from_the_first_step_on(
    acceptance: list[float], more: list[float], num: int, length: int, slower: float
) -> None:
    """Whatever all steps take longer than in practice, where only how they compare counts."""
    gate = gate_of(StepTimes(), acceptance)
    seconds = [0.01 * value for value in accumulate([1.0, *more[: len(acceptance)]])]
    gate.times = filled({num: seconds[0]}, {(num, depth): seconds[depth] for depth in range(1, len(seconds))}, Usual)
    steps = Steps(gate, num, [slower * value for value in seconds], length, prompt=0.02)
    steps.go(4000)
    rates = [steps.fixed(depth) for depth in range(1 + gate._most_of(num))]
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
    gate.times = filled({num: practice[0]}, {(num, depth): practice[depth] for depth in range(1, len(practice))}, Usual)
    steps = Steps(gate, num, seconds, length, prompt=0.02, prompt_drafts=0.01)
    steps.go(9000)
    began, tokens = steps.at, steps.tokens
    steps.go(8000)
    rates = [steps.fixed(depth) for depth in range(1 + gate._most_of(num))]
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
        gate = gate_of(
            filled({64: practice[0]}, {(64, depth): practice[depth] for depth in range(1, 5)}, Usual), acceptance
        )
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
    gate = gate_of(filled({1: 0.01}, {(1, depth): seconds[depth] for depth in (1, 2, 3)}, Usual), acceptance)
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
    both = [gate_of(filled({1: 0.01}, {(1, d): seconds[d] for d in (1, 2, 3)}, Usual), acceptance) for _ in range(2)]
    alone = Steps(
        gate_of(filled({1: 0.01}, {(1, d): seconds[d] for d in (1, 2, 3)}, Usual), acceptance),
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


@pytest.mark.parametrize(("drafter", "heard"), [(ModelDrafts(), {1: 1}), (NgramDrafter(2, 3), None)])
def test_only_where_the_model_drafts_trials_are_those_of_all(drafter: Drafter, heard: dict[int, int] | None) -> None:
    """What steps with other drafts take each rank learns for itself."""
    speculation = Speculation(drafter, 2, 64)
    speculation._open.add(1)
    gate = Gate(speculation, adaptive=True)
    words = gate.propose(Schedule(0))
    gate.join(StepPlan(0, True, False, (0, 2), (9, 9)), [words, (1, 1, 2, 1)])
    assert gate._last.trying == (heard is not None)
    assert (gate._trials[1].tried if heard else gate._trials or None) == heard


def test_drafts_of_prompts_are_made_for_trials_that_begin() -> None:
    """Where none is best."""
    gate = gate_of(StepTimes(), [0.5, 0.5, 0.5])
    steps = Steps(gate, 8, [0.01, 0.02, 0.03, 0.04], length=48, prompt=0.02, prompt_drafts=0.01)
    steps.go(100)
    made, trials = 0, sum(gate._trials[8].tried.values())
    for _ in range(6000):
        begins, (depth,) = not steps.done, steps.go(1)
        made += begins and depth > 0
    assert made == sum(gate._trials[8].tried.values()) - trials > 0


def test_prompts_get_what_was_chosen_for_so_many() -> None:
    """Not what fewer sequences want: to draft for all of them costs much, and makes them warm."""
    gate = gate_of(filled(STEPS, DRAFTING), [0.8, 0.7])
    assert gate.propose(decodes(64)) == (0, 0, 65, 0)
    assert gate.propose(decodes(1)) == (2, 2, 2, 0)
    prompts = Schedule(0, rows=list(range(64)), counts=[5] * 64)
    assert gate.propose(prompts) == (0, 0, 65, 0)


def test_the_rank_with_most_sequences_decides() -> None:
    gate = gate_of(StepTimes(), [0.8, 0.7])
    plan = StepPlan(0, True, False, (1, 5), (9, 9))
    hook = gate.join(plan, [(2, 2, 2, 0), (0, 1, 6, 0)])
    assert hook is not None and gate._speculation.depth == 0
    schedule = Schedule(0)
    hook.begin(schedule)
    assert schedule.draft_depth == 1


def test_no_more_is_drafted_than_may_be_verified() -> None:
    """The memory of all passes behind a step is as large as that of drafts in a step (64)."""
    gate = gate_of(StepTimes(), [0.8] * 8)
    for num, wanted in ((1, 8), (16, 5), (64, 2), (65, 1)):
        hook = gate.join(StepPlan(0, True, False, (num, 1), (9, 9)), [(8, 8, 1 + num, 0), (8, 8, 2, 0)])
        assert hook is not None
        hook.begin(schedule := Schedule(0))
        assert schedule.draft_depth == wanted


def test_beside_a_rank_that_practises_there_are_no_drafts() -> None:
    """It says zeros to those that do not practise, and would not take part in the layer's passes."""
    gate = gate_of(StepTimes(), [0.8, 0.7])
    plan = StepPlan(0, True, False, (1, 5), (9, 9))
    assert (
        gate.join(plan, [(0, 0, 0, 0), (1, 1, 6, 0)]) is None
        and gate.join(plan, [(2, 2, 1, 0), (1, 1, 6, 0)]) is not None
    )


def test_practice_measures_before_the_first_request(tmp_path: Path) -> None:
    """All numbers of drafts, and any number of sequences; what is computed is forgotten, and what was measured is not."""
    memory = tmp_path / "times"
    config: Any = SpeculativeConfig(method="mtp", num_speculative_tokens=2, memory=str(memory))
    told = []
    for _ in range(2):
        rank = build_rank(make_plan(CHECKPOINT, max_model_len=64, block_size=16, speculation=config))
        gate = next(member for member in rank._companions.members if isinstance(member, Gate))
        LocalRanks(rank).receive(0.0)
        assert all(gate.times.usual(num, depth) is not None for num in (1, 2, 64) for depth in range(3))
        assert not gate.practises and not rank.has_work and not rank.stats.spec_drafts
        told.append(gate.times.told())
    assert told[0] == told[1] and memory.exists()


@pytest.mark.parametrize("leads", [True, False])
def test_one_stream_is_practised_by_one_rank(leads: bool) -> None:
    """Once all have captured it. The others go with it, and do not wait for ever for one that practises no more."""
    now, speculation = [0.0], Speculation(ModelDrafts(), 2, 64)
    gate = Gate(speculation, adaptive=True, leads=leads, clock=lambda: now[0], most_sequences=32)
    told = []
    for lesson in gate.lessons():
        assert lesson.goes_on()
        told.append((lesson.num_requests, gate._lesson[0], gate._measures))
        now[0] += 0.0 if lesson.num_requests else PRACTICE_SECONDS
        assert lesson.goes_on() is bool(lesson.num_requests)
        now[0] = 0.0
    one = 1 if leads else 0
    assert told[:6] == [(1, 0, False), (1, 1, False), (1, 2, False), (one, 0, True), (one, 1, True), (one, 2, True)]
    assert [num for num, _, _ in told[6:]] == [32, 32, 32, 8, 8, 8] and not gate.practises


def test_what_serves_sets_the_pace() -> None:
    """On a rank, too, that has chosen nothing: it hears of the others' steps."""
    times = filled({1: 1.0}, {(1, 1): 2.0, (1, 2): 3.0, (8, 1): 5.0}, Usual)
    times.serves(1, 1)
    for _ in range(4):
        times.add_drafting(1, 1, 4.0)
    times.serves(1, 2)
    found = [times.usual(1, depth) for depth in range(3)]
    assert [usual and usual.value for usual in found] == [2.0, pytest.approx(4.0), 6.0]
    assert times.drafting[8, 1].value == 5.0


@pytest.mark.parametrize("size", [1, 2])
def test_streams_with_it(size: int) -> None:
    jobs = [Job([1, 300, 412 + index, 250], 40, arrive=3 * index) for index in range(3)]
    config: Any = SpeculativeConfig(method="mtp", num_speculative_tokens=3)
    sizes = {"max_model_len": 64, "block_size": 16}
    expected = [got.tokens for got in drive([build_rank(make_plan(CHECKPOINT, **sizes))], jobs)]
    ranks = (
        mailbox_ranks(CHECKPOINT, size, speculation=config, **sizes)
        if size > 1
        else [build_rank(make_plan(CHECKPOINT, speculation=config, **sizes))]
    )
    assert [got.tokens for got in drive(ranks, jobs)] == expected
    assert all(rank.stats.spec_drafts for rank in ranks)
    for rank in ranks:
        rank.close()
