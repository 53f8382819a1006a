"""How many drafts a request gets: as many as make most tokens per second, by what was measured (docs/speculation.md).

Times are those of the steps that serve (engine/speculation/times.py), until there are any those of practice before the
rank was ready: only how they compare counts, as what is chosen is measured at once, and the others are taken to have
changed by as much. What is not chosen is measured in turn by a few steps with it (a *trial*), as soon as all trials
together cost no more than a hundredth of the time. A trial costs what its steps took longer than the best number would
have for as many tokens. Where the model drafts, one without drafts lasts until its requests end, since they lose the
thread by it, and is charged to that end; where drafts are looked up, trials alternate with what was chosen. A number of
drafts that practice could not measure, and that might be the best, is tried at once.

What decodes gain has to pay for what prompts lose: of a model that drafts the passes over prompts are measured too, and
divided among the tokens that requests usually have.

Each rank says what it would do in the record of every step, and all do what the rank with most sequences said: the
passes of a layer that drafts are exchanges between all of them, and a step is over when all have computed it. So all
learn the same of what a step took. Where drafts are looked up some requests have none, or fewer than are wanted: what a
step took is then divided by the tokens that it brought.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter

from engine.agreement import StepPlan
from engine.hooks import Lesson, StepCompanion, StepHook
from engine.schedule import Schedule
from engine.speculation.costs import Costs
from engine.speculation.meter import MeteredStep, StepMeter
from engine.speculation.speculation import Speculation
from engine.speculation.times import MARGIN, SETTLED, StepTimes, best_of, expected_tokens, size_of
from engine.speculation.trials import AGAIN, AHEAD, COLD, FIRST, NEAR, PROOF, TRIAL, TRIALS, TURN, Trials
from ep.recorder import Kind

PRACTISED = (1, 32, 8)  # requests at a time; what steps of other numbers take follows from these
PRACTICE, PRACTICE_OF_MANY = 12, SETTLED + 3  # steps of so many drafts, of one request and more: the first is captured
PRACTICE_SECONDS = 1.5  # for all of them
KEPT = 4096  # steps after which times are written
RECENT_PART = 0.05  # of a step


class Gate(StepCompanion):
    """One rank's. adaptive: False: always as many as there may be. file: where times are remembered; None: nowhere."""

    num_words = 5

    def __init__(
        self,
        speculation: Speculation,
        adaptive: bool,
        file: Path | None = None,
        leads: bool = False,
        clock: Callable[[], float] = perf_counter,
        most_sequences: int = 1,
    ) -> None:
        times = StepTimes.read(file) if file is not None else None
        self.meter = StepMeter(times or StepTimes(), clock)
        self.times.paired = not speculation.models
        self._speculation = speculation
        self._adaptive = adaptive
        self._most_sequences = most_sequences  # of a rank
        self._leads, self._file = leads, file if leads else None
        self._most = speculation.max_drafts
        self._wanted = (self._most, self._most)  # drafts to verify, drafts to make
        self._trial = 0  # they are wanted for one; 2: it has just begun
        self._charged = False  # the trial is one of those that may only cost so much
        self._needless = False  # without it no drafts would be made of prompts
        self._without = False  # a trial without drafts is under way: its requests are without any until they end
        self._trials: dict[int, Trials] = {}  # by the size of so many sequences
        self._part = 1.0  # of the sequences, that have drafts where they may; all, where the model drafts
        self._heard = (-TRIAL, 0)  # the last step of another rank's trial, and its drafts
        self._num_rows = self._num_accepted = 0  # of this rank's step before; of all until then
        self._verifying = (0, False)  # whether the next step is one of a trial, and of this rank's
        self._lately = deque[int]([], AGAIN)  # sequences of steps that decode, as sizes
        self._schedule = Schedule(-1)  # the last one that was proposed
        self._best_rate = 0.0  # of what was last chosen; 0: not known
        self._lesson = (0, 0)  # drafts to practise, steps that are left

    @property
    def times(self) -> StepTimes:
        return self.meter.times

    def lessons(self) -> Iterator[Lesson]:
        """How long steps take that are not known yet; what is, is only captured for one request. Of all numbers of
        drafts of that one, of others none, one and the most."""
        if not self._adaptive or not self._speculation.models:
            return
        meter = self.meter
        end = meter.clock() + PRACTICE_SECONDS
        self.practises = meter.practises = True
        known = self.times.told()
        for num, depth, measured in self._unknown():
            began = meter.clock()
            self._lesson, meter.measures = (depth, PRACTICE if num == 1 else PRACTICE_OF_MANY), measured
            own = num if self._leads or num > 1 or not measured else 0  # one stream is one rank's
            until = float("inf") if own else end  # the rank that leads may practise no more by then
            yield Lesson(own, partial(self._goes_on, until))
            if 2 * meter.clock() - began > end:
                break
        self.practises, meter.practises, meter.measures = False, False, True
        self.times.settle(self._most)
        self._trials.clear()
        meter.costs, self._trial = Costs(), 0
        if self.times.told() != known:
            self.close()

    def _goes_on(self, until: float) -> bool:
        return self._lesson[1] > 0 and self.meter.clock() < until

    def _unknown(self) -> list[tuple[int, int, bool]]:
        """Sequences and drafts that are to be practised, and whether to be measured: steps of one are captured first,
        by all ranks."""
        found: list[tuple[int, int, bool]] = []
        for num in PRACTISED:
            most = self._most_of(num)
            depths = sorted({0, 1, most, *(range(2, most) if num == 1 else ())})
            if num > self._most_sequences:
                continue
            if any(self.times.usual(num, depth) is None for depth in depths):
                captured = [(num, depth, False) for depth in depths] if num == 1 else []
                found += [*captured, *((num, depth, True) for depth in depths)]
            elif not found:
                found = [(num, best_of(self._rates(num)), False)]
        return found

    def propose(self, schedule: Schedule) -> Sequence[int]:
        """The words: drafts to verify in the next step, drafts to make in this one, one and the sequences, whether the
        step is one of a trial (1) that is not measured (2), and whether it has nothing but decodes. A rank that
        practises something else says zeros, and would make no drafts."""
        self._schedule, num = schedule, len(schedule.rows)
        decodes = schedule.num_tokens == num + schedule.num_drafts
        if self.practises:
            self._want(self._lesson[0], False)
        elif self._adaptive and num and self._speculation.busy:
            one = self._trials_of(num)
            if schedule.warm and not any(schedule.warm):
                one.tick()
                if not one.trial[0]:
                    one.trial = (0, 0)
                self._want(0, self._without)
            elif decodes:
                self._lately.append(size_of(num))
                self._choose(one, num, not schedule.warm)
            else:  # many come one after another: the first of them begin as all go on, or some would have no drafts
                num = max(num, max(set(self._lately), key=self._lately.count, default=0))
                self._begin(self._trials_of(num), num)
        return (*self._wanted, 1 + len(schedule.rows), self._trial, decodes)

    def join(self, plan: StepPlan, said: Sequence[Sequence[int]]) -> StepHook | None:
        models = self._speculation.models
        if not self._most or not (models or self._speculation.busy):
            return None
        verify, depth, num, trial, _ = said[0] if len(said) == 1 else max(said, key=lambda words: words[2])
        num -= 1
        if num <= 0 or not all(words[2] for words in said):
            return None
        verified, self._speculation.depth = self._speculation.depth, verify
        own = self._trial > 0 and trial > 0 and len(self._schedule.rows) == num
        if models:  # more than may be verified have no memory
            depth = min(depth, 1 + self._speculation.max_in_step // num)
            decodes = max(plan.num_tokens) == num * (1 + depth)
        else:  # what this step verifies was said with the one before
            depth, decodes = verified, all(words[4] for words in said)
            (trial, own), self._verifying = self._verifying, (trial, own)
        if self.practises:
            self._lesson = self._lesson[0], self._lesson[1] - decodes
        elif not (depth or trial or self._schedule.new_rows) and decodes and self.meter.goes_on(plan.step, num):
            return None
        step = MeteredStep(plan.step, num, depth, decodes, trial > 0, trial > 1, own)
        self._hear(step)
        begin = bool(self._schedule.new_rows) or not (self._schedule.rows or decodes)  # here or on another rank
        self.meter.begins(step, begin, self._best_rate if self._charged else 0.0, *self._brought(self.meter.last))
        if depth and not models and self._schedule.rows:
            part = sum(map(bool, self._schedule.drafts)) / len(self._schedule.rows)
            self._part += RECENT_PART * (part - self._part)
        return _Drafting(self, step) if models and depth else None

    def close(self) -> None:
        if self._file is not None and self.meter.num_new:
            self.meter.num_new = 0
            with contextlib.suppress(OSError):
                self.times.write(self._file)

    # ---- choosing ----

    def _trials_of(self, num: int) -> Trials:
        size = size_of(num)
        if size not in self._trials:
            self._trials[size] = Trials()
        return self._trials[size]

    def _hear(self, step: MeteredStep) -> None:
        """Another rank's trial counts as one of this one's."""
        last, (heard, depth) = self.meter.last, self._heard
        if last.trying and not last.own and not step.trying:
            self._trials_of(last.num).end(PROOF if self._speculation.models else 0)
        elif step.trying and not step.own:
            if depth != step.depth or not 0 < step.step - heard <= 2 * TURN:  # an epoch begins with step 0
                paired = not self._speculation.models
                self._trials_of(step.num).begin(step.depth, 1, self.times.usual(step.num, step.depth), paired)
                if paired:
                    self.times.renew(step.num)
            self._heard = step.step, step.depth

    def _want(self, depth: int, trying: bool, cold: bool = False) -> None:
        self._wanted, self._trial = (depth, depth), trying + (trying and cold)

    def _begin(self, one: Trials, num: int) -> None:
        """A step with prompts: what is best for so many sequences, if anything is known, not what smaller steps want;
        or the beginning of a trial, which then needs no graphs of steps between two numbers."""
        one.prompted = one.steps
        self._learn(one, num)
        rates = self._rates(num)
        if one.trial[1] and one.since >= FIRST:
            one.end(PROOF)  # it was long enough
        compares = not one.trial[1] and not one.proving
        if compares:
            one.proves = None
        if compares and 0 in rates:  # while requests have lost the thread nothing else chooses
            best = best_of(rates)
            self._take(one, num, best, rates)
            if one.since >= AGAIN and self._speculation.models:
                self._try(one, num, rates, best, AGAIN)
        self._needless = one.trial[1] > 0 and not one.chosen
        if one.trial[1]:
            self._want(one.trial[0], True, True)
        elif one.chosen is not None:
            self._want(one.chosen, False)

    def _choose(self, one: Trials, num: int, warm: bool) -> None:
        """warm: all of them may have drafts. Others are not measured."""
        one.tick()
        models = self._speculation.models
        self._without = self._without and not warm
        depth, left = one.trial
        if left and warm:
            one.trial = (depth, left - 1)
            if left == 1:
                one.end(PROOF if models else 0)
            if models or one.chosen is None:
                self._want(depth, True, one.steps - one.tried_at[depth] < COLD)
            else:
                on = left // TURN % 2 > 0
                self._want(depth if on else one.chosen, on)
            return
        if one.held > 0 and one.chosen is not None:
            self._want(one.chosen, self._without)
            return
        self._learn(one, num)
        one.proves = None
        rates = self._rates(num)
        best = best_of(rates)
        if one.chosen in rates and rates[best] < rates[one.chosen] * (1 + MARGIN):
            best = one.chosen  # until prompts come: steps between two numbers have graphs of their own
        after = 2 * AGAIN if one.steps - one.prompted >= AGAIN else float("inf")
        if not models:  # no request loses the thread, and behind prompts there is less to be looked up
            after = AGAIN
        if warm and self._try(one, num, rates, best, after):
            self._want(one.trial[0], True, True)
        elif rates:
            self._take(one, num, best, rates)
            self._want(best, self._without)

    def _learn(self, one: Trials, num: int) -> None:
        """What was measured until now."""
        self.times.keep_pace(num, one.proves)
        if self.meter.num_new >= KEPT:
            self.close()

    def _take(self, one: Trials, num: int, best: int, rates: Mapping[int, float]) -> None:
        one.choose(best)
        self._best_rate = rates[best]
        self.times.serves(num, best)

    def _try(self, one: Trials, num: int, rates: dict[int, float], best: int, after: float) -> bool:
        """Whether a trial begins. after: so many steps since the last one, where all are known."""
        tried = self._to_try(one, num, rates, best, after)
        if tried is None:
            return False
        usual = self.times.usual(num, tried)
        alternates = not self._speculation.models and one.chosen is not None
        one.begin(tried, (1 + alternates) * self._length(num, tried), usual, alternates)
        if alternates:
            self.times.renew(num)
        self._without, self._charged, self._best_rate = not tried, usual is not None, rates.get(best, 0.0)
        return True

    def _length(self, num: int, depth: int) -> int:
        """Steps of a trial. One step has more drafts than another where they are looked up."""
        usual = self.times.usual(num, depth)
        return TRIAL if not self._speculation.models or (usual is not None and usual.measured) else FIRST

    def _most_of(self, num: int) -> int:
        return min(self._most, max(1, self._speculation.max_in_step // num))

    def _rates(self, num: int) -> dict[int, float]:
        """Tokens per second by the number of drafts, as far as they are known."""
        drafts = self._speculation
        usual = drafts.usual_output
        prompts = self.meter.costs.of_request / usual if usual and drafts.models else 0.0  # seconds per token
        found: dict[int, float] = {}
        for depth in range(self._most_of(num) + 1):
            step = self.times.usual(num, depth)
            if step is not None:
                rate = num * (expected_tokens(drafts.acceptance, depth) if drafts.models else 1.0) / step.value
                found[depth] = rate / (1 + rate * prompts) if depth else rate
        return found

    def _tokens(self, depth: int) -> float:
        """That a step with so many drafts probably brings to a sequence."""
        return 1.0 + self._part * (expected_tokens(self._speculation.acceptance, depth) - 1.0)

    def _to_try(self, one: Trials, num: int, rates: dict[int, float], best: int, after: float) -> int | None:
        """So many drafts are to be measured now; None: nothing is. None at all last: requests lose the thread by it,
        where the model drafts."""
        models, best_rate = self._speculation.models, rates.get(best, 0.0)
        if not models:  # as many as are made at first; then none, which only costs what the drafts would have brought
            for depth in (self._most_of(num), 0):
                if depth not in rates and one.tried.get(depth, 0) < TRIALS:
                    return depth
        better = best_rate * (1 + MARGIN) if best == 0 else best_rate
        most = float("inf")  # sequences times steps per second: one with more drafts takes at least as long
        for depth in range(self._most_of(num) + 1):
            tokens = self._tokens(depth)
            if depth in rates:
                most = min(most, rates[depth] / tokens)
            elif depth and one.tried.get(depth, 0) < TRIALS and tokens * most > better:
                return depth
        if 0 not in rates:
            return 0 if one.tried.get(0, 0) < TRIALS or one.since >= AGAIN else None
        others = [depth for depth in rates if depth != best]
        if not others or one.since < after:
            return None
        if one.doubted and best:
            return 0
        # What is known: that which was measured longest ago, as soon as it may cost what it probably will. Of what was
        # not, that which may well be as good: first the most drafts, as they tell how often each place is right, then
        # that which is nearest; this at once where none at all is nearly as good as the best.
        far = {depth: best_rate / rates[depth] if rates[depth] * NEAR < best_rate else 0.0 for depth in others}
        nearest = one.tried or (best and rates[0] * (1 + 2 * MARGIN) > best_rate)
        order = {depth: -rates[depth] if nearest else -depth for depth in others}
        depth = min(others, key=lambda depth: (one.tried_at.get(depth, -1), far[depth], order[depth]))
        tokens = self._length(num, depth) * num * self._tokens(depth)
        if not depth and models:
            tokens = max(tokens, num * self._speculation.usual_output)
        loss = min(1 / rates[depth], 2.5 / rates[best]) - 1 / rates[best]  # what seems to be worse may not be so
        ahead = 0.0 if far[depth] else AHEAD * num * self._tokens(best) / rates[best]
        return depth if self.meter.costs.may_cost(tokens * loss, ahead) else None

    # ---- measuring ----

    def _brought(self, last: MeteredStep) -> tuple[float, float]:
        """Tokens that this rank's step before has brought; and to each sequence, by which what it took is divided,
        where requests have drafts or none. Where this rank had no requests: what is likely."""
        drafts, rows = self._speculation, self._num_rows
        accepted = max(0, drafts.num_accepted_tokens - self._num_accepted)
        self._num_rows, self._num_accepted = len(self._schedule.rows), drafts.num_accepted_tokens
        if drafts.models or not last.depth:
            return rows + accepted, 1.0
        return rows + accepted, 1.0 + accepted / rows if rows else self._tokens(last.depth)

    def drafted(self, step: MeteredStep, schedule: Schedule, seconds: float) -> None:
        """The passes over a step with prompts took so long. Of the thread that computes."""
        self.meter.costs.add_prompts(len(schedule.new_rows), seconds, step.own and self._needless)


class _Drafting(StepHook):
    """Of one step: says how many drafts are to be made at its end, when it begins, and what drafts of prompts take."""

    watches = True

    def __init__(self, gate: Gate, step: MeteredStep) -> None:
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
            self._sampled = self._gate.meter.clock()
        elif kind is Kind.DRAFTING:
            self._gate.drafted(self._step, self._prompts, self._gate.meter.clock() - self._sampled)
