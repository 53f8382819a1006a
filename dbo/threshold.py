"""Whether a step is to be split: from measured times to a number of tokens, from that to what a rank proposes, and from
all proposals to what all ranks do.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple

NEVER = 1 << 30  # tokens; no step has so many
MARGIN = 0.08  # of a step: a split that saves less is not worth being wrong
HOPELESS = MARGIN / 2  # of a step: held up for less at one size, it is not held up for much more at any larger one
SLACK = 0.1  # of a measured crossover, see Threshold


class Crossover(NamedTuple):
    """From how many tokens of a rank on a split pays: in a step of decodes alone, and in any other."""

    decode: int
    prefill: int


class Sample(NamedTuple):
    """A step of so many tokens on every rank, measured: seconds per layer. exchange: for which the step as one is held
    up by tokens that travel, which is the most that a split can hide; whole, split: the step as one and in parts."""

    tokens: int
    exchange: float
    whole: float
    split: float

    @property
    def saved(self) -> float:
        """The part of the step that a split saves beyond MARGIN. No more can be saved than is waited for: more than
        that has been measured beside something else that this machine did."""
        return min(self.whole - self.split, self.exchange) / self.whole - MARGIN

    @property
    def pays(self) -> bool:
        return self.saved > 0


Search = Generator[int, Sample | None, int]


def search(sizes: Sequence[int]) -> Search:
    """A generator that asks for samples of some of `sizes` (ascending) and returns the crossover. Its driver
    sends the sample of the size that it yields, or None when there is no more time; what was not measured does not pay.

    A split that pays at one size is taken to pay at all larger ones, so that three of seven sizes are enough. Exchanges
    and arithmetic both grow with the tokens, so one size is enough where next to nothing can be saved.
    """
    worse: Sample | None = None  # the largest that is known not to pay
    better: Sample | None = None  # the smallest that is known to
    low, high = 0, len(sizes)
    while low < high:
        middle = (low + high) // 2
        sample = yield sizes[middle]
        if sample is None:
            break
        if sample.exchange < HOPELESS * sample.whole:
            worse = sample
            break
        if sample.pays:
            better, high = sample, middle
        else:
            worse, low = sample, middle + 1
    if better is None:
        return NEVER
    return better.tokens if worse is None else between(worse, better)


def between(worse: Sample, better: Sample) -> int:
    """Where the saved part of a step reaches MARGIN, on a straight line between the two: above `worse`."""
    assert worse.saved <= 0 < better.saved
    behind = (better.tokens - worse.tokens) * -worse.saved / (better.saved - worse.saved)
    return worse.tokens + max(1, round(behind))


class Threshold:
    """What one rank proposes.

    slack: once it has wished for a split it goes on doing so until a step has less than (1 - slack) times the tokens,
    so that steps of about that size do not go to and fro.
    """

    def __init__(self, num_ubatches: int, crossover: Crossover, slack: float = 0.0) -> None:
        self.num_ubatches = num_ubatches
        self._enter = crossover
        self._stay = Crossover(*(round(tokens * (1 - slack)) for tokens in crossover))
        self._bounds = [crossover.decode, crossover.prefill]  # now, of both kinds of steps

    def propose(self, num_tokens: int, has_prefill: bool) -> int:
        """In how many parts this rank would compute such a step; called once per step."""
        splits = num_tokens >= self._bounds[has_prefill]
        self._bounds[has_prefill] = (self._stay if splits else self._enter)[has_prefill]
        return self.num_ubatches if splits else 1


def agree(num_tokens: Sequence[int], proposed: Sequence[int]) -> int:
    """In how many parts all ranks compute the step: split if the ranks that propose it have at least half of the
    tokens."""
    most = max(proposed)
    if most <= 1:
        return 1
    splitting = sum(tokens for tokens, parts in zip(num_tokens, proposed, strict=True) if parts > 1)
    return most if 2 * splitting >= sum(num_tokens) else 1
