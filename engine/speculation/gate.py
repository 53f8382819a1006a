"""How many drafts a request gets: as many as make most tokens per second, by what was measured (docs/speculation.md).

Times are those of the steps that serve (engine/speculation/times.py). Where a number of drafts has not been measured
for so many sequences, and might be the best, a few steps are made with it. Each rank says what it would do in the
record of every step, and all do what the rank with most sequences said: the passes of a layer that drafts are exchanges
between all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

from engine.agreement import StepPlan
from engine.hooks import StepCompanion, StepHook
from engine.schedule import Schedule
from engine.speculation.speculation import Speculation
from engine.speculation.times import MARGIN, SETTLED, StepTimes, expected_tokens, size_of, tokens_per_second
from ep.recorder import Kind

AGAIN = 256  # steps of a size, after which what is not chosen is measured once more
HELD = 8  # steps of a size for which what was chosen stays, where all that bears on it is known
KEPT = 4096  # steps after which times are written
LONGEST_GAP = 0.5  # seconds between two steps that follow each other


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
        self._chosen: dict[int, int] = {}  # of so many sequences
        self._num_steps: dict[int, int] = {}
        self._settled: set[int] = set()  # sizes for which nothing was left to measure at the last choice
        self._tried: dict[tuple[int, int], int] = {}  # steps made to measure so many drafts of so many sequences
        self._part = 1.0  # of the sequences, that have drafts where they may
        self._ended = (-1, 0.0)  # the last step, and when it began
        self._last_took = 0.0
        self._unwritten = 0

    def propose(self, schedule: Schedule) -> Sequence[int]:
        """The words: drafts to verify in the next step, drafts to make in this one, sequences."""
        num = len(schedule.rows)
        if self._adaptive and num and self._speculation.busy:
            if schedule.num_tokens == num + schedule.num_drafts:
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
        return _Clocked(self, depth if self._speculation.models else 0)

    def close(self) -> None:
        if self._file is not None and self._unwritten:
            with contextlib.suppress(OSError):
                self.times.write(self._file)

    # ---- choosing ----

    def _begin(self, num: int) -> None:
        """A step with prompts: what was chosen for so many sequences, if anything was, not what smaller steps want.
        Drafts are made of them now and then, or they could not be measured again."""
        chosen = self._chosen.get(size_of(num))
        if chosen is not None:
            again = self._tried.get((size_of(num), 1), 0) == -AGAIN
            self._wanted = (chosen, max(chosen, int(again)))

    def _choose(self, num: int, warm: bool) -> None:
        """warm: all of them may have drafts. Others are not measured, and bear on nothing that is chosen: a request
        that comes is warm."""
        size = size_of(num)
        steps = self._num_steps[size] = self._num_steps.get(size, 0) + 1
        if steps % AGAIN == 0:
            self._tried.update({(size, depth): -AGAIN for depth in range(self._most + 1)})
        elif steps % HELD and size in self._settled:
            self._wanted = (self._chosen[size], self._chosen[size])
            return
        self._settled.discard(size)
        drafts, best, best_rate, all_known = self._speculation, 0, 0.0, True
        least = 0.0  # seconds that a step with more drafts takes at least
        for depth in range(self._most + 1):
            most_tokens = num * expected_tokens(drafts.acceptance, depth)
            if least and most_tokens / least < best_rate:
                break
            part = 1.0 if drafts.models else self._part
            rate = tokens_per_second(self.times, drafts.acceptance, num, part, depth, drafts.models)
            tried = self._tried.get((size, depth), 0)
            if warm and ((rate is None and 0 <= tried < 3 * SETTLED) or -AGAIN <= tried < 2 - AGAIN):
                self._tried[size, depth] = tried + 1
                self._wanted = (depth, max(depth, 1))  # none to verify, but made: so nobody loses the thread
                return
            if rate is None:
                all_known = False
                continue
            least = num * (1 + part * (expected_tokens(drafts.acceptance, depth) - 1)) / rate
            if rate > best_rate * (1 + MARGIN if best == 0 and depth else 1):
                best, best_rate = depth, rate
        if not best_rate:
            if not warm:
                return  # nothing is known, and nothing can be: what others want stays
            best = 1
        if all_known:
            self._settled.add(size)
        self._chosen[size] = best
        self._wanted = (best, best)

    # ---- what the thread that computes tells ----

    def note(self, schedule: Schedule, began: float, computed: float, ended: float) -> None:
        """A step is over: when it began, when its tokens were sampled, and when drafts were made."""
        num, (last, last_began) = len(schedule.rows), self._ended
        self._ended = (schedule.step_id, began)
        if not num or schedule.num_tokens != num + schedule.num_drafts:
            self._ended = (-1, 0.0)
            return
        self.times.add_step(schedule.num_tokens, computed - began)
        if schedule.draft_depth and not schedule.warm:
            self.times.add_drafting(num, schedule.draft_depth, ended - computed)
        if schedule.drafts and not self._speculation.models:
            self._part += 0.05 * (sum(map(bool, schedule.drafts)) / num - self._part)
        if last + 1 == schedule.step_id and began - last_began < LONGEST_GAP:
            self.times.beside.add(max(0.0, began - last_began - self._last_took))
        self._last_took = ended - began
        self._unwritten += 1
        if self._unwritten >= KEPT:
            self.close()
            self._unwritten = 0

    def now(self) -> float:
        return self._clock()


class _Clocked(StepHook):
    """Of one step: says how many drafts are to be made at its end, and how long its parts take."""

    watches = True

    def __init__(self, gate: Gate, depth: int) -> None:
        self._gate, self._depth = gate, depth
        self._began = self._computed = 0.0

    def begin(self, schedule: Schedule) -> None:
        schedule.draft_depth = self._depth
        self._schedule, self._began = schedule, self._gate.now()

    def ended(self, kind: Kind, num_tokens: int) -> None:
        if kind is Kind.SAMPLING:
            self._computed = self._gate.now()
            if not self._depth:
                self._gate.note(self._schedule, self._began, self._computed, self._computed)
        elif kind is Kind.DRAFTING:
            self._gate.note(self._schedule, self._began, self._computed, self._gate.now())
