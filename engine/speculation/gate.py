"""How many drafts a request gets: as many as make most tokens per second, by what was measured (docs/speculation.md).

Times are those of the steps that serve (engine/speculation/times.py). Where a number of drafts has not been measured
for so many sequences, and might be the best, a few steps are made with it (a *trial*), and later a few more, as what
else the machine does may have made all of the first ones longer. What was measured so is measured again, as long as
that has cost no more than a hundredth of the time. A trial costs what its steps took longer than the best number would
have for as many tokens. One without drafts lasts until its requests end, since they lose the thread by it, and is
charged to that end.

What decodes gain has to pay for what prompts lose: of a model that drafts the passes over prompts are measured too, and
divided among the tokens that requests usually have.

Each rank says what it would do in the record of every step, and all do what the rank with most sequences said: the
passes of a layer that drafts are exchanges between all of them. So all learn the same of what a step took where the
model drafts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from engine.agreement import StepPlan
from engine.hooks import StepCompanion, StepHook
from engine.schedule import Schedule
from engine.speculation.speculation import Speculation
from engine.speculation.times import MARGIN, SETTLED, StepTimes, expected_tokens, size_of, tokens_per_second
from ep.recorder import Kind

AGAIN = 64  # steps of a size, after which something else is measured once more, if it may cost that
FAR_AGAIN = 8  # times of these, after which that may be something much worse than the best
HELD = 8  # steps of a size for which what was chosen stays, where all that bears on it is known
COLD = 4  # steps of a trial that are not measured: behind prompts and other numbers much comes from memory anew
TRIAL = COLD + SETTLED + 3  # steps: those, one that begins it, one that may compile, and one that ends it
TRIALS = 3  # of what turns out not to be measured; of none at all one more every AGAIN steps
SURE = 2  # trials after which what was measured is trusted
DOUBT = 2.0  # times as long as they usually do, all steps of a trial may have taken by chance
REQUESTS = 64  # of those that drafts were made of last, what prompts lose by it counts
WORSE = 0.9  # of the best: numbers of drafts that make fewer tokens are measured again more rarely
SHARE = 0.01  # of the time, that trials of what is known already may cost
KEPT = 4096  # steps after which times are written
EVERY = 8  # steps without drafts, of which one is measured where nothing is tried: measuring takes time, too
LONGEST_GAP = 0.5  # seconds between two steps that follow each other


class _Size:
    """Of steps of about so many sequences. tried: trials of so many drafts, and tried_at: in which step the last one
    began; trial: the one under way, and its steps that are left; chosen: None: nothing yet; held: steps for which it
    stays; pace: what was chosen when that was last asked, and seconds of its steps."""

    def __init__(self) -> None:
        self.tried: dict[int, int] = {}
        self.tried_at: dict[int, int] = {}
        self.trial = (0, 0)
        self.chosen: int | None = None
        self.pace: tuple[int, float] | None = None
        self.steps = self.held = self.rounds = 0
        self.again = False  # it is time to measure something else once more

    def tick(self) -> None:
        self.steps += 1
        if self.steps % AGAIN == 0:
            self.rounds += 1
            self.again = True


class _Costs:
    """Seconds: served, of all steps; spent, what trials cost. Of prompts that drafts were made of."""

    def __init__(self) -> None:
        self.served = self.spent = self._trial = 0.0
        self._prompts, self._rows = 0.0, -1  # the first one compiles

    @property
    def may_try(self) -> bool:
        return self.spent <= SHARE * self.served

    def add_step(self, seconds: float, num: int, trying: bool, needed: float) -> None:
        """num: such steps, of which one was measured. needed: that the best would have taken. A trial may have been
        better: then it has cost nothing."""
        self.served += num * seconds
        if trying:
            self._trial += seconds - needed
        elif self._trial:
            self.spent += max(0.0, self._trial)
            self._trial = 0.0

    def add_prompts(self, rows: int, seconds: float, trying: bool) -> None:
        """Passes over prompts that so many sequences begin with, made only for a trial or not."""
        if trying:
            self.spent += seconds
        if self._rows < 0:
            self._rows = 0
            return
        if self._rows >= REQUESTS:
            self._rows, self._prompts = self._rows // 2, self._prompts / 2
        self._rows, self._prompts = self._rows + rows, self._prompts + seconds

    @property
    def of_request(self) -> float:
        """Seconds that its prompt takes longer by drafts."""
        return self._prompts / self._rows if self._rows > 0 else 0.0


class Gate(StepCompanion):
    """One rank's. adaptive: False: always as many as there may be. file: where times are remembered; None: nowhere."""

    num_words = 3

    def __init__(
        self,
        speculation: Speculation,
        adaptive: bool,
        file: Path | None = None,
        leads: bool = False,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.times = (StepTimes.read(file) if file is not None else None) or StepTimes()
        self._speculation = speculation
        self._adaptive = adaptive
        self._file = file if leads else None
        self._clock = clock
        self._most = speculation.max_drafts
        self._wanted = (self._most, self._most)  # drafts to verify, drafts to make
        self._trying = self._cold = False  # they are wanted for a trial; it has just begun
        self._charged = False  # the trial is one of those that may only cost so much
        self._without = False  # a trial without drafts is under way: its requests are without any until they end
        self._sizes: dict[int, _Size] = {}  # by sequences; those of one size share theirs
        self._part = 1.0  # of the sequences, that have drafts where they may
        self._last = _Step(-2, 0, 0, 0, False, False, False, 0.0)  # the step before
        self._began = 0.0  # when it began
        self._schedule = Schedule(-1)  # the last one that was proposed
        self._costs = _Costs()
        self._best_rate = 0.0  # of what was last chosen; 0: not known
        self._unwritten = 0

    def propose(self, schedule: Schedule) -> Sequence[int]:
        """The words: drafts to verify in the next step, drafts to make in this one, sequences."""
        self._schedule, num = schedule, len(schedule.rows)
        if self._adaptive and num and self._speculation.busy:
            one = self._sizes.get(num)
            if one is None:
                one = self._sizes[num] = self._sizes.setdefault(size_of(num), _Size())
            if schedule.warm and not any(schedule.warm):
                one.tick()
                if not one.trial[0]:
                    one.trial = (0, 0)
                self._want(0, self._without)
            elif schedule.num_tokens == num + schedule.num_drafts:
                self._choose(one, num, not schedule.warm)
            else:
                self._begin(one, num)
        return (*self._wanted, num)

    def join(self, plan: StepPlan, said: Sequence[Sequence[int]]) -> StepHook | None:
        if not self._most or not (self._speculation.busy or self._speculation.models):
            return None
        verify, depth, num = said[0] if len(said) == 1 else max(said, key=lambda words: words[2])
        if not num:  # of a rank that practises the others hear no number, and it makes no drafts
            return None
        self._speculation.depth = verify
        # More than may be verified have no memory.
        depth = min(depth, 1 + self._speculation.max_in_step // num) if self._speculation.models else 0
        if not depth and not self._trying and self._speculation.models and plan.step % EVERY > 1:
            return None
        most = max(plan.num_tokens)
        decodes = most == num * (1 + depth)
        step = _Step(plan.step, num, most, depth, decodes, self._trying, self._trying and self._cold, 0.0)
        self._begins(step, self._schedule)
        return _Drafting(self, step) if depth else None

    def close(self) -> None:
        if self._file is not None and self._unwritten:
            with contextlib.suppress(OSError):
                self.times.write(self._file)

    # ---- choosing ----

    def _want(self, depth: int, trying: bool, cold: bool = False) -> None:
        self._wanted, self._trying, self._cold = (depth, depth), trying, cold

    def _begin(self, one: _Size, num: int) -> None:
        """A step with prompts: what was chosen for so many sequences, if anything was, not what smaller steps want.
        Drafts are made of them where something is to be measured, or it could not be."""
        self._keep_pace(one, num)
        rates = self._rates(num)
        if 0 in rates:  # while requests have lost the thread nothing else chooses
            one.chosen = _best(rates)
        if one.chosen is not None:
            tries = one.trial[1] > 0 or (one.again and self._to_try(one, num, rates, one.chosen) is not None)
            self._wanted = (one.chosen, max(one.chosen, int(tries)))
            self._trying = not one.chosen and tries
            one.held = 0 if tries else one.held  # it begins with the next step, or requests lose the thread in that

    def _choose(self, one: _Size, num: int, warm: bool) -> None:
        """warm: all of them may have drafts. Others are not measured."""
        one.tick()
        self._without = self._without and not warm
        depth, left = one.trial
        if left and warm:
            one.trial = (depth, left - 1)
            self._want(depth, True, left >= TRIAL - COLD)
            return
        one.held -= 1
        if one.held > 0 and one.chosen is not None:
            self._want(one.chosen, self._without)
            return
        self._keep_pace(one, num)
        rates = self._rates(num)
        best = _best(rates)
        self._best_rate = rates.get(best, 0.0)
        tried = self._to_try(one, num, rates, best) if warm else None
        if tried is not None:
            one.again = False
            one.tried[tried] = one.tried.get(tried, 0) + 1
            one.tried_at[tried] = one.steps
            usual = self.times.usual(num, tried)
            if usual is not None:
                usual.again()
            one.trial = (tried, TRIAL - 1)
            self._without, self._charged = not tried, one.tried[tried] > SURE
            self._want(tried, True, True)
        elif rates:
            one.chosen, one.held = best, HELD
            self._want(best, self._without)

    def _keep_pace(self, one: _Size, num: int) -> None:
        """What else the machine does makes all steps longer for a while: by as much as those that were chosen have
        become longer, what was measured of others is taken to have, so that they are compared as they were then."""
        if not self._speculation.models or one.chosen is None:
            return
        usual = self.times.usual(num, one.chosen)
        before, one.pace = one.pace, None if usual is None else (one.chosen, usual.value)
        if before is None or one.pace is None or before[0] != one.chosen or before[1] == one.pace[1]:
            return
        for depth in range(self._most_of(num) + 1):
            other = self.times.usual(num, depth)
            if other is not None and depth != one.chosen:
                other.scale(one.pace[1] / before[1])

    def _most_of(self, num: int) -> int:
        return min(self._most, max(1, self._speculation.max_in_step // num))

    def _rates(self, num: int, hopeful: bool = False) -> dict[int, float]:
        """Tokens per second by the number of drafts, as far as they are known. hopeful: as they might be, by what has
        been measured."""
        drafts = self._speculation
        usual = drafts.usual_output
        prompts = self._costs.of_request / usual if usual and drafts.models else 0.0  # seconds per token
        found: dict[int, float] = {}
        for depth in range(self._most_of(num) + 1):
            rate = tokens_per_second(self.times, drafts.acceptance, num, self._part, depth, drafts.models, hopeful)
            if rate is not None:
                found[depth] = rate / (1 + rate * prompts) if depth else rate
        return found

    def _to_try(self, one: _Size, num: int, rates: dict[int, float], best: int) -> int | None:
        """So many drafts are to be measured now; None: nothing is. None at all last: requests lose the thread by it,
        where the model drafts."""
        acceptance, best_rate = self._speculation.acceptance, rates.get(best, 0.0)
        better = best_rate * (1 + MARGIN) if best == 0 else best_rate
        most = float("inf")  # sequences times steps per second: one with more drafts takes at least as long
        for depth in range(self._most_of(num) + 1):
            tokens = expected_tokens(acceptance, depth)
            if depth in rates:
                most = min(most, rates[depth] / tokens)
            elif depth and one.tried.get(depth, 0) < TRIALS and tokens * most > better:
                return depth
        if 0 not in rates:
            return 0 if one.tried.get(0, 0) < TRIALS or one.again else None
        if self._speculation.models:
            for depth, rate in rates.items():
                usual, tried = self.times.usual(num, depth), one.tried.get(depth, 0)
                if tried > SURE:
                    continue  # it was broken off more than once
                if rate >= WORSE * best_rate and not tried and usual and not usual.measured:
                    return depth  # what an earlier start remembers is measured once in this one
                if one.again and depth != best and usual and not usual.sure and rate * DOUBT > best_rate:
                    return depth
        return self._again(one, num, rates, best)

    def _again(self, one: _Size, num: int, rates: dict[int, float], best: int) -> int | None:
        """What is known, and to be measured once more: of what may be as good as the best what was measured longest
        ago. Chance may have made few steps of it long."""
        if not one.again or not self._costs.may_try:
            return None
        others = [depth for depth in rates if depth != best]
        hopes, least = self._rates(num, hopeful=True), WORSE * rates.get(best, 0.0)
        near = [depth for depth in others if hopes[depth] >= least]
        if one.rounds % FAR_AGAIN:
            others = near
        return min(others, key=lambda depth: one.tried_at.get(depth, -1), default=None)

    # ---- measuring ----

    def now(self) -> float:
        return self._clock()

    def _begins(self, step: _Step, schedule: Schedule) -> None:
        """A step begins, and so the one before it is over."""
        now, last, began = self._clock(), self._last, self._began
        if step.trying:
            acceptance = self._speculation.acceptance
            tokens = sum(expected_tokens(acceptance, len(drafts)) for drafts in schedule.drafts)
            step = step._replace(tokens=tokens or float(len(schedule.rows)))
        if not self._speculation.models:
            # Tokens say nothing of what others verify, so each rank knows of its own.
            num, num_tokens = len(schedule.rows), schedule.num_tokens
            decodes = num == step.num and num_tokens == num + schedule.num_drafts
            step = step._replace(decodes=decodes, num_tokens=num_tokens)
            if schedule.drafts:
                self._part += 0.05 * (sum(map(bool, schedule.drafts)) / num - self._part)
        self._last, self._began = step, now
        if last.step + 1 != step.step or not last.num or now - began >= LONGEST_GAP:
            return  # there may have been nothing to do in between
        if schedule.new_rows or not (schedule.rows or step.decodes):
            return  # requests begin, here or on another rank
        rate = self._best_rate
        charged = self._charged and last.trying and rate > 0
        num = EVERY if self._speculation.models and not last.depth and not last.trying else 1
        self._costs.add_step(now - began, num, charged, last.tokens / rate if charged else 0.0)
        if last.decodes and step.decodes and last.num == step.num and not last.cold:
            self._note(last, now - began)

    def drafted(self, step: _Step, schedule: Schedule, seconds: float) -> None:
        """The passes over a step with prompts took so long. Of the thread that computes."""
        self._costs.add_prompts(len(schedule.new_rows), seconds, step.trying)

    def _note(self, step: _Step, seconds: float) -> None:
        """A step of nothing but decodes took so long, until the next one of as many sequences. All ranks hear it, and
        learn the same."""
        if step.depth:
            self.times.add_drafting(step.num, step.depth, seconds, step.trying)
        else:
            self.times.add_step(step.num_tokens, seconds, step.trying)
        self._unwritten += 1
        if self._unwritten >= KEPT:
            self.close()
            self._unwritten = 0


def _best(rates: Mapping[int, float]) -> int:
    """The number of drafts that makes most tokens per second."""
    best = 0
    for depth, rate in rates.items():
        if rate > rates.get(best, 0.0) * (1 + MARGIN if best == 0 else 1):
            best = depth
    return best


class _Step(NamedTuple):
    """Of the rank with most sequences: how many, and the drafts that the model makes for each of them. num_tokens: of
    the rank with most. decodes: whether they only decode, and verify as many drafts. trying: it belongs to a trial, and
    cold: is not measured. tokens: of this rank, that it may be expected to bring."""

    step: int
    num: int
    num_tokens: int
    depth: int
    decodes: bool
    trying: bool
    cold: bool
    tokens: float


class _Drafting(StepHook):
    """Of one step: says how many drafts are to be made at its end, when it begins, and what drafts of prompts take."""

    watches = True

    def __init__(self, gate: Gate, step: _Step) -> None:
        self._gate, self._step = gate, step
        self._prompts: Schedule | None = None
        self._sampled = 0.0

    def begin(self, schedule: Schedule) -> None:
        schedule.draft_depth = self._step.depth
        if schedule.num_tokens != len(schedule.rows) + schedule.num_drafts:
            self._prompts = schedule

    def ended(self, kind: Kind, num_tokens: int) -> None:
        if self._prompts is None:
            return
        if kind is Kind.SAMPLING:
            self._sampled = self._gate.now()
        elif kind is Kind.DRAFTING:
            self._gate.drafted(self._step, self._prompts, self._gate.now() - self._sampled)
