"""As engine/speculation/choice.py, where drafts are looked up: what they bring changes with the texts, and is seen
without verifying any (engine/speculation/looks.py)."""

from __future__ import annotations

from collections.abc import Mapping

from engine.speculation.choice import Choice, loss_of
from engine.speculation.costs import share_of
from engine.speculation.meter import StepMeter
from engine.speculation.speculation import Speculation
from engine.speculation.trials import AGAIN, AHEAD, NEAR, PROMISE, TRIALS, TURN, Trials
from engine.speculation.words import ALTERNATES

CHANGED = 1.1  # times as many tokens: by less, what is looked up has not become better or worse
LONG_SINCE = 64  # steps since a number was measured, after which it may promise the same again
STALE = 256  # steps since none at all was measured, after which it is again
UNPROMISED = 4.0  # times what it costs a trial has to be paid for, if nothing promises that it changes anything


class LookedUp(Choice):
    def length(self, num: int, depth: int) -> int:
        usual = self._meter.times.usual(num, depth)
        return TURN * (4 if usual is not None and usual.measured else 2)

    def rates(self, num: int, one: Trials | None = None) -> dict[int, float]:
        """What was measured when more was found is worth less, unless it serves."""
        found: dict[int, float] = {}
        looked = {} if one is None else one.looked
        for depth in range(self.most_of(num) + 1):
            usual = self._meter.times.usual(num, depth)
            if usual is not None:
                found[depth] = num / usual.value
                before, now = looked.get(depth, 0.0), self.tokens(depth)
                if one is not None and depth != one.chosen and CHANGED * now < before:
                    found[depth] *= now / before
        return found

    def learn(self) -> None:
        """Looks tell it all the time."""

    def measured(self, one: Trials, depth: int) -> None:
        one.looked[depth] = self.tokens(depth)

    def lost(self, one: Trials, num: int) -> float:
        """Half of the steps of one that alternates are made with its number, and both have met the same texts."""
        tried, best = self._meter.times.usual(num, one.trial[0]), self._meter.times.usual(num, one.chosen or 0)
        if not one.kind & ALTERNATES or tried is None or best is None:
            return 0.0
        return one.since / 2 * tried.pace * max(0.0, 1 - best.value / tried.value)

    def promises(self, one: Trials, num: int, rates: Mapping[int, float], best: int) -> int | None:
        """Not again soon, if it was measured and looks tell the same as then."""
        if one.since < PROMISE or best not in rates or 0 not in rates or self._none_is_due(one, num, rates, best):
            return None
        found, most = None, CHANGED
        for depth in range(1, self.most_of(num) + 1):
            tokens, since = self.tokens(depth), one.steps - one.tried_at.get(depth, one.steps)
            if depth == best or (tokens <= CHANGED * one.looked.get(depth, 0.0) and since < LONG_SINCE):
                continue
            better = self._better(num, depth, best)
            if better > most:
                found, most = depth, better
        ahead = AHEAD * num * self.tokens(best) / rates[best]
        return found if found is None or self._meter.costs.may_cost(0.0, ahead) else None

    def to_try(self, one: Trials, num: int, rates: Mapping[int, float], best: int, after: float) -> int | None:
        """As many as are made at first; then none, which only costs what the drafts would have brought."""
        most, best_rate = self.most_of(num), rates.get(best, 0.0)
        for depth in (most, 0):
            if depth not in rates and (one.tried.get(depth, 0) < TRIALS or (not depth and one.since >= AGAIN)):
                return depth
        if 0 not in rates:
            return None
        if one.since >= PROMISE and self._none_is_due(one, num, rates, best):
            return 0
        if one.since < after:
            return None
        if one.doubted and best and self._better(num, best, 0) < NEAR:
            return 0
        enough = CHANGED * best_rate / rates[0]  # tokens of a step: with drafts it takes at least as long as without
        others = [
            depth
            for depth in rates
            if depth != best
            and (not depth or self.tokens(depth) > enough)
            and self._meter.costs.may_cost(UNPROMISED * self._cost(num, rates, depth, best), 0.0, share_of(best))
        ]
        return min(others, key=lambda depth: (one.tried_at.get(depth, -1), -rates[depth]), default=None)

    def _none_is_due(self, one: Trials, num: int, rates: Mapping[int, float], best: int) -> bool:
        """What is compared with it is measured all the time, and the pace of the machine changes."""
        due = best > 0 and one.steps - one.none_at >= STALE
        return due and self._meter.costs.may_cost(self._cost(num, rates, 0, best), 0.0)

    def _cost(self, num: int, rates: Mapping[int, float], depth: int, best: int) -> float:
        """Seconds that a trial probably loses."""
        return self.length(num, depth) * num * self.tokens(depth) * loss_of(rates, depth, best)

    def _better(self, num: int, depth: int, than: int) -> float:
        """Times as many tokens per second with so many drafts than with another number, by what looks tell now."""
        seconds = self._seconds(num, than) / self._seconds(num, depth)
        return seconds * self.tokens(depth) / self.tokens(than)

    def _seconds(self, num: int, depth: int) -> float:
        """Of a step, where it was not measured as if each draft made it longer by as much as another."""
        usual = [self._meter.times.usual(num, which) for which in (depth, 0, self.most_of(num))]
        exact, none, most = (None if one is None else one.pace for one in usual)
        assert none is not None
        if exact is not None or most is None:
            return max(none, exact or 0.0)
        return none + max(0.0, most - none) * depth / self.most_of(num)


def choice_of(speculation: Speculation, meter: StepMeter) -> Choice:
    return (Choice if speculation.models else LookedUp)(speculation, meter)
