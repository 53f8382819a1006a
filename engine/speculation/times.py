"""How long steps take by their tokens, and what drafting adds to them, as measured while serving; and what follows for
the number of drafts. No torch here: `moesaic explain` prints what is remembered."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dbo.memory import read_json, write_json

SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512)
SETTLED = 3  # samples of a size that count, behind the first, which may compile or capture
RISE = 0.02  # of a sample that takes longer: what else the machine does makes steps longer, never shorter
MARGIN = 0.1  # by which drafts have to be better than none: what is measured beside other work is not exact
FORMAT = 1


def size_of(count: int) -> int:
    """The size that a step of so many tokens or sequences is counted as."""
    return SIZES[min(bisect_left(SIZES, count), len(SIZES) - 1)]


class Least:
    """Seconds: nearly the least of what came lately."""

    __slots__ = ("count", "value")

    def __init__(self, count: int = 0, value: float = 0.0) -> None:
        self.count, self.value = count, value

    def add(self, seconds: float) -> None:
        self.count += 1
        if self.count <= 1:
            return
        if self.count == 2 or seconds < self.value:
            self.value = seconds
        elif self.count > 1 + SETTLED:
            self.value += RISE * (seconds - self.value)

    @property
    def known(self) -> bool:
        return self.count > SETTLED


class StepTimes:
    """steps: of a step of so many tokens, all of which decode or are drafts, without its drafting. drafting: of a pass
    for so many sequences, so deep. beside: of all that is neither, per step."""

    def __init__(self) -> None:
        self.steps: dict[int, Least] = {}
        self.drafting: dict[tuple[int, int], Least] = {}
        self.beside = Least()

    def add_step(self, num_tokens: int, seconds: float) -> None:
        self.steps.setdefault(size_of(num_tokens), Least()).add(seconds)

    def add_drafting(self, num_sequences: int, depth: int, seconds: float) -> None:
        self.drafting.setdefault((size_of(num_sequences), depth), Least()).add(seconds)

    def step(self, num_tokens: float) -> float | None:
        """None: not known yet. Between two sizes on a straight line."""
        known = [size for size in SIZES if size in self.steps and self.steps[size].known]
        at = bisect_left(known, num_tokens)
        if at == len(known) or (known[at] != num_tokens and at == 0):
            return None
        above = known[at]
        if above == num_tokens:
            return self.steps[above].value
        below = known[at - 1]
        part = (num_tokens - below) / (above - below)
        return (1 - part) * self.steps[below].value + part * self.steps[above].value

    def drafts(self, num_sequences: int, depth: int) -> float | None:
        found = self.drafting.get((size_of(num_sequences), depth))
        return None if found is None or not found.known else found.value

    # ---- kept on disk ----

    def write(self, file: Path) -> None:
        """Raises OSError."""
        steps = [[size, mean.value] for size, mean in sorted(self.steps.items()) if mean.known]
        drafting = [[*key, mean.value] for key, mean in sorted(self.drafting.items()) if mean.known]
        write_json(file, {"format": FORMAT, "steps": steps, "drafting": drafting, "beside": self.beside.value})

    @classmethod
    def read(cls, file: Path) -> StepTimes | None:
        """None when there is nothing, or nothing that can be read."""
        values: Any = read_json(file)
        times = cls()
        try:
            if values["format"] != FORMAT:
                return None
            for size, seconds in values["steps"]:
                times.steps[int(size)] = Least(1 + SETTLED, float(seconds))
            for size, depth, seconds in values["drafting"]:
                times.drafting[int(size), int(depth)] = Least(1 + SETTLED, float(seconds))
            times.beside = Least(1 + SETTLED, float(values["beside"]))
        except (KeyError, TypeError, ValueError):
            return None
        return times

    def told(self) -> str:
        """For `explain`."""
        steps = ", ".join(f"{size}: {1e3 * mean.value:.3g}" for size, mean in sorted(self.steps.items()))
        drafting = ", ".join(
            f"{size}x{depth}: {1e3 * mean.value:.3g}" for (size, depth), mean in sorted(self.drafting.items())
        )
        text = f"ms of a step by its tokens: {steps or 'not measured'}"
        return text + (f"; of drafting by sequences and depth: {drafting}" if drafting else "")


def expected_tokens(acceptance: Sequence[float], depth: int) -> float:
    """Of a sequence and step with so many drafts. acceptance: of each place, if all before it were right."""
    total = reached = 1.0
    for right in acceptance[:depth]:
        reached *= right
        total += reached
    return total


def tokens_per_second(
    times: StepTimes, acceptance: Sequence[float], num_sequences: int, part: float, depth: int, drafts: bool
) -> float | None:
    """Of all sequences. part: of them that have drafts; drafts: the model makes them itself. None: not measured."""
    step = times.step(num_sequences * (1 + part * depth) if part == 1 else round(num_sequences * (1 + part * depth)))
    drafting = times.drafts(num_sequences, depth) if drafts and depth else 0.0
    if step is None or drafting is None:
        return None
    tokens = num_sequences * (1 + part * (expected_tokens(acceptance, depth) - 1))
    return tokens / (step + drafting + times.beside.value)
