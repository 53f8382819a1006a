"""The sliding window: perfect balance with shares whenever there is about one spare slot per rank (facts: data
placement).

Experts by rising load; each rank takes the S neighbours in that order that first reach its part of the load, and of the
largest only as much as it needs; the rest goes back in line. So S - 1 experts are used up per rank, and with P >= E + G
- 1 slots all fit. It fits today's loads exactly and is soon off when they drift: use it with frequent new shares only.

Legend: G ranks, S slots of a rank, E logical experts.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence


def slide(load_E: Sequence[float], num_ranks: int, num_slots: int) -> list[list[int]] | None:
    """For each rank its experts; None when they do not fit (that takes fewer than E + G - 1 slots)."""
    line = sorted((weight, expert) for expert, weight in enumerate(load_E))
    part = sum(load_E) / num_ranks
    ids = []
    for rank in range(num_ranks):
        at, end = 0, min(num_slots, len(line))
        total = sum(weight for weight, _ in line[:end])
        while total < part and end < len(line) and rank < num_ranks - 1:
            total += line[end][0] - line[at][0]
            at, end = at + 1, end + 1
        taken = line[at:end]
        del line[at:end]
        ids.append([expert for _, expert in taken])
        # What is left of rounding is not worth a slot.
        if taken and total - part > 1e-9 * part and rank < num_ranks - 1:
            bisect.insort(line, (min(taken[-1][0], total - part), taken[-1][1]))
    return ids if not line else None
