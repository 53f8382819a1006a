"""What steps take, from the beginning of one to that of the next, for the gate (engine/speculation/gate.py)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

from engine.hooks import StepHook
from engine.schedule import Schedule
from engine.speculation.costs import Costs
from engine.speculation.times import StepTimes
from ep.recorder import Kind

LONGEST_GAP = 0.5  # seconds between two steps that follow each other
TOGETHER = 16  # steps without drafts are one sample, at most: the longer a text is the longer they take


class MeteredStep(NamedTuple):
    """Of the rank with most sequences: how many, and the drafts of each of them: that the model makes; where it does
    not, that are wanted of others, to be verified. decodes: whether all ranks only decode, and with a model that drafts
    verify as many. trying: it belongs to a trial, and cold: is not measured; own: to one of this rank's."""

    step: int
    num: int
    depth: int
    decodes: bool
    trying: bool
    cold: bool
    own: bool


class StepMeter:
    """times: what it has measured. costs: of trials. practises: nothing serves; measures: what is computed counts."""

    def __init__(self, times: StepTimes, clock: Callable[[], float]) -> None:
        self.times, self.clock, self.costs = times, clock, Costs()
        self.practises, self.measures = False, True
        self.num_new = 0  # steps measured that are not written yet
        self.last = MeteredStep(-2, 0, 0, False, False, False, False)  # the step before
        self._began = [0.0]  # when it began, and before that those that are not counted yet

    def goes_on(self, number: int, num: int) -> bool:
        """A step of so many sequences that only decodes begins behind one that it is like, both without drafts. False:
        it does not."""
        last = self.last
        if last.step + len(self._began) != number or last.num != num or last.depth or not last.decodes:
            return False
        if last.trying or last.cold:
            return False
        self._began.append(self.clock())
        if len(self._began) > TOGETHER:
            self.count()
        return True

    def count(self) -> None:
        """All steps that are over."""
        began, last = self._began, self.last
        num = len(began) - 1
        if not num:
            return
        self.last, self._began = last._replace(step=last.step + num), began[-1:]
        seconds = began[-1] - began[0]
        if seconds >= LONGEST_GAP:
            took = [gap for first, then in pairwise(began) if (gap := then - first) < LONGEST_GAP]
            seconds, num = sum(took), len(took)
        if num:
            self.costs.add_step(seconds, False, 0.0)
            self._note(last, seconds / num)

    def begins(self, step: MeteredStep, requests_begin: bool, best_rate: float, tokens: float, each: float) -> None:
        """A step begins, and so the one before it is over. requests_begin: with the step. best_rate: tokens per second
        that this rank expects of what is best, if the trial under way is one that is charged; else 0. tokens: that this
        rank's step before has brought. each: by which its time is divided, to be compared with other numbers."""
        self.count()
        now, last, (began,) = self.clock(), self.last, self._began
        self.last, self._began = step, [now]
        if last.step + 1 != step.step or not last.num or now - began >= LONGEST_GAP or requests_begin:
            return  # there may have been nothing to do in between
        charged = last.own and best_rate > 0
        self.costs.add_step(now - began, charged, tokens / best_rate if charged else 0.0)
        if last.decodes and step.decodes and last.num == step.num and not last.cold and self.measures:
            self._note(last, now - began, each)

    def _note(self, step: MeteredStep, seconds: float, each: float = 1.0) -> None:
        """A step of nothing but decodes took so long, until the next one of as many sequences. All ranks hear it, and
        learn the same."""
        if not (step.trying or self.practises):
            self.times.serves(step.num, step.depth)
        self.times.add(step.num, step.depth, seconds, step.trying, each)
        self.num_new += 1


class DraftingStep(StepHook):
    """Says when a step begins how many drafts the model is to make at its end, and measures what those of prompts take.
    Of the thread that computes. needless: without a trial of this rank they would not be made."""

    watches = True

    def __init__(self, step: MeteredStep, meter: StepMeter, needless: bool) -> None:
        self._depth, self._meter, self._trying = step.depth, meter, step.own and needless
        self._prompts: Schedule | None = None
        self._sampled = 0.0

    def begin(self, schedule: Schedule) -> None:
        schedule.draft_depth = self._depth
        if schedule.num_tokens != len(schedule.rows) + schedule.num_drafts:
            self._prompts = schedule

    def ended(self, kind: Kind, num_tokens: int) -> None:
        if self._prompts is None:
            return
        if kind is Kind.SAMPLING:
            self._sampled = self._meter.clock()
        elif kind is Kind.DRAFTING:
            seconds = self._meter.clock() - self._sampled
            self._meter.costs.add_prompts(len(self._prompts.new_rows), seconds, self._trying)
