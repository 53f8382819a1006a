"""How many drafts a request gets: as many as make most tokens per second, by what was measured (docs/speculation.md).

Times are those of the steps that serve (engine/speculation/times.py), until there are any those of practice: only how
they compare counts, as what is chosen is measured at once, and the others are taken to have changed by as much. What is
not chosen is measured in turn by a few steps with it (a *trial*), as soon as all trials together cost no more than a
hundredth of the time, and compared when what was chosen has been measured again behind it. A trial costs what its steps
took longer than the best number would have for as many tokens. Where the model drafts, one without drafts lasts until
its requests end, since they lose the thread by it, and is charged to that end. A number of drafts that is not known and
might be the best is tried at once. Where drafts are looked up (engine/speculation/looked_up.py), trials alternate with
what was chosen, and begin at once where texts have become such that another number would be the best.

What decodes gain has to pay for what prompts lose: of a model that drafts the passes over prompts are measured too, and
divided among the tokens that requests usually have.

Each rank says what it would do in the record of every step (engine/speculation/words.py), and all do what the rank
with most sequences said: the passes of a layer that drafts are exchanges between all of them, and a step is over when
all have computed it. So all learn the same of what a step took, of so many sequences as that rank has, and think about
these. Where drafts are looked up some requests have none, or fewer than are wanted: what a step took is then divided by
the tokens that it brought on all ranks, and what drafts would bring is known of the texts of all.
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
from engine.speculation.looked_up import choice_of
from engine.speculation.meter import DraftingStep, MeteredStep, StepMeter
from engine.speculation.speculation import Speculation
from engine.speculation.times import MARGIN, SETTLED, StepTimes, best_of, size_of
from engine.speculation.trials import (
    AGAIN,
    FIRST,
    LONG_HELD,
    LOOK,
    LOOKED_UP_HELD,
    NONE_HELD,
    PROMISE,
    PROOF,
    TRIAL,
    TURN,
    Trials,
)
from engine.speculation.words import (
    ALTERNATES,
    COLD_STEP,
    DECODES,
    LEADS,
    NUM_FIELDS,
    PROMISING,
    TRIAL_FLAGS,
    TRYING,
    Words,
    leader_of,
)

PRACTISED = (1, 32, 8)  # requests at a time; what steps of other numbers take follows from these
PRACTICE, PRACTICE_OF_MANY = 12, SETTLED + 3  # steps of so many drafts, of one request and more: the first is captured
PRACTICE_SECONDS = 1.5  # for all of them
KEPT = 4096  # steps after which times are written


class Gate(StepCompanion):
    """One rank's. adaptive: False: always as many as there may be. file: where times are remembered; None: nowhere."""

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
        self._speculation, self._choice = speculation, choice_of(speculation, self.meter)
        self.num_words = NUM_FIELDS + len(speculation.rights.words)
        self._adaptive = adaptive
        self._most_sequences = most_sequences  # of a rank
        self._leads, self._file = leads, file if leads else None
        self._most = speculation.max_drafts
        self._wanted = (self._most, self._most)  # drafts to verify, drafts to make
        self._trial = 0  # they are wanted for one: flags of the words
        self._charged = False  # the trial may only cost so much, and its steps are counted
        self._needless = False  # without it no drafts would be made of prompts
        self._without = False  # a trial without drafts is under way: its requests are without any until they end
        self._trials: dict[int, Trials] = {}  # by the size of so many sequences
        self._heard = (-TRIAL, 0)  # the last step of another rank's trial, and its drafts
        self._num_rows = 0  # of the step before, of all ranks
        self._accepted = self._num_accepted = 0  # of this rank's drafts: since the last words; in all until then
        self._verifying = (0, False)  # whether the next step is one of a trial, and of this rank's
        self._lately = deque[int]([], AGAIN)  # this rank's sequences of steps that decode, as sizes
        self._schedule = Schedule(-1)  # the last one that was proposed
        self._words: tuple[int, ...] = ()  # of the last step
        self._like = Schedule(-1)  # steps as this one, nothing but decodes without drafts, have the same words:
        self._num_like = self._left = self._past = 0  # of sequences; more of them, and those that are not counted yet
        self._follows = 0  # sequences of the rank that led the last step, if it was another
        self._said: tuple[Sequence[Sequence[int]], tuple[int, ...]] | None = None  # by all ranks, of such a step
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
        self._said = None
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
            most = self._choice.most_of(num)
            depths = sorted({0, 1, most, *(range(2, most) if num == 1 else ())})
            if num > self._most_sequences:
                continue
            if any(self.times.usual(num, depth) is None for depth in depths):
                captured = [(num, depth, False) for depth in depths] if num == 1 else []
                found += [*captured, *((num, depth, True) for depth in depths)]
            elif not found:
                found = [(num, best_of(self._choice.rates(num)), False)]
        return found

    def propose(self, schedule: Schedule) -> Sequence[int]:
        """The words. A rank that practises something else says zeros, and would make no drafts."""
        self._schedule, like = schedule, self._like
        if self._left and schedule.counts == like.counts and not schedule.new_rows:
            same = bool(schedule.warm) is bool(like.warm)
            self._left -= same
            self._past += same
            if same:
                return self._words
        self._catch_up()
        drafts, num = self._speculation, len(schedule.rows)
        decodes, leads = schedule.num_tokens == num + schedule.num_drafts, num > 0
        if self.practises:
            self._want(self._lesson[0])
        elif self._adaptive and num and drafts.busy:
            num = num if schedule.new_rows else max(num, self._follows)  # before those begin others may have ended
            one = self._trials_of(num)
            if schedule.warm and not any(schedule.warm):
                one.tick()
                if not one.trial[0]:
                    one.trial = (0, 0)
                self._want(0, self._without * TRYING)
            elif decodes:
                self._lately.append(size_of(len(schedule.rows)))
                self._choose(one, num, not schedule.warm)
            else:  # many come one after another: the first of them begin as all go on, or some would have no drafts
                num = max(num, max(set(self._lately), key=self._lately.count, default=0))
                self._begin(self._trials_of(num), num)
            if decodes and not (self._trial or schedule.drafts or any(self._wanted)):
                self._go_on_so(schedule, num)
        leads = leads and (drafts.models or drafts.busy)
        self._accepted = max(0, drafts.num_accepted_tokens - self._num_accepted)
        self._num_accepted = drafts.num_accepted_tokens
        flags = self._trial | decodes * DECODES | leads * LEADS
        self._words = (*self._wanted, 1 + len(schedule.rows), flags, self._accepted, *drafts.rights.words)
        return self._words

    def _go_on_so(self, schedule: Schedule, num: int) -> None:
        """As long as what was chosen stays, and nothing is to be looked up."""
        one = self._trials_of(num)
        if not schedule.warm:
            self._left = max(0, one.held - 1) if one.chosen == 0 and not one.trial[1] else 0
        else:  # none can have any until others begin, or some can
            self._left = 0 if any(schedule.warm) else LONG_HELD
        if self._speculation.looks is not None:
            self._left = max(0, min(self._left, one.look_at - 1 - one.steps))
        self._like, self._num_like = schedule, num

    def _catch_up(self) -> None:
        """What follows is not like the steps before."""
        if self._past:
            self._trials_of(self._num_like).tick(self._past)
            if not self._like.warm:
                self._lately.extend([size_of(len(self._like.rows))] * self._past)
        self._left = self._past = 0

    def join(self, plan: StepPlan, said: Sequence[Sequence[int]]) -> StepHook | None:
        like = (said, plan.num_tokens) == self._said and not self._schedule.new_rows
        if like and self.meter.goes_on(plan.step, self.meter.last.num):
            return None
        self._said = None
        self._catch_up()
        models = self._speculation.models
        words = [Words.of(some) for some in said]
        if (leader := leader_of(words)) is None or not self._most:
            return None
        verify, depth, num, trial = leader.verify, leader.make, leader.num - 1, leader.flags & TRIAL_FLAGS
        verified, self._speculation.depth = self._speculation.depth, verify
        own = leader == self._words[:NUM_FIELDS]
        self._follows, own = 0 if own else num, own and trial & TRYING > 0
        if models:  # more than may be verified have no memory
            depth = min(depth, 1 + self._speculation.max_in_step // num)
            decodes = max(plan.num_tokens) == num * (1 + depth)
        else:  # what this step verifies was said with the one before
            depth, decodes = verified, all(some.flags & DECODES for some in words)
            (trial, own), self._verifying = self._verifying, (trial, own)
        self._speculation.rights.hear(words, said)
        if self.practises:
            self._lesson = self._lesson[0], self._lesson[1] - decodes
        elif not (depth or trial or self._schedule.new_rows) and decodes and self.meter.goes_on(plan.step, num):
            self._said = None if verify or self._verifying[0] else (said, plan.num_tokens)
            return None
        step = MeteredStep(plan.step, num, depth, decodes, trial & TRYING > 0, trial & COLD_STEP > 0, own)
        self._hear(step, trial)
        begin = bool(self._schedule.new_rows) or not (self._schedule.rows or decodes)  # here or on another rank
        self.meter.begins(step, begin, self._best_rate if self._charged else 0.0, *self._brought(words))
        return DraftingStep(step, self.meter, self._needless) if models and depth else None

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

    def _hear(self, step: MeteredStep, flags: int) -> None:
        """Another rank's trial counts as one of this one's."""
        last, (heard, depth) = self.meter.last, self._heard
        if last.trying and not last.own and not step.trying:
            one = self._trials_of(last.num)
            one.end(PROOF if self._speculation.models else 0)
            self._choice.measured(one, last.depth)
        elif step.trying and not step.own:
            if depth != step.depth or not 0 < step.step - heard <= 2 * TURN:  # an epoch begins with step 0
                self._trials_of(step.num).begin(step.depth, 1, self.times.usual(step.num, step.depth), flags)
                if flags & ALTERNATES:
                    self.times.renew(step.num)
            self._heard = step.step, step.depth

    def _want(self, depth: int, trial: int = 0) -> None:
        """trial: flags of the words."""
        self._wanted, self._trial = (depth, depth), trial

    def _begin(self, one: Trials, num: int) -> None:
        """A step with prompts: what is best for so many sequences, if anything is known, not what smaller steps want;
        or the beginning of a trial, which then needs no graphs of steps between two numbers. Where drafts are looked up
        nothing begins with it."""
        one.prompted = one.steps
        if self._speculation.models:
            self._compare(one, num)
        if one.trial[1] and (self._speculation.models or one.chosen is None):
            self._want(one.trial[0], TRYING | COLD_STEP | one.kind)
        elif one.chosen is not None:
            self._want(one.chosen)

    def _compare(self, one: Trials, num: int) -> None:
        self._learn(one, num)
        rates = self._choice.rates(num)
        if one.trial[1] and one.since >= FIRST:
            one.end(PROOF)  # it was long enough
        compares = not (one.trial[1] or one.proving or (self._without and one.chosen))
        if compares:
            one.proves = None
        if compares and 0 in rates:  # while requests have lost the thread nothing else chooses
            best = best_of(rates)
            self._take(one, num, best, rates)
            if one.since >= AGAIN:
                self._try(one, num, rates, best, AGAIN)
        self._needless = one.trial[1] > 0 and not one.chosen

    def _choose(self, one: Trials, num: int, warm: bool) -> None:
        """warm: all of them may have drafts. Others are not measured."""
        one.tick()
        models = self._speculation.models
        if self._without and warm and not any(one.trial):
            one.end(PROOF)  # only now: requests of a trial without drafts had none behind it either
        self._without = self._without and not warm
        if one.alternates and not one.steps % LOOK and self._promises(one, num):
            self._end(one, num)
        if one.trial[1] and warm:
            self._want(*one.go_on())
            if not one.trial[1]:
                self._end(one, num)
                self._choice.measured(one, one.trial[0])
            return
        looked = self._look(one)
        if one.held > 0 and one.chosen is not None and not (looked and self._promises(one, num)):
            self._want(one.chosen, self._without * TRYING)
            return
        self._learn(one, num)
        one.proves = None
        rates = self._choice.rates(num, one)
        best = best_of(rates)
        if one.chosen in rates and rates[best] < rates[one.chosen] * (1 + MARGIN):
            best = one.chosen  # until prompts come: steps between two numbers have graphs of their own
        after = 2 * AGAIN if one.steps - one.prompted >= AGAIN else float("inf")
        if not models:  # no request loses the thread, and behind prompts there is less to be looked up
            after = AGAIN
        if warm and self._try(one, num, rates, best, after):
            self._want(one.trial[0], TRYING | COLD_STEP | one.kind)
        elif rates:
            self._take(one, num, best, rates)
            self._want(best, self._without * TRYING)

    def _end(self, one: Trials, num: int) -> None:
        """A trial of this rank's is over."""
        self.meter.costs.spent += self._choice.lost(one, num)
        one.end(PROOF if self._speculation.models else 0)

    def _promises(self, one: Trials, num: int) -> bool:
        return one.chosen is not None and self._choice.promises(one, num, one.rates, one.chosen) is not None

    def _look(self, one: Trials) -> bool:
        """While no drafts are wanted: see what they would bring. Whether it was time to."""
        if self._speculation.looks is None or self._speculation.depth or one.steps < one.look_at:
            return False
        began, none = self.meter.clock(), self.times.usual(self.meter.last.num, 0)
        self._speculation.look()
        one.looks(self.meter.clock() - began, 0.0 if none is None else none.value)
        return True

    def _learn(self, one: Trials, num: int) -> None:
        """What was measured until now."""
        self.meter.count()
        self._choice.learn()
        self.times.keep_pace(num, one.proves)
        if self.meter.num_new >= KEPT:
            self.close()

    def _take(self, one: Trials, num: int, best: int, rates: Mapping[int, float]) -> None:
        most_held = LONG_HELD if self._speculation.models else LOOKED_UP_HELD if best else NONE_HELD
        one.choose(best, rates, most_held)
        self._choice.measured(one, best)
        self._best_rate = rates[best]

    def _try(self, one: Trials, num: int, rates: dict[int, float], best: int, after: float) -> bool:
        """Whether a trial begins, as the rank that leads. after: steps since the last one, where all are known."""
        promised = self._choice.promises(one, num, rates, best)
        tried = self._choice.to_try(one, num, rates, best, after) if promised is None else promised
        if tried is None or self._follows:
            return False
        usual = self.times.usual(num, tried)
        alternates = not self._speculation.models and one.chosen is not None and promised is None
        steps = PROMISE if promised is not None else (1 + alternates) * self._choice.length(num, tried)
        one.begin(tried, steps, usual, alternates * ALTERNATES if promised is None else PROMISING)
        if alternates:
            self.times.renew(num)
        self._charged, self._best_rate = usual is not None and not alternates, rates.get(best, 0.0)
        self._without = not tried
        return True

    # ---- measuring ----

    def _brought(self, words: Sequence[Words]) -> tuple[float, float]:
        """Tokens that the step before has brought to the sequences of the rank that leads; and to each sequence, by
        which what it took is divided, where requests have drafts or none. Where there were none: what is likely."""
        last, rows = self.meter.last, self._num_rows
        self._num_rows = sum(some.num - 1 for some in words)
        if self._speculation.models:
            return last.num + self._accepted, 1.0
        each = 1.0
        if last.depth:
            each += sum(some.accepted for some in words) / rows if rows else self._choice.tokens(last.depth) - 1
        return last.num * each, each
