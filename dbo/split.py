"""Where to cut a step into parts of equal work (docs/dbo.md).

A step is a list of entries: tokens start : start + count of a sequence (engine/schedule.py). Parts are cut from that
list by tokens: an entry of one token goes into one part as a whole, a longer one may lie in several. Order is kept, so
that the part of a prompt that comes later in the prompt also comes later in turn.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class Cut(NamedTuple):
    """What lies before it: the first `entry` entries, and `tokens` tokens of the next one (fewer than that has)."""

    entry: int
    tokens: int


def context_cost(hidden_size: int) -> float:
    """What one earlier token adds to the work of a token, in tokens: an estimate.

    A token takes about 12 * hidden_size^2 multiplications in each layer, and 2 * hidden_size for each token that it
    attends to. The true ratio depends on the widths of a model; a cut that is a few percent off the middle costs
    nothing.
    """
    return 1 / (6 * hidden_size)


def work(start: int, count: int, per_context: float) -> float:
    """Of `count` tokens from position `start` on, in tokens without context."""
    return count * (1 + per_context * (start + (count - 1) / 2))


def cut(starts: Sequence[int], counts: Sequence[int], num_ubatches: int, per_context: float = 0.0) -> list[Cut]:
    """num_ubatches - 1 cuts, in order; parts may be empty.

    starts, counts: of the entries. per_context: `context_cost`. The work of each part differs from an equal share by at
    most that of one token.
    """
    if num_ubatches == 1:
        return []
    ends = list(accumulate([work(*entry, per_context) for entry in zip(starts, counts, strict=True)]))
    if not ends:
        return [Cut(0, 0)] * (num_ubatches - 1)
    cuts = []
    for part in range(1, num_ubatches):
        target = ends[-1] * part / num_ubatches
        entry = min(bisect_left(ends, target), len(ends) - 1)
        before = ends[entry - 1] if entry else 0.0
        tokens = _tokens_of(target - before, starts[entry], counts[entry], per_context)
        cuts.append(Cut(entry + 1, 0) if tokens == counts[entry] else Cut(entry, tokens))
    return cuts


def _tokens_of(target: float, start: int, count: int, per_context: float) -> int:
    """How many of an entry's first tokens come closest to `target`."""
    low, high = 0, count  # work(low) <= target, and of high it is not known to be so
    while low < high:
        middle = (low + high + 1) // 2
        if work(start, middle, per_context) <= target:
            low = middle
        else:
            high = middle - 1
    if low == count:
        return count
    below = target - work(start, low, per_context)
    above = work(start, low + 1, per_context) - target
    return low if below <= above else low + 1
