"""How many drafts a request gets: as many as make most tokens per second, by what was measured (docs/speculation.md).

Times are those of the steps that serve (engine/speculation/times.py). Where a number of drafts has not been measured
for so many sequences, and might be the best, a few steps are made with it (a *trial*), as long as all trials together
have cost no more than a hundredth of the time. Each rank says what it would do in the record of every step, and all do
what the rank with most sequences said: the passes of a layer that drafts are exchanges between all of them. So all
learn the same of what a step took where the model drafts.
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

AGAIN = 64  # steps of a size, after which something else is measured once more, if it may cost that
NONE_AGAIN = 64  # times of these, after which no drafts are: requests lose the thread by it
HELD = 8  # steps of a size for which what was chosen stays, where all that bears on it is known
TRIAL = SETTLED + 3  # steps: one that begins it, one that may compile, and one that ends it
TRIALS = 3  # of what turns out not to be measured
WORSE = 0.9  # of the best: more drafts than those that make so few tokens are not tried
SHARE = 0.01  # of the time, that trials of what is known already may cost
KEPT = 4096  # steps after which times are written
LONGEST_GAP = 0.5  # seconds between two steps that follow each other


class _Size:
    """Of steps of about so many sequences. tried: trials of so many drafts; trial: the one under way, and its steps
    that are left; chosen: None: nothing yet; held: steps for which it stays."""

    def __init__(self) -> None:
        self.tried: dict[int, int] = {}
        self.trial = (0, 0)
        self.chosen: int | None = None
        self.steps = self.held = self.rounds = 0
        self.again = False  # it is time to measure something else once more


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
        self._sizes: dict[int, _Size] = {}
        self._part = 1.0  # of the sequences, that have drafts where they may
        self._last, self._began = _Step(-2, 0, 0, 0, False), 0.0  # the step before, and when it began
        self._served = self._spent = 0.0  # seconds: of all steps, and what trials cost
        self._best_rate = 0.0  # of what was last chosen; 0: not known
        self._unwritten = 0

    def propose(self, schedule: Schedule) -> Sequence[int]:
        """The words: drafts to verify in the next step, drafts to make in this one, sequences."""
        num = len(schedule.rows)
        if self._adaptive and num and self._speculation.busy:
            if schedule.warm and not any(schedule.warm):
                self._wanted = (0, 0)
            elif schedule.num_tokens == num + schedule.num_drafts:
                self._choose(num, not schedule.warm)
            else:
                self._begin(num)
        return (*self._wanted, num)

    def join(self, plan: StepPlan, said: Sequence[Sequence[int]]) -> StepHook | None:
        if not self._most or not (self._speculation.busy or self._speculation.models):
            return None
        verify, depth, num = max(said, key=lambda words: words[2])
        if not num:  # of a rank that practises the others hear no number, and it makes no drafts
            return None
        self._speculation.depth = verify
        depth = min(depth, 1 + self._speculation.max_in_step // num)  # more could not be verified, and have no memory
        depth = depth if self._speculation.models else 0
        return _Clocked(self, _Step.of(plan, num, depth))

    def close(self) -> None:
        if self._file is not None and self._unwritten:
            with contextlib.suppress(OSError):
                self.times.write(self._file)

    # ---- choosing ----

    def _begin(self, num: int) -> None:
        """A step with prompts: what was chosen for so many sequences, if anything was, not what smaller steps want.
        Drafts are made of them where something is to be measured, or it could not be."""
        one = self._sizes.setdefault(size_of(num), _Size())
        if one.chosen is None and 0 in (rates := self._rates(num)):  # other ranks have measured it, or an earlier start
            one.chosen = _best(rates)
        if one.chosen is not None:
            tries = one.trial[1] > 0 or (one.again and self._may_try())
            self._wanted = (one.chosen, max(one.chosen, int(tries)))

    def _choose(self, num: int, warm: bool) -> None:
        """warm: all of them may have drafts. Others are not measured."""
        one = self._sizes.setdefault(size_of(num), _Size())
        one.steps += 1
        if one.steps % AGAIN == 0:
            one.rounds += 1
            one.again = True
        depth, left = one.trial
        if left and warm:
            one.trial = (depth, left - 1)
            self._wanted = (depth, depth)
            return
        one.held -= 1
        if one.held > 0 and one.chosen is not None:
            self._wanted = (one.chosen, one.chosen)
            return
        rates = self._rates(num)
        best = _best(rates)
        self._best_rate = rates.get(best, 0.0)
        tried = self._to_try(one, num, rates, best) if warm else None
        if tried is not None:
            one.tried[tried] = one.tried.get(tried, 0) + 1
            one.trial = (tried, TRIAL - 1)
            if (
                tried in rates
            ):  # the first step of it and the last bring what a step without drafts does, or little more
                tokens = num * expected_tokens(self._speculation.acceptance, tried)
                self._spent += max(0.0, TRIAL * tokens / rates[tried] - (TRIAL - 2) * tokens / self._best_rate)
            self._wanted = (tried, tried)
        elif rates:
            one.chosen, one.held = best, HELD
            self._wanted = (best, best)

    def _most_of(self, num: int) -> int:
        return min(self._most, max(1, self._speculation.max_in_step // num))

    def _rates(self, num: int) -> dict[int, float]:
        """Tokens per second by the number of drafts, as far as they are known."""
        drafts = self._speculation
        rates = {
            depth: tokens_per_second(self.times, drafts.acceptance, num, self._part, depth, drafts.models)
            for depth in range(self._most_of(num) + 1)
        }
        return {depth: rate for depth, rate in rates.items() if rate is not None}

    def _may_try(self) -> bool:
        return self._spent <= SHARE * self._served

    def _to_try(self, one: _Size, num: int, rates: dict[int, float], best: int) -> int | None:
        """So many drafts are to be measured now; None: nothing is. More of them one after another, as long as they may
        be better; none at all last: requests lose the thread by it, where the model drafts."""
        acceptance, best_rate = self._speculation.acceptance, rates.get(best, 0.0)
        may = not rates or self._may_try()
        for depth in range(1, self._most_of(num) + 1 if may else 0):
            if depth not in rates:
                before = rates.get(depth - 1)
                # A step with more drafts takes at least as long.
                gain = expected_tokens(acceptance, depth) / expected_tokens(acceptance, depth - 1)
                if one.tried.get(depth, 0) < TRIALS and (before is None or before * gain > best_rate):
                    return depth
                break
            if rates[depth] < WORSE * best_rate:
                break
        if 0 not in rates:
            return 0 if one.tried.get(0, 0) < TRIALS else None
        if not (one.again and may):
            return None
        one.again = False
        near = [depth for depth in rates if depth > 0 and (best == 0 or abs(depth - best) == 1)]
        if best and one.rounds % NONE_AGAIN == 0:
            return 0
        return near[one.rounds % len(near)] if near else None

    # ---- what the thread that computes tells ----

    def begun(self, step: _Step, schedule: Schedule) -> None:
        """A step begins, and so the one before it is over."""
        now, last, began = self._clock(), self._last, self._began
        num, drafts = len(schedule.rows), schedule.num_drafts
        if not self._speculation.models:
            # Tokens say nothing of what others verify, so each rank knows of its own.
            decodes = num == step.num and schedule.num_tokens == num + drafts
            step = step._replace(decodes=decodes, num_tokens=schedule.num_tokens)
            if schedule.drafts:
                self._part += 0.05 * (sum(map(bool, schedule.drafts)) / num - self._part)
        self._last, self._began = step, now
        following = last.decodes and step.decodes and last.step + 1 == step.step and last.num == step.num
        if following and not schedule.new_rows and now - began < LONGEST_GAP:
            self._note(last, now - began)

    def _note(self, step: _Step, seconds: float) -> None:
        """A step of nothing but decodes took so long, until the next one of as many sequences. All ranks hear it, and
        learn the same."""
        self._served += seconds
        if step.depth:
            self.times.add_drafting(step.num, step.depth, seconds)
        else:
            self.times.add_step(step.num_tokens, seconds)
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
    the rank with most. decodes: whether they only decode, and verify as many drafts."""

    step: int
    num: int
    num_tokens: int
    depth: int
    decodes: bool

    @classmethod
    def of(cls, plan: StepPlan, num: int, depth: int) -> _Step:
        most = max(plan.num_tokens)
        return cls(plan.step, num, most, depth, most == num * (1 + depth))


class _Clocked(StepHook):
    """Of one step: says how many drafts are to be made at its end, and when it begins."""

    watches = True

    def __init__(self, gate: Gate, step: _Step) -> None:
        self._gate, self._step = gate, step

    def begin(self, schedule: Schedule) -> None:
        schedule.draft_depth = self._step.depth
        self._gate.begun(self._step, schedule)
