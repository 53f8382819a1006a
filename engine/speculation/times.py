"""How long steps take from one to the next, by their tokens and by what they draft, as measured while serving; and what
follows for the number of drafts. No torch here: `moesaic explain` prints what is remembered."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dbo.memory import read_json, write_json

SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512)
SETTLED = 3  # samples that count, behind the first, which may compile or capture
LATELY = 32  # samples of which the mean counts
OUTLIER = 3.0  # times the middle one: a step that took longer counts as so long
MARGIN = 0.05  # by which drafts have to be better than none: what is measured beside other work is not exact
EXACT = 0.005  # by less than this part steps have become no longer
FORMAT = 4

_SIZE_OF = [SIZES[bisect_left(SIZES, count)] for count in range(SIZES[-1] + 1)]


def size_of(count: int) -> int:
    """The size that a step of so many tokens or sequences is counted as."""
    return _SIZE_OF[min(count, SIZES[-1])]


class Usual:
    """Seconds of a step, or of each token that it brings to a sequence where steps bring different numbers of them: of
    the last ones together, since that is what throughput is made of. What other work did to one of them counts little;
    what it may have done to all of a trial is told by another trial: until such steps are made for their own sake, the
    lesser of the two counts, as nothing else makes steps shorter. remembered: of an earlier start, until so many have
    come."""

    __slots__ = ("_before", "_began", "_last", "_num_served", "_paired", "_remembered", "_sum", "_unit", "_value")

    def __init__(self, remembered: float | None = None) -> None:
        self._began = False
        self._last: deque[tuple[float, float]] = deque(maxlen=LATELY)  # seconds by the unit, tokens
        self._sum: float | None = None  # of those seconds; None: to be summed
        self._unit = 1.0
        self._num_served = 0
        self._paired = False
        self._before: float | None = None  # the last trial
        self._remembered = remembered
        self._value = remembered

    def settled(self) -> float | None:
        """The shortest, as much else begins beside practice; None: too few were measured."""
        return min(self._last)[0] * self._unit if len(self._last) >= SETTLED else self._remembered

    def again(self, paired: bool = False) -> None:
        """Another trial begins. paired: it alternates with what it is compared with."""
        self._paired = paired
        if self.measured:
            self._before = self._value = self.value
            self._clear()
            self._num_served = 0

    def renew(self) -> None:
        """What came before does not count, as soon as enough has come."""
        self._remembered, self._before = self.value, None
        self._value = self._remembered
        self._clear()

    def _clear(self) -> None:
        self._last.clear()
        self._sum = None

    def serve(self) -> None:
        """From now on such steps are made for their own sake, and tell what no trial does."""
        self.renew()
        self._num_served = SETTLED - LATELY

    def add(self, seconds: float, trying: bool = False, tokens: float = 1.0) -> None:
        """trying: it belongs to a trial."""
        if self._began:
            self._last.append((seconds / self._unit, tokens))
            self._sum = None
            self._num_served += not trying
            if len(self._last) >= SETTLED:
                self._value = self._remembered = None
                self._before = self._before if trying else None
        self._began = True

    @property
    def value(self) -> float:
        if self._value is None:
            found = self._seconds() / sum(tokens for _, tokens in self._last)
            if self._before is None:
                self._value = found
            else:
                self._value = (found + self._before) / 2 if self._paired else min(found, self._before)
        return self._value

    @property
    def pace(self) -> float:
        """Seconds of a step, whatever it brings; of those that serve."""
        return self._seconds() / len(self._last) if len(self._last) >= SETTLED else self.value

    def _seconds(self) -> float:
        if self._sum is None:
            most = OUTLIER * sorted(self._last)[len(self._last) // 2][0]
            self._sum = sum(min(seconds, most) for seconds, _ in self._last)
        return self._sum * self._unit

    def scale(self, factor: float) -> None:
        """As if everything had taken so much longer."""
        self._unit *= factor
        self._value = self._value and factor * self._value
        self._remembered = self._remembered and factor * self._remembered
        self._before = self._before and factor * self._before

    @property
    def known(self) -> bool:
        return self._remembered is not None or self.measured

    @property
    def measured(self) -> bool:
        """Since this start."""
        return len(self._last) >= SETTLED or self._before is not None

    @property
    def served(self) -> bool:
        """Some were made for their own sake; where no trial was like them, all that count."""
        return self._num_served >= SETTLED


class _Pace(NamedTuple):
    """So many drafts serve, and took so long when last compared; 0: not known. served: as of Usual."""

    depth: int
    seconds: float
    served: bool


class StepTimes:
    """Each from the beginning of a step to that of the next one, with all that the host and other ranks do meanwhile.
    usuals: of steps of so many sequences (as a size), that only decode, with so many drafts wanted for each. paired:
    trials alternate with what they are compared with."""

    def __init__(self) -> None:
        self.paired = False
        self.usuals: dict[tuple[int, int], Usual] = {}
        self._paces: dict[int, _Pace] = {}  # by size

    def add(self, num_sequences: int, depth: int, seconds: float, trying: bool = False, tokens: float = 1.0) -> None:
        key = size_of(num_sequences), depth
        if key not in self.usuals:
            self.usuals[key] = Usual()
        self.usuals[key].add(seconds, trying, tokens)

    def usual(self, num_sequences: int, depth: int) -> Usual | None:
        """None: not known yet."""
        found = self.usuals.get((size_of(num_sequences), depth))
        return found if found is not None and found.known else None

    def known(self) -> list[tuple[tuple[int, int], Usual]]:
        return [(key, usual) for key, usual in sorted(self.usuals.items()) if usual.known]

    def serves(self, num_sequences: int, depth: int) -> None:
        """Steps with so many drafts do, from now on; all ranks hear it."""
        pace = self._paces.get(size_of(num_sequences))
        if pace is None or pace.depth != depth:
            self.keep_pace(num_sequences)
            usual = self.usual(num_sequences, depth)
            if usual is not None and not self.paired:
                usual.serve()
            self._serve(num_sequences, depth)

    def _serve(self, num_sequences: int, depth: int) -> None:
        usual = self.usual(num_sequences, depth)
        seconds, served = (0.0, False) if usual is None else (usual.pace, usual.served)
        self._paces[size_of(num_sequences)] = _Pace(depth, seconds, served)

    def keep_pace(self, num_sequences: int, but: int | None = None) -> None:
        """What else the machine does makes all steps longer for a while: by as much as those that serve have become
        longer, what was measured of others is taken to have, so that they are compared as they were then. What only
        practice has found may also have become longer by no more than as many seconds: half of either, as what is taken
        to be too short is measured soon, and what is taken to be too long is not. What turns out to take another time
        than in practice or a trial says nothing of others that were measured, and nor do steps with drafts that are
        looked up, as few or many are found. but: what was measured between those that count."""
        size = size_of(num_sequences)
        pace = self._paces.get(size)
        usual = None if pace is None else self.usual(size, pace.depth)
        if pace is None or usual is None or (self.paired and pace.depth):
            return
        now = usual.pace
        if abs(now - pace.seconds) <= EXACT * pace.seconds and pace.served == usual.served:
            return
        self._serve(size, pace.depth)
        if not pace.seconds:
            return
        longer = now / pace.seconds
        others = [found for (of, depth), found in self.usuals.items() if of == size and depth not in (pace.depth, but)]
        for found in others:
            if found.measured and pace.served:
                found.scale(longer)
            elif found.known and not found.measured:
                found.scale(0.5 * (longer + min(longer, 1.0 + (now - pace.seconds) / found.value)))

    def renew(self, num_sequences: int) -> None:
        """A trial begins that alternates with what serves: what was measured of that before does not count."""
        pace = self._paces.get(size_of(num_sequences))
        usual = None if pace is None else self.usual(num_sequences, pace.depth)
        if usual is not None:
            usual.renew()

    def settle(self, most: int) -> None:
        """What practice has measured is as if it were remembered, and what it has not, of up to so many drafts, lies on
        straight lines: between two numbers of drafts, and by the number of sequences also beyond them."""
        self._paces.clear()
        known: dict[int, dict[int, float]] = {}  # by drafts and sequences
        for (size, depth), usual in self.usuals.items():
            seconds = usual.settled()
            if seconds is not None:
                known.setdefault(depth, {})[size] = seconds
        for size in SIZES:
            depths = {depth: times[size] for depth, times in known.items() if size in times}
            for depth in range(min(depths, default=0), max(depths, default=0)):
                known.setdefault(depth, {}).setdefault(size, _between(depths, depth))
        for depth in range(most + 1):
            times = dict(known.get(depth, {}))
            for size in SIZES if len(times) > 1 else list(times):
                self.usuals[size, depth] = Usual(_between(times, size))

    # ---- kept on disk ----

    def write(self, file: Path) -> None:
        """Raises OSError."""
        usuals = [[*key, usual.value] for key, usual in self.known()]
        write_json(file, {"format": FORMAT, "usuals": usuals})

    @classmethod
    def read(cls, file: Path) -> StepTimes | None:
        """None when there is nothing, or nothing that can be read."""
        values: Any = read_json(file)
        times = cls()
        try:
            if values["format"] != FORMAT:
                return None
            for size, depth, seconds in values["usuals"]:
                times.usuals[int(size), int(depth)] = Usual(float(seconds))
        except (KeyError, TypeError, ValueError):
            return None
        return times

    def told(self) -> str:
        """For `explain`."""
        told = (f"{size}x{depth}: {1e3 * usual.value:.3g}" for (size, depth), usual in self.known())
        return f"ms of a step by its sequences and the drafts of each: {', '.join(told) or 'not measured'}"


def _between(known: Mapping[int, float], at: int) -> float:
    """On a straight line between the nearest two; beyond all of them through the last two, which do not fall."""
    places = sorted(known)
    if len(places) == 1:
        return known[places[0]]
    above = min(max(bisect_left(places, at), 1), len(places) - 1)
    below, above = places[above - 1], places[above]
    rise = (known[above] - known[below]) / (above - below)
    return known[below] + (at - below) * (rise if at <= above else max(0.0, rise))


def best_of(rates: Mapping[int, float]) -> int:
    """The number of drafts that makes most tokens per second."""
    best = 0
    for depth, rate in rates.items():
        if rate > rates.get(best, 0.0) * (1 + MARGIN if best == 0 else 1):
            best = depth
    return best
