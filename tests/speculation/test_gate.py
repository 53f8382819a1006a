"""How many drafts there are: as many as make most tokens per second, the same on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gate_steps import Steps, decodes, expected_tokens, filled, gate_of, idle, measured, of_rank
from rank_parts import Job, drive, mailbox_ranks, make_plan

from configs.speculation import SpeculativeConfig
from engine.agreement import StepPlan
from engine.build import build_rank
from engine.process.local_ranks import LocalRanks
from engine.schedule import NewRow, Schedule
from engine.speculation.gate import PRACTICE_SECONDS, Gate
from engine.speculation.model_drafts import ModelDrafts
from engine.speculation.speculation import Speculation
from engine.speculation.times import LATELY, StepTimes, Usual, size_of
from engine.speculation.trials import AGAIN, TRIALS
from engine.speculation.words import DECODES, LEADS
from front.params import SamplingParams
from models.tiny import CHECKPOINT

pytestmark = pytest.mark.speculation
torch.set_num_threads(1)


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


def test_what_is_to_be_expected() -> None:
    assert expected_tokens([0.8, 0.5, 0.5], 0) == 1
    assert expected_tokens([0.8, 0.5, 0.5], 3) == pytest.approx(1 + 0.8 + 0.4 + 0.2)
    gate = gate_of(filled({1: 1.0}, {(1, 1): 1.6}), [0.8, 0.8])
    assert gate._choice.rates(1) == {0: 1.0, 1: pytest.approx(1.8 / 1.6)}
    assert [size_of(count) for count in (1, 7, 100, 9999)] == [1, 8, 128, 512]


def test_it_is_remembered(tmp_path: Path) -> None:
    times = filled({1: 1e-3, 2: 2e-3}, {(1, 1): 5e-3})
    times.write(tmp_path / "deep" / "file")
    found = StepTimes.read(tmp_path / "deep" / "file")
    assert found is not None and found.told() == times.told()
    assert "1x0: 1, 1x1: 5, 2x0: 2" in found.told()
    for text in (
        "",
        "[]",
        '{"format": 4}',
        '{"format": 3, "usuals": []}',
        '{"format": 4, "usuals": [[1, 0]]}',
    ):
        (tmp_path / "broken").write_text(text)
        assert StepTimes.read(tmp_path / "broken") is None
    assert StepTimes.read(tmp_path / "none") is None


STEPS = {1: 1.0, 64: 10.0}
DRAFTING = {(1, 1): 1.3, (1, 2): 1.6, (64, 1): 19.0, (64, 2): 27.5}


@pytest.mark.parametrize(
    ("acceptance", "num", "best"), [([0.8, 0.7], 1, 2), ([0.8, 0.1], 1, 1), ([0.1, 0.1], 1, 0), ([0.8, 0.7], 64, 0)]
)
def test_it_takes_the_best(acceptance: list[float], num: int, best: int) -> None:
    assert gate_of(filled(STEPS, DRAFTING), acceptance).propose(decodes(num))[:5] == (
        best,
        best,
        1 + num,
        DECODES | LEADS,
        0,
    )


def test_none_at_all_is_tried_again_where_its_trials_broke_off() -> None:
    """All requests lose the thread and end before a step without drafts is measured."""
    gate = gate_of(filled({}, DRAFTING), [0.8, 0.7])
    for _ in range(TRIALS + 2):
        for _ in range(3 * AGAIN):
            gate.propose(decodes(1))
        gate.propose(decodes(1, warm=False))
    assert gate._trials[1].tried[0] > TRIALS


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
    assert gate.propose(decodes(64))[:5] == (0, 0, 65, DECODES | LEADS, 0)
    assert gate.propose(decodes(1))[:5] == (2, 2, 2, DECODES | LEADS, 0)
    prompts = Schedule(0, rows=list(range(64)), counts=[5] * 64)
    assert gate.propose(prompts)[:5] == (0, 0, 65, LEADS, 0)


@pytest.mark.parametrize(("few", "many", "first", "later"), [(1.3, 19.0, 1, 0), (2.5, 10.5, 0, 1)])
def test_the_first_of_many_begin_as_the_many_did(few: float, many: float, first: int, later: int) -> None:
    """Whether drafts pay for few and not for many, or the other way round: no request goes on without beside others."""
    gate = gate_of(filled(STEPS | {2: 1.0}, {(2, 1): few, (64, 1): many}), [0.8])
    prompts = Schedule(1, rows=list(range(2)), counts=[8] * 2)
    assert gate.propose(prompts)[0] == first
    for _ in range(AGAIN // 2):
        gate.propose(decodes(64))
    assert gate.propose(prompts)[0] == later


def test_the_rank_with_most_sequences_decides() -> None:
    gate = gate_of(StepTimes(), [0.8, 0.7])
    plan = StepPlan(0, True, False, (1, 5), (9, 9))
    hook = gate.join(plan, [of_rank(gate, 2, 2, 2, DECODES | LEADS, 0), of_rank(gate, 0, 1, 6, DECODES | LEADS, 0)])
    assert hook is not None and gate._speculation.depth == 0
    schedule = Schedule(0)
    hook.begin(schedule)
    assert schedule.draft_depth == 1


@pytest.mark.parametrize("count", [1, 5])
def test_a_request_that_begins_alone_begins_so(count: int) -> None:
    """Beside another rank's many sequences this one thinks about these, but they may have ended."""
    gate = gate_of(filled(STEPS, DRAFTING), [0.8, 0.7])
    gate.propose(Schedule(0))
    gate.join(StepPlan(0, True, False, (0, 64), (9, 9)), [idle(gate), of_rank(gate, 0, 0, 65, DECODES | LEADS, 0)])
    assert gate.propose(decodes(1))[:2] == (0, 0)
    new = NewRow(0, 0, [1], 1, SamplingParams(), 0, ())
    assert gate.propose(Schedule(1, [], [new], rows=[0], counts=[count]))[:2] == (2, 2)


def test_no_more_is_drafted_than_may_be_verified() -> None:
    """The memory of all passes behind a step is as large as that of drafts in a step (64)."""
    gate = gate_of(StepTimes(), [0.8] * 8)
    for num, wanted in ((1, 8), (16, 5), (64, 2), (65, 1)):
        hook = gate.join(
            StepPlan(0, True, False, (num, 1), (9, 9)),
            [of_rank(gate, 8, 8, 1 + num, DECODES | LEADS, 0), of_rank(gate, 8, 8, 2, DECODES | LEADS, 0)],
        )
        assert hook is not None
        hook.begin(schedule := Schedule(0))
        assert schedule.draft_depth == wanted


def test_beside_a_rank_that_practises_there_are_no_drafts() -> None:
    """It says zeros to those that do not practise, and would not take part in the layer's passes."""
    gate = gate_of(StepTimes(), [0.8, 0.7])
    plan = StepPlan(0, True, False, (1, 5), (9, 9))
    assert (
        gate.join(plan, [of_rank(gate, 0, 0, 0, 0, 0), of_rank(gate, 1, 1, 6, DECODES | LEADS, 0)]) is None
        and gate.join(plan, [of_rank(gate, 2, 2, 1, DECODES, 0), of_rank(gate, 1, 1, 6, DECODES | LEADS, 0)])
        is not None
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
        told.append((lesson.num_requests, gate._lesson[0], gate.meter.measures))
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
        times.add(1, 1, 4.0)
    times.serves(1, 2)
    found = [times.usual(1, depth) for depth in range(3)]
    assert [usual and usual.value for usual in found] == [2.0, pytest.approx(4.0), 5.5], "between 6 and 5"
    assert times.usuals[8, 1].value == 5.0


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
