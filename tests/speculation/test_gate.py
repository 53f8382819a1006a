"""How many drafts there are: as many as make most tokens per second, the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_parts import Job, drive, mailbox_ranks, make_plan

from configs.speculation import SpeculativeConfig
from engine.agreement import StepPlan
from engine.build import build_rank
from engine.schedule import Schedule
from engine.speculation.gate import Gate
from engine.speculation.model_drafts import ModelDrafts
from engine.speculation.speculation import Speculation
from engine.speculation.times import StepTimes, Usual, expected_tokens, size_of, tokens_per_second
from models.tiny import CHECKPOINT

pytestmark = pytest.mark.speculation
torch.set_num_threads(1)


def filled(steps: dict[int, float], drafting: dict[tuple[int, int], float]) -> StepTimes:
    times = StepTimes()
    times.steps = {size: Usual(seconds) for size, seconds in steps.items()}
    times.drafting = {key: Usual(seconds) for key, seconds in drafting.items()}
    return times


def test_what_steps_usually_took_lately() -> None:
    usual = Usual()
    for seconds in (9.0, 3.0, 5.0):  # the first one compiles
        usual.add(seconds)
    assert not usual.known
    usual.add(4.0)
    assert usual.known and usual.value == 4.0
    for _ in range(9):
        usual.add(6.0)
    assert usual.value == 6.0


def test_between_two_sizes_on_a_straight_line() -> None:
    times = filled({1: 1.0, 4: 1.6, 64: 7.6}, {})
    assert times.step(1) == 1.0 and times.step(2) == pytest.approx(1.2) and times.step(34) == pytest.approx(4.6)
    assert times.step(65) is None and times.drafts(1, 1) is None
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
        '{"format": 2}',
        '{"format": 1, "steps": [], "drafting": []}',
        '{"format": 2, "steps": [[1]], "drafting": []}',
    ):
        (tmp_path / "broken").write_text(text)
        assert StepTimes.read(tmp_path / "broken") is None
    assert StepTimes.read(tmp_path / "none") is None


def gate_of(times: StepTimes, acceptance: list[float]) -> Gate:
    speculation = Speculation(ModelDrafts(), len(acceptance), 64)
    speculation.acceptance = acceptance
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
    assert gate_of(filled(STEPS, DRAFTING), acceptance).propose(decodes(num)) == (best, best, num)


@dataclass
class Steps:
    """Steps of `num` sequences that take as long as a table says, and what they would have brought."""

    gate: Gate
    num: int
    seconds: list[float]  # of a step by what it drafts
    at: float = 0.0
    step: int = 0
    drafts: int = 0
    tokens: float = 0.0

    def go(self, count: int) -> list[int]:
        """What is drafted in each of so many steps."""
        self.gate._clock = lambda: self.at
        made = []
        for _ in range(count):
            counts, drafts = [1 + self.drafts] * self.num, [[0] * self.drafts] * self.num if self.drafts else []
            now = Schedule(self.step, rows=list(range(self.num)), counts=counts, drafts=drafts)
            words = self.gate.propose(now)
            hook = self.gate.join(
                StepPlan(self.step, True, False, (self.num * (1 + self.drafts), 0), (9, 9)), [words, (0, 0, 0)]
            )
            assert hook is not None
            hook.begin(now)
            self.at += self.seconds[now.draft_depth]
            self.tokens += self.num * expected_tokens(self.gate._speculation.acceptance, self.drafts)
            self.drafts = min(self.gate._speculation.depth, now.draft_depth)
            self.step += 1
            made.append(now.draft_depth)
        return made


def test_what_is_not_known_is_tried_while_it_may_be_the_best() -> None:
    gate = gate_of(StepTimes(), [0.8, 0.7, 0.6, 0.5])
    made = Steps(gate, 1, [0.1, 0.11, 0.13, 0.3, 0.32]).go(60)
    assert set(made[-8:]) == {2} and 0 in made, made
    assert 4 not in made, "three were much worse than two"
    assert gate.propose(decodes(1, warm=False)) == (0, 0, 1), "none of them can have any"


@pytest.mark.parametrize("num", [1, 64])
def test_what_does_not_pay_costs_little(num: int) -> None:
    """Two in a hundred of all tokens, with what has to be tried at first."""
    gate = gate_of(StepTimes(), [0.5, 0.5, 0.5])
    steps = Steps(gate, num, [0.01, 0.02, 0.03, 0.04])
    steps.go(6000)
    assert steps.tokens / steps.at > 0.98 * num / 0.01


def test_prompts_get_what_was_chosen_for_so_many() -> None:
    """Not what fewer sequences want: to draft for all of them costs much, and makes them warm."""
    gate = gate_of(filled(STEPS, DRAFTING), [0.8, 0.7])
    assert gate.propose(decodes(64)) == (0, 0, 64)
    assert gate.propose(decodes(1)) == (2, 2, 1)
    prompts = Schedule(0, rows=list(range(64)), counts=[5] * 64)
    assert gate.propose(prompts) == (0, 0, 64)


def test_the_rank_with_most_sequences_decides() -> None:
    gate = gate_of(StepTimes(), [0.8, 0.7])
    plan = StepPlan(0, True, False, (1, 5), (9, 9))
    hook = gate.join(plan, [(2, 2, 1), (0, 1, 5)])
    assert hook is not None and gate._speculation.depth == 0
    schedule = Schedule(0)
    hook.begin(schedule)
    assert schedule.draft_depth == 1


def test_no_more_is_drafted_than_may_be_verified() -> None:
    """The memory of all passes behind a step is as large as that of drafts in a step (64)."""
    gate = gate_of(StepTimes(), [0.8] * 8)
    for num, wanted in ((1, 8), (16, 5), (64, 2), (65, 1)):
        hook = gate.join(StepPlan(0, True, False, (num, 1), (9, 9)), [(8, 8, num), (8, 8, 1)])
        assert hook is not None
        hook.begin(schedule := Schedule(0))
        assert schedule.draft_depth == wanted


def test_beside_a_rank_that_practises_there_are_no_drafts() -> None:
    """It tells no number of sequences to those that do not practise, and would not take part in the layer's passes."""
    gate = gate_of(StepTimes(), [0.8, 0.7])
    assert gate.join(StepPlan(0, True, False, (1, 5), (9, 9)), [(2, 2, 0), (1, 1, 0)]) is None


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
