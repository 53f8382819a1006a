"""Whether a rank wishes its steps split (docs/dbo.md): from how many tokens on that pays, which is measured when the ranks
first meet; and how much of the exchanges is hidden.

All ranks have the same crossover. Whoever has come to know one tells it to the others when an epoch is formed: a rank that
has measured it in this life, else what the first rank finds on disk, if the exchange still takes as long. If nobody knows,
all measure.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import structs

from dbo.gate import HOPELESS, MARGIN, NEVER, SLACK, Crossover, Gate, Sample, search
from dbo.memory import Remembered, recall, remember
from dbo.steps import Steps
from engine.measure import Measure, Times
from engine.messages import RankStats
from engine.runner import Runner
from engine.schedule import Schedule
from ep.group import Group
from ep.timed import Flights

log = logging.getLogger("moesaic.overlap")

SECONDS = 10.0  # that measuring may take; a small model needs a fraction of one
SHORT_SECONDS = 0.05  # a layer that takes less is measured
REPEATS = 3  # times
STILL = 1.5  # what was remembered holds while the exchange takes less than so many times as long, or as short
RECENT = 0.98  # how slowly the reported ratio forgets, per report

_NOTHING, _REMEMBERED, _KNOWN = range(3)


class Overlap:
    """One rank's. Used by the rank's thread.

    `flights` are of the model's lanes. num_parts: of a step that is split; crossover: given, not measured; where it has a
    None, that is measured. measure: makes what measures (it takes memory). memory: file to remember in; None: nowhere.
    """

    def __init__(
        self,
        runner: Runner,
        flights: Flights,
        num_parts: int,
        decode_tokens: int | None,
        prefill_tokens: int | None,
        measure: Callable[[], Measure],
        memory: Path | None = None,
    ) -> None:
        self.num_steps = 0  # that were split
        self._runner = runner
        self._flights = flights
        self._num_parts = num_parts
        self._given = (decode_tokens, prefill_tokens)
        self._make_measure = measure
        self._memory = memory
        self._known: Crossover | None = None
        if decode_tokens is not None and prefill_tokens is not None:
            self._known = Crossover(decode_tokens, prefill_tokens)
        self._measured = self._known is None
        self._gate = self._make_gate()
        self._seen = (0.0, 0.0)
        self._flown = self._waited = 0.0

    def wish(self, schedule: Schedule, num_tokens: int) -> int:
        """In how many parts this rank would compute that step."""
        return self._gate.wish(num_tokens, num_tokens > len(schedule.rows))

    def add_to(self, stats: RankStats) -> RankStats:
        """With what is known here."""
        return structs.replace(stats, dbo_steps=self.num_steps, dbo_overlap=self._ratio())

    def _ratio(self) -> float:
        """The part of the time that tokens were lately under way in which this rank computed instead of waiting for them."""
        flown, waited = self._flights.flown, self._flights.waited
        self._flown = RECENT * self._flown + flown - self._seen[0]
        self._waited = RECENT * self._waited + waited - self._seen[1]
        self._seen = flown, waited
        return 1 - self._waited / self._flown if self._flown else 0.0

    def begin(self, group: Group) -> Steps[None]:
        """The ranks of an epoch have met: come to one crossover. Nothing when it is given, or for a rank alone. Raises PeerLost."""
        if not self._measured or group.size == 1:
            return
        found = recall(self._memory) if self._memory is not None and self._known is None else None
        gathered = group.all_gather_ints(self._record(found))
        yield
        records = gathered.wait()
        best = max(record[0] for record in records)
        _, decode, prefill, tokens, exchange = next(record for record in records if record[0] == best)
        if best == _NOTHING or (best == _REMEMBERED and not (yield from self._still(group, tokens, exchange * 1e-9))):
            yield from self._measure(group)
        else:
            self._know(Crossover(decode, prefill))
        self._seen = self._flights.flown, self._flights.waited  # what was measured was no step

    def _record(self, found: Remembered | None) -> list[int]:
        if self._known is not None:
            return [_KNOWN, *self._known, 0, 0]
        check = None if found is None else found.check
        if found is None or check is None:
            return [_NOTHING, 0, 0, 0, 0]
        return [_REMEMBERED, *found.crossover, check.tokens, round(check.exchange * 1e9)]

    def _know(self, crossover: Crossover) -> None:
        self._known = crossover
        self._gate = self._make_gate()
        decode, prefill = (f"from {tokens} tokens" if tokens < NEVER else "never" for tokens in crossover)
        log.info("event=dbo_crossover steps are split in %d: decodes %s, prompts %s", self._num_parts, decode, prefill)

    def _make_gate(self) -> Gate:
        known = self._known or Crossover(NEVER, NEVER)
        given = [own if asked is None else asked for asked, own in zip(self._given, known, strict=True)]
        return Gate(self._num_parts, Crossover(*given), SLACK if self._measured else 0.0)

    # ---- measuring ----

    def _still(self, group: Group, tokens: int, exchange: float) -> Steps[bool]:
        """Whether the exchange takes as long as was remembered."""
        measure = self._make_measure()
        if tokens > measure.max_tokens:
            return False
        taken = []
        for _ in range(3):
            taken.append((yield from self._runner.apart(measure.run(tokens, True, 1))))
        now, whole = yield from _exchange(group, taken[1:])
        return exchange / STILL <= now <= exchange * STILL or abs(now - exchange) < HOPELESS * whole

    def _measure(self, group: Group) -> Steps[None]:
        began = time.monotonic()
        measure = self._make_measure()
        found: list[tuple[int, list[Sample]]] = []
        for has_prefill, given in enumerate(self._given):
            if given is None:
                found.append((yield from self._search(group, measure, bool(has_prefill), began)))
            else:
                found.append((given, []))
        (decode, decode_samples), (prefill, prefill_samples) = found
        self._know(Crossover(decode, prefill))
        log.info("event=dbo_measured seconds=%.2f", time.monotonic() - began)
        if self._memory is None or group.rank > 0:
            return
        try:
            remember(self._memory, Remembered(Crossover(decode, prefill), decode_samples, prefill_samples))
        except OSError as error:
            log.warning("what was measured cannot be remembered: %s", error)

    def _search(
        self, group: Group, measure: Measure, has_prefill: bool, began: float
    ) -> Steps[tuple[int, list[Sample]]]:
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
            started = time.monotonic()
            (spent,) = yield from _slowest(group, started - began)
            if spent + per_token * tokens > SECONDS:
                answer = None
            else:
                answer = yield from self._sample(group, measure, has_prefill, tokens)
                samples.append(answer)
            (per_token,) = yield from _slowest(group, (time.monotonic() - started) / tokens)

    def _sample(self, group: Group, measure: Measure, has_prefill: bool, tokens: int) -> Steps[Sample]:
        """Whole and split in turn, so that whatever else the machine does hits both; the first of each is slow."""

        def run(num_parts: int) -> Steps[Times]:
            return self._runner.apart(measure.run(tokens, has_prefill, num_parts))

        whole: list[Times] = []
        for _ in range(3):
            whole.append((yield from run(1)))
        exchange, one = yield from _exchange(group, whole[1:])
        if exchange <= MARGIN * one:
            return Sample(tokens, exchange, one, one)  # there is nothing to be saved
        yield from run(self._num_parts)
        split: list[Times] = []
        for repeat in range(REPEATS if one < SHORT_SECONDS else 1):
            split.append((yield from run(self._num_parts)))
            if repeat > 0:
                whole.append((yield from run(1)))
        exchange, one = yield from _exchange(group, whole[1:])
        (several,) = yield from _slowest(group, min(times.whole for times in split))
        return Sample(tokens, exchange, one, several)


def _exchange(group: Group, taken: Sequence[Times]) -> Steps[tuple[float, float]]:
    """Seconds per layer that a whole step is held up by its exchanges, and that it takes: in the best of these runs.

    A rank also waits for another one that computes longer, which a split does not change. So the step is compared with the
    rank that computes longest.
    """
    gathered = group.all_gather_ints([round(value * 1e9) for times in taken for value in times])
    yield
    columns = [[1e-9 * value for value in column] for column in zip(*gathered.wait(), strict=True)]
    exchanges, wholes = [], []
    for whole, waited in zip(columns[::2], columns[1::2], strict=True):
        computed = max(one - other for one, other in zip(whole, waited, strict=True))
        wholes.append(max(whole))
        exchanges.append(max(0.0, max(whole) - computed))
    return min(exchanges), min(wholes)


def _slowest(group: Group, *seconds: float) -> Steps[list[float]]:
    """Each of these on the rank where it is longest."""
    gathered = group.all_gather_ints([round(value * 1e9) for value in seconds])
    yield
    return [max(column) * 1e-9 for column in zip(*gathered.wait(), strict=True)]


def _sizes(largest: int) -> list[int]:
    """Powers of two from 16 on, and the largest."""
    sizes = [1 << bits for bits in range(4, largest.bit_length()) if 1 << bits < largest]
    return [*sizes, largest]
