"""What number of drafts is best for so many sequences, by what was measured, and what is worth to be measured next; for
the gate (engine/speculation/gate.py)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from operator import mul

from engine.speculation.costs import share_of
from engine.speculation.meter import StepMeter
from engine.speculation.speculation import Speculation
from engine.speculation.times import MARGIN
from engine.speculation.trials import AGAIN, AHEAD, FIRST, NEAR, TRIAL, TRIALS, Trials


class Choice:
    """Of one rank, where a model drafts; engine/speculation/looked_up.py: where drafts are looked up."""

    def __init__(self, speculation: Speculation, meter: StepMeter) -> None:
        self._speculation, self._meter = speculation, meter

    def most_of(self, num: int) -> int:
        return min(self._speculation.max_drafts, max(1, self._speculation.max_in_step // num))

    def length(self, num: int, depth: int) -> int:
        """Steps of a trial with so many drafts."""
        usual = self._meter.times.usual(num, depth)
        return TRIAL if usual is not None and usual.measured else FIRST

    def rates(self, num: int, one: Trials | None = None) -> dict[int, float]:
        """Tokens per second by the number of drafts, as far as they are known."""
        drafts = self._speculation
        usual = drafts.usual_output
        prompts = self._meter.costs.of_request / usual if usual else 0.0  # seconds per token
        found: dict[int, float] = {}
        for depth in range(self.most_of(num) + 1):
            step = self._meter.times.usual(num, depth)
            if step is not None:
                rate = num * self.tokens(depth) / step.value
                found[depth] = rate / (1 + rate * prompts) if depth else rate
        return found

    def tokens(self, depth: int) -> float:
        """That a step with so many drafts probably brings to a sequence."""
        return self._speculation.rights.tokens(depth)

    def learn(self) -> None:
        """What drafts have brought until now."""
        self._speculation.rights.change(list(accumulate(self._speculation.acceptance, mul)))

    def measured(self, one: Trials, depth: int) -> None:
        """So many drafts are, until now."""

    def lost(self, one: Trials, num: int) -> float:
        """Seconds that the trial under way has cost, where its steps are not counted."""
        return 0.0

    def promises(self, one: Trials, num: int, rates: Mapping[int, float], best: int) -> int | None:
        """So many drafts are not the best by what was measured, would be by what is found now, and are to be measured
        at once; None: none."""
        return None

    def to_try(self, one: Trials, num: int, rates: Mapping[int, float], best: int, after: float) -> int | None:
        """So many drafts are to be measured now; None: nothing is. None at all last: requests lose the thread by it."""
        best_rate = rates.get(best, 0.0)
        better = best_rate * (1 + MARGIN) if best == 0 else best_rate
        most = float("inf")  # sequences times steps per second: one with more drafts takes at least as long
        for depth in range(self.most_of(num) + 1):
            tokens = self.tokens(depth)
            if depth in rates:
                most = min(most, rates[depth] / tokens)
            elif depth and one.tried.get(depth, 0) < TRIALS and tokens * most > better:
                return depth
        if 0 not in rates:
            return 0 if one.tried.get(0, 0) < TRIALS or one.since >= AGAIN else None
        others = [depth for depth in rates if depth != best]
        if not others or one.since < after:
            return None
        if one.doubted and best:
            return 0
        # What is known: that which was measured longest ago, as soon as it may cost what it probably will. Of what was
        # not, that which may well be as good: first the most drafts, as they tell how often each place is right, then
        # that which is nearest; this at once where none at all is nearly as good as the best.
        far = {depth: best_rate / rates[depth] if rates[depth] * NEAR < best_rate else 0.0 for depth in others}
        nearest = one.tried or (best and rates[0] * (1 + 2 * MARGIN) > best_rate)
        order = {depth: -rates[depth] if nearest else -depth for depth in others}
        depth = min(others, key=lambda depth: (one.tried_at.get(depth, -1), far[depth], order[depth]))
        tokens = self.length(num, depth) * num * self.tokens(depth)
        if not depth:
            tokens = max(tokens, num * self._speculation.usual_output)
        ahead = 0.0 if far[depth] else AHEAD * num * self.tokens(best) / best_rate
        cost = tokens * loss_of(rates, depth, best)
        return depth if self._meter.costs.may_cost(cost, ahead, share_of(best)) else None


def loss_of(rates: Mapping[int, float], depth: int, best: int) -> float:
    """Seconds by which a token probably takes longer with so many drafts: what seems to be worse may not be so."""
    return min(1 / rates[depth], 2.5 / rates[best]) - 1 / rates[best]
