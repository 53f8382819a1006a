"""Whether a rank proposes to split its steps (docs/dbo.md): from how many tokens on that pays, which is measured when
no rank has work; and how much of the exchanges is hidden.

All ranks have the same crossover. A rank that knows one tells it to the others when an epoch is formed: a rank
that has measured it in this life, else what the first rank finds on disk. If none knows, no step is split until it has
been measured; what came from disk is checked, and measured anew if the exchange takes another time now.

Nothing is measured when an epoch is formed, because requests may wait for that: those of ranks that are lost come once
the next ones have met. When a step's record says that no rank has work, all ranks take one run of the measurement
instead of a step, and then agree anew: so whatever comes meanwhile waits for one run. Where there is a crossover from
disk, and in a later epoch than the first one, there has been some work before: a start is as short as it can be.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from msgspec import structs

from dbo.memory import Remembered, recall, remember
from dbo.steps import Steps
from dbo.threshold import MARGIN, NEVER, SLACK, Crossover, Sample, Threshold, search
from engine.agreement import StepPlan
from engine.hooks import StepCompanion
from engine.overlap.measure import Measure, Times
from engine.runner import Runner
from engine.schedule import Schedule
from ep.instrumented import ExchangeTimes
from ep.transport.group import Group
from front.messages import RankStats

log = logging.getLogger("moesaic.overlap")

SECONDS = 10.0  # that measuring may take; a small model needs a fraction of one
SHORT_SECONDS = 0.05  # a layer that takes less is measured
REPEATS = 3  # times
CHECKS = 5  # runs at most that what was remembered is checked with, after a first one that is slow
STILL = 1.5  # what was remembered holds while the exchange takes less than so many times as long, or as short
RECENT = 0.98  # how slowly the reported ratio forgets, per report

_NOTHING, _REMEMBERED, _KNOWN = range(3)


class _Taken(NamedTuple):
    """A run on all ranks. exchange: seconds per layer that it was held up by its exchanges; whole: that it took;
    seconds: of the whole run, on the rank where it took longest."""

    exchange: float
    whole: float
    seconds: float


_Run = Callable[[], Steps[Times]]
_Runs = Generator[_Run, _Taken, None]  # asks for runs, and is sent what they have taken; equal on all ranks


class Overlap(StepCompanion):
    """One rank's. Used by the rank's thread.

    `times` are of the lanes. num_ubatches: of a step that is split; crossover: given, not measured; where it has
    a None, that is measured. measure: makes what measures (it takes memory). memory: file to remember in; None:
    nowhere. Its word says that this rank would measure: one that still practises (engine/process/warm_up.py) does not,
    and ranks come to the end of that one after another.
    """

    num_words = 1

    def __init__(
        self,
        runner: Runner,
        times: ExchangeTimes,
        num_ubatches: int,
        decode_tokens: int | None,
        prefill_tokens: int | None,
        measure: Callable[[], Measure],
        memory: Path | None = None,
    ) -> None:
        self.num_steps = 0  # that were split
        self._runner = runner
        self._times = times
        self._num_ubatches = num_ubatches
        self._given = (decode_tokens, prefill_tokens)
        self._make_measure = measure
        self._memory = memory
        self._known: Crossover | None = None
        if decode_tokens is not None and prefill_tokens is not None:
            self._known = Crossover(decode_tokens, prefill_tokens)
        self._measured = self._known is None
        self._threshold = self._make_threshold()
        self._runs: _Runs | None = None
        self._may_measure = True
        self._taken: _Taken | None = None  # by the last run
        self._seconds = 0.0  # by all of them
        self._seen = (0.0, 0.0)
        self._communication = self._exposed = 0.0

    def propose_parts(self, schedule: Schedule, num_tokens: int) -> int:
        """In how many parts this rank would compute that step."""
        return self._threshold.propose(num_tokens, num_tokens > len(schedule.rows) + schedule.num_drafts)

    def propose(self, schedule: Schedule) -> Sequence[int]:
        return (1,)

    def join(self, plan: StepPlan, proposals: Sequence[Sequence[int]]) -> None:
        self.num_steps += plan.parts > 1
        self._may_measure = self._may_measure or _all_would(proposals)

    def add_to(self, stats: RankStats) -> RankStats:
        """With what is known here."""
        return structs.replace(stats, dbo_steps=self.num_steps, dbo_overlap=self._ratio())

    def _ratio(self) -> float:
        """The part of the time that tokens were lately under way in which this rank computed instead of waiting for
        them."""
        communication, exposed = self._times.communication, self._times.exposed
        self._communication = RECENT * self._communication + communication - self._seen[0]
        self._exposed = RECENT * self._exposed + exposed - self._seen[1]
        self._seen = communication, exposed
        return 1 - self._exposed / self._communication if self._communication else 0.0

    @property
    def waits(self) -> bool:
        """There is something to measure as soon as no rank has work or practises."""
        return self._runs is not None and self._may_measure

    def to_be_measured(self, proposals: Sequence[Sequence[int]]) -> bool:
        """Now, as the record says that none has work; equal on all ranks. proposals: as of `join`."""
        return self.waits and _all_would(proposals)

    def begin(self, group: Group, serves: bool) -> Steps[None]:
        """The ranks of an epoch have met: come to one crossover, if one of them knows any. Nothing when it is given, or
        for a rank alone. serves: it is not the first epoch. Raises PeerLost."""
        self._runs = self._taken = None
        self._may_measure = not serves  # else once there has been work
        if not self._measured or group.size == 1:
            return
        found = recall(self._memory) if self._memory is not None and self._known is None else None
        gathered = group.all_gather_ints(self._record(found))
        yield
        records = gathered.wait()
        best = max(record[0] for record in records)
        _, decode, prefill, tokens, exchange = next(record for record in records if record[0] == best)
        if best == _NOTHING:
            self._runs = self._measure(group.rank == 0)
            return
        self._know(Crossover(decode, prefill))
        if best == _REMEMBERED:
            self._may_measure = False
            self._runs = self._check(tokens, exchange * 1e-9, group.rank == 0)

    def measure(self, group: Group) -> Steps[None]:
        """One run of what there is to measure. All ranks do it together, when none has work. Raises PeerLost."""
        assert self._runs is not None
        try:
            run = next(self._runs) if self._taken is None else self._runs.send(self._taken)
        except StopIteration:
            self._runs = self._taken = None
            return
        began, before = monotonic(), (self._times.communication, self._times.exposed)
        times = yield from self._runner.apart(run())
        gathered = group.all_gather_ints([round(value * 1e9) for value in (*times, monotonic() - began)])
        yield
        self._taken = _taken(gathered.wait())
        self._seconds += self._taken.seconds
        # What was measured was no step.
        communication, exposed = self._times.communication - before[0], self._times.exposed - before[1]
        self._seen = self._seen[0] + communication, self._seen[1] + exposed

    def _record(self, found: Remembered | None) -> list[int]:
        if self._known is not None:
            return [_KNOWN, *self._known, 0, 0]
        check = None if found is None else found.check
        if found is None or check is None:
            return [_NOTHING, 0, 0, 0, 0]
        return [_REMEMBERED, *found.crossover, check.tokens, round(check.exchange * 1e9)]

    def _know(self, crossover: Crossover) -> None:
        self._known = crossover
        self._threshold = self._make_threshold()
        decode, prefill = (f"from {tokens} tokens" if tokens < NEVER else "never" for tokens in crossover)
        log.info(
            "event=dbo_crossover steps are split in %d: decodes %s, prompts %s", self._num_ubatches, decode, prefill
        )

    def _make_threshold(self) -> Threshold:
        known = self._known or Crossover(NEVER, NEVER)
        given = [own if asked is None else asked for asked, own in zip(self._given, known, strict=True)]
        return Threshold(self._num_ubatches, Crossover(*given), SLACK if self._measured else 0.0)

    # ---- measuring ----

    def _check(self, tokens: int, exchange: float, leads: bool) -> _Runs:
        """Measure anew unless the exchange takes as long as was remembered, but for MARGIN of a step. One run that
        agrees is enough: what else the machine does makes an exchange longer, never shorter."""
        self._seconds = 0.0
        measure = self._make_measure()
        if tokens <= measure.max_tokens:
            yield partial(measure.run, tokens, True, 1)
            taken = []
            for _ in range(CHECKS):
                taken.append((yield partial(measure.run, tokens, True, 1)))
                now, whole = _best(taken)
                if exchange / STILL <= now <= exchange * STILL or abs(now - exchange) < MARGIN * whole:
                    return
        yield from self._measure(leads)

    def _measure(self, leads: bool) -> _Runs:
        self._seconds = 0.0
        measure = self._make_measure()
        found: list[tuple[int, list[Sample]]] = []
        for has_prefill, given in enumerate(self._given):
            if given is None:
                found.append((yield from self._search(measure, bool(has_prefill))))
            else:
                found.append((given, []))
        (decode, decode_samples), (prefill, prefill_samples) = found
        self._know(Crossover(decode, prefill))
        log.info("event=dbo_measured seconds=%.2f", self._seconds)
        if self._memory is None or not leads:
            return
        try:
            remember(self._memory, Remembered(Crossover(decode, prefill), decode_samples, prefill_samples))
        except OSError as error:
            log.warning("what was measured cannot be remembered: %s", error)

    def _search(self, measure: Measure, has_prefill: bool) -> Generator[_Run, _Taken, tuple[int, list[Sample]]]:
        """The crossover of one kind of steps, and what was measured of it."""
        samples: list[Sample] = []
        searching = search(_sizes(measure.max_tokens if has_prefill else measure.max_seqs))
        answer: Sample | None = None
        per_token = 0.0
        while True:
            try:
                tokens = next(searching) if not samples else searching.send(answer)
            except StopIteration as done:
                return done.value, samples
            if self._seconds + per_token * tokens > SECONDS:
                answer = None
                continue
            before = self._seconds
            answer = yield from self._sample(measure, has_prefill, tokens)
            samples.append(answer)
            per_token = (self._seconds - before) / tokens

    def _sample(self, measure: Measure, has_prefill: bool, tokens: int) -> Generator[_Run, _Taken, Sample]:
        """Whole and split in turn, so that whatever else the machine does hits both; the first of each is slow."""
        as_one = partial(measure.run, tokens, has_prefill, 1)
        in_parts = partial(measure.run, tokens, has_prefill, self._num_ubatches)
        whole: list[_Taken] = []
        for _ in range(3):
            whole.append((yield as_one))
        exchange, one = _best(whole[1:])
        if exchange <= MARGIN * one:
            return Sample(tokens, exchange, one, one)  # there is nothing to be saved
        yield in_parts
        split: list[_Taken] = []
        for repeat in range(REPEATS if one < SHORT_SECONDS else 1):
            split.append((yield in_parts))
            if repeat > 0:
                whole.append((yield as_one))
        exchange, one = _best(whole[1:])
        return Sample(tokens, exchange, one, min(taken.whole for taken in split))


def _all_would(proposals: Sequence[Sequence[int]]) -> bool:
    """Whether no rank practises."""
    return all(word for (word,) in proposals)


def _taken(rows: Sequence[Sequence[int]]) -> _Taken:
    """Of what every rank took: nanoseconds per layer, those of them that it waited, and of the run.

    A rank also waits for another one that computes longer, which a split does not change. So the step is compared with
    the rank that computes longest.
    """
    wholes, waits, seconds = ([1e-9 * value for value in column] for column in zip(*rows, strict=True))
    computed = max(whole - exposed for whole, exposed in zip(wholes, waits, strict=True))
    return _Taken(max(0.0, max(wholes) - computed), max(wholes), max(seconds))


def _best(taken: Sequence[_Taken]) -> tuple[float, float]:
    """The exchange and the whole, each of the run in which it was least."""
    return min(one.exchange for one in taken), min(one.whole for one in taken)


def _sizes(largest: int) -> list[int]:
    """Powers of two from 16 on, and the largest."""
    sizes = [1 << bits for bits in range(4, largest.bit_length()) if 1 << bits < largest]
    return [*sizes, largest]
