"""When prompts are let in: all ranks decide alike, none waits for ever, and tokens stay what they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hf_tiny import make_qwen3_moe
from rank_parts import Job, make_plan, meet_in

from dbo.steps import drain, weave
from engine.agreement import StepPlan
from engine.build import build_rank
from engine.doorbell import SharedDoorbell
from engine.overlap.cadence import MOST_STEPS, Cadence
from engine.schedule import Schedule
from engine.scheduler import Scheduler
from ep.transport.group import MailboxWorld

MS = 10**6


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def scheduler() -> Scheduler:
    return Scheduler(32, 4, 4, 16, 64)


def plan(busy: bool = True) -> StepPlan:
    return StepPlan(0, busy, False, (1, 1), (9, 9))


def words(decodes: int, prompts: int = 0, left: bool = False, decode: int = MS, prompt: int = 4 * MS) -> list[int]:
    """With a prompt in every fourth step."""
    return [decodes, prompts, left, decode, prompt, 10**9 // 4]


def held(cadence: Cadence) -> bool:
    cadence.scheduling()
    return cadence._scheduler.holds_prompts


def test_prompts_wait_as_long_as_a_step_with_prompts_takes() -> None:
    cadence = Cadence(scheduler())
    assert not held(cadence)
    cadence.join(plan(), [words(3, prompts=1), words(2)])
    states = []
    for _ in range(8):
        states.append(held(cadence))
        cadence.join(plan(), [words(3), words(2)])
    assert cadence.interval == 4
    assert states == [True, True, True, False, False, False, False, False], "no prompt has come since"
    cadence.join(plan(), [words(3), words(2, prompts=1)])
    assert held(cadence)


def test_it_is_off_while_no_rank_decodes_and_when_prompts_are_left() -> None:
    cadence = Cadence(scheduler())
    cadence.join(plan(), [words(0, prompts=1), words(0)])
    assert not held(cadence)
    cadence.join(plan(), [words(1, prompts=1, left=True), words(1)])
    assert not held(cadence)
    cadence.join(plan(), [words(1, prompts=1), words(1)])
    assert held(cadence)
    cadence.agreed(plan(busy=False))
    assert not held(cadence)


def test_an_interval_is_bounded() -> None:
    cadence = Cadence(scheduler())
    seldom = [*words(1, prompts=1, prompt=10**12)[:-1], 10**6]
    cadence.join(plan(), [seldom, seldom])
    assert cadence.interval == MOST_STEPS
    cadence.join(plan(), [words(1, prompts=1, prompt=10**12), words(1)])
    assert cadence.interval == 8, "for one prompt to come on each of the two ranks"
    cadence.join(plan(), [words(1, decode=0), words(1, decode=0)])
    assert cadence.interval == 1, "nothing has been measured"


def test_prompts_that_come_with_every_step_do_not_wait() -> None:
    cadence = Cadence(scheduler())
    often = [*words(1, prompts=1)[:-1], 2 * 10**9]
    cadence.join(plan(), [often, often])
    assert cadence.interval == 1 and not held(cadence)


def test_times_are_those_of_steps_that_follow_each_other() -> None:
    clock = Clock()
    cadence = Cadence(scheduler(), clock)
    for has_prompts, seconds in ((True, 0.4), (False, 0.1), (False, 0.1)):
        cadence.join(plan(), [words(1, prompts=2 * has_prompts)])
        clock.now += seconds
    cadence.agreed(plan(busy=False))
    clock.now += 100.0
    cadence.join(plan(), [words(1)])
    said = cadence.propose(Schedule(0, rows=[0], counts=[1], samples=[True]))
    assert said[:-1] == (1, 0, False, 100 * MS, 200 * MS), "a prompt of the two; no decode had been measured before"


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_ranks_say_the_same_with_it(tmp_path: Path, async_scheduling: bool) -> None:
    """Prompts come one after another while others decode; every rank takes every step."""
    checkpoint = make_qwen3_moe(tmp_path).path
    found: dict[bool, Any] = {}
    for cadence in (False, True):
        world, bell = MailboxWorld(2), SharedDoorbell()
        one = make_plan(
            checkpoint, data_parallel_size=2, all2all_backend="mailbox", dtype="float32", max_num_batched_tokens=24,
            prefill_cadence=cadence, async_scheduling=async_scheduling, enable_prefix_caching=False,
        )  # fmt: skip
        ranks = [build_rank(one, rank, meet_in({0: world}), bell) for rank in range(2)]
        tokens: dict[int, list[int]] = {number: [] for number in range(8)}
        finished: set[int] = set()
        step = 0
        while len(finished) < 8:
            assert step < 2000
            if step % 3 == 0 and step < 24:
                number = step // 3
                ranks[number % 2].submit(Job([5 + number] * (11 + 4 * number), 12).message(number))
            for outputs in drain(weave(*(rank.steps() for rank in ranks))):
                for output in outputs:
                    tokens[output.request_id] += output.new_token_ids
                    finished |= {output.request_id} if output.finish_reason else set()
            step += 1
        found[cadence] = tokens
        numbers = {(rank.stats.prefill_interval, rank.stats.prefill_held_steps > 0) for rank in ranks}
        assert cadence or numbers == {(1, False)}
        for rank in ranks:
            rank.close()
    assert found[True] == found[False]
