"""As engine/speculation/choice.py, where drafts are looked up: what they bring changes with the texts, and is seen
without verifying any (engine/speculation/looks.py)."""

from __future__ import annotations

from collections.abc import Mapping

from engine.speculation.choice import Choice, loss_of
from engine.speculation.looks import Looks
from engine.speculation.meter import StepMeter
from engine.speculation.speculation import Speculation
from engine.speculation.trials import AGAIN, AHEAD, NEAR, PROMISE, TRIALS, TURN, Trials

CHANGED = 1.1  # times as many tokens: by less, what is looked up has not become better or worse
UNPROMISED = 4.0  # times what it costs a trial has to be paid for, if nothing promises that it changes anything


class LookedUp(Choice):
    def __init__(self, speculation: Speculation, looks: Looks, meter: StepMeter) -> None:
        super().__init__(speculation, meter)
        self._looks = looks

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

    def tokens(self, depth: int) -> float:
        return self._looks.tokens(depth)

    def measured(self, one: Trials, depth: int) -> None:
        one.looked[depth] = self.tokens(depth)

    def promises(self, one: Trials, num: int, rates: Mapping[int, float], best: int) -> int | None:
        found, most = None, CHANGED * rates.get(best, 0.0)
        if one.since < PROMISE or not most:
            return None
        for depth, before in one.looked.items():
            if depth in rates and depth != best and (now := self.tokens(depth)) > CHANGED * before:
                promised = rates[depth] * now / before
                if promised > most:
                    found, most = depth, promised
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
        unknown = {depth: self._expected(num, depth) for depth in range(1, most) if depth not in rates}
        depth = max(unknown, key=unknown.__getitem__, default=0)
        if depth and unknown[depth] > CHANGED * best_rate and one.tried.get(depth, 0) < TRIALS:
            return depth
        if one.since < after:
            return None
        if one.doubted and best and NEAR * rates[0] > best_rate:
            return 0
        enough = CHANGED * best_rate / rates[0]  # tokens of a step: with drafts it takes at least as long as without
        others = [depth for depth in rates if depth != best and (not depth or self.tokens(depth) > enough)]
        if not others:
            return None
        depth = min(others, key=lambda depth: (one.tried_at.get(depth, -1), -rates[depth]))
        seconds = self.length(num, depth) * num * self.tokens(depth) * loss_of(rates, depth, best)
        return depth if self._meter.costs.may_cost(UNPROMISED * seconds, 0.0) else None

    def _expected(self, num: int, depth: int) -> float:
        """Tokens per second, if each draft makes a step longer by as much as another."""
        none, most = self._meter.times.usual(num, 0), self._meter.times.usual(num, self.most_of(num))
        assert none is not None
        more = 0.0 if most is None else max(0.0, most.pace - none.pace) / self.most_of(num)
        return num * self.tokens(depth) / (none.pace + depth * more)


def choice_of(speculation: Speculation, meter: StepMeter) -> Choice:
    looks = speculation.looks
    return Choice(speculation, meter) if looks is None else LookedUp(speculation, looks, meter)
