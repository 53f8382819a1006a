"""When prompts are computed: on all ranks in the same steps, so that the prompt of one rank does not make every decode
of the others wait in a step of its own (docs/serving.md, --prefill-cadence).

All ranks take the same steps, and a step takes as long as its slowest rank. Where prompts come to any rank at any time
nearly every step has one somewhere, and every decode takes as long as a prompt. So prompts are let in only every so
many steps: as many as it takes for one to come on every rank, and no more than decode steps take together the time of a
prompt, because a request may wait that long. Between two such steps decodes are quick, and in one of them all ranks
have prompts to compute. Where prompts are rare none waits: the last one was let in longer ago.

All ranks come to the same decision because it follows from the words of the last record alone. It is off while no rank
decodes, and when a step that let prompts in has left some: waiting would then only make the queue longer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter

from msgspec import structs

from engine.agreement import StepPlan
from engine.hooks import StepCompanion
from engine.schedule import Schedule
from engine.scheduler import Scheduler
from front.messages import RankStats

MOST_STEPS = 32  # from one step with prompts to the next
_SMOOTHING = 1 / 16  # weight of the newest step in the running means
_SECOND = 10**9


class Cadence(StepCompanion):
    """One rank's. Used by the rank's thread."""

    num_words = 6

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float] = perf_counter) -> None:
        self.interval = 1  # steps from one that lets prompts in to the next; equal on all ranks
        self.num_held = 0  # steps in which prompts waited though there was room for them
        self._scheduler = scheduler
        self._clock = clock
        self._decode_seconds = self._prompt_seconds = 0.0  # of a step without prompts; more for each prompt of a rank
        self._rate = 0.0  # prompts that come to all ranks together, per step
        self._began = 0.0  # the last step; 0: none has, of those that follow each other
        # The most prompts that some rank had in the steps that are not over, the newest last.
        self._under_way: deque[int] = deque(maxlen=scheduler.async_depth + 1)
        self._since = 0  # steps since the last that let prompts in
        self._holds = False  # the next step lets none in

    def formed(self) -> None:
        self._rest()

    def dropped(self) -> None:
        self._rest()

    def _rest(self) -> None:
        self._began, self._since, self._holds = 0.0, 0, False
        self._under_way.clear()

    def scheduling(self) -> None:
        self._scheduler.holds_prompts = self._holds

    def propose(self, schedule: Schedule) -> Sequence[int]:
        """The words: decodes and prompts of the step, whether prompts are left, and of what was measured the two times
        in nanoseconds, and the prompts in 10^9 steps."""
        num_prompts = 0
        if schedule.num_tokens > len(schedule.rows) + schedule.num_drafts:
            num_prompts = len(schedule.rows) - schedule.counts.count(1) - sum(map(bool, schedule.drafts))
        left = bool(self._scheduler.waiting) or False in schedule.samples
        measured = (round(value * _SECOND) for value in (self._decode_seconds, self._prompt_seconds, self._rate))
        return (len(schedule.rows) - num_prompts, num_prompts, left, *measured)

    def agreed(self, plan: StepPlan) -> None:
        if not plan.busy:
            self._rest()

    def join(self, plan: StepPlan, said: Sequence[Sequence[int]]) -> None:
        num_decodes = sum(words[0] for words in said)
        prompts, left = [words[1] for words in said], any(words[2] for words in said)
        decode, prompt, rate = (max(words[index] for words in said) for index in (3, 4, 5))
        self._measure(max(prompts))
        self._rate += (sum(prompts) - self._rate) * _SMOOTHING
        self.interval = 1
        if decode and rate:
            self.interval = max(1, min(MOST_STEPS, -(-prompt // decode), -(-len(said) * _SECOND // rate)))
        admitted, has_prompts = not self._holds, any(prompts)
        self.num_held += self._holds and bool(self._scheduler.waiting)
        self._since = 1 if admitted and has_prompts else self._since + 1
        full = admitted and has_prompts and left
        self._holds = num_decodes > 0 and not full and self._since < self.interval

    def add_to(self, stats: RankStats) -> RankStats:
        return structs.replace(stats, prefill_interval=self.interval, prefill_held_steps=self.num_held)

    def _measure(self, num_prompts: int) -> None:
        """From one agreement to the next: the time of the step that has ended meanwhile."""
        now = self._clock()
        if len(self._under_way) == self._under_way.maxlen:
            seconds, num = now - self._began, self._under_way[0]
            if not num:
                self._decode_seconds = _mean(self._decode_seconds, seconds)
            else:
                self._prompt_seconds = _mean(self._prompt_seconds, max(0.0, seconds - self._decode_seconds) / num)
        self._under_way.append(num_prompts)
        self._began = now


def _mean(before: float, value: float) -> float:
    """Running; the first value begins it."""
    return before + (value - before) * _SMOOTHING if before else value
