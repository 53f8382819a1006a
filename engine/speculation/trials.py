"""Trials of the gate (engine/speculation/gate.py): steps with other numbers of drafts than the one that was chosen."""

from __future__ import annotations

from collections.abc import Mapping

from engine.speculation.times import SETTLED, Usual
from engine.speculation.words import ALTERNATES, COLD_STEP, PROMISING, TRYING

AGAIN = 64  # steps of a size, after which a step with prompts begins a trial; twice as many: any step, where none comes
HELD, LONG_HELD = 8, 64  # steps of a size for which what was chosen stays: twice as many each time that it is again ...
LOOKED_UP_HELD, NONE_HELD = 16, 256  # ... at most; where drafts are looked up, as texts change; none: looks tell
PROOF = 16  # of those behind a trial: with as many before it they tell the pace at which it was measured
COLD = 4  # steps of a trial that are not measured: behind prompts and other numbers much comes from memory anew
FIRST = COLD + SETTLED + 3  # steps of one: those, one that begins it, one that may compile, and one that ends it
TRIAL = 32  # steps of one of what was measured before: about as long as a short answer, as to change costs graphs
LOOK, LOOKS = 8, 0.002  # steps at least between two looks while no drafts are wanted; what part of the time they take
PROMISE = 16  # steps of a trial of what promises to be better by what is looked up now
TURN = 16  # steps of one alternate with what was chosen where the model does not draft
NEAR = 1.5  # times as many tokens per second may be made with another number than with one that may be as good ...
AHEAD = 16  # ... whose trials may have cost as much as so many steps before they are paid for
TRIALS = 3  # of what turns out not to be measured; of none at all one more every AGAIN steps


class Trials:
    """Of steps of about so many sequences. tried: trials of so many drafts, and tried_at: in which step the last one
    began; trial: the one under way, and its steps that are left; kind: which it is, flags of the words; proves: what
    the last one was of, until it is compared; since: steps since it began; chosen: None: nothing yet; held: steps for
    which it stays; rates: tokens per second, when it was chosen; doubted: none at all was chosen before, and not
    measured since; prompted: in which step prompts came last. Where drafts are looked up, looked: tokens that so many
    were to bring to a sequence when they were last measured; look_at: in which step it is seen next what they would
    bring; none_at: in which one none at all was measured last."""

    def __init__(self) -> None:
        self.rates: Mapping[int, float] = {}
        self.looked: dict[int, float] = {}
        self.tried: dict[int, int] = {}
        self.tried_at: dict[int, int] = {}
        self.trial = (0, 0)
        self.chosen: int | None = None
        self.proves: int | None = None
        self.steps = self.held = self.since = self.prompted = self.look_at = self.none_at = 0
        self._hold = HELD
        self.doubted = False
        self.kind = 0

    def tick(self, steps: int = 1) -> None:
        self.steps += steps
        self.since += steps
        self.held -= steps

    @property
    def alternates(self) -> bool:
        """A trial is under way that does."""
        return self.kind & ALTERNATES > 0 and self.trial[1] > 0

    @property
    def proving(self) -> bool:
        """What was chosen is measured again, behind a trial."""
        return self.proves is not None and self.chosen is not None and self.held > 0

    def looks(self, seconds: float, step: float) -> None:
        """A look has taken so long, beside steps that take `step`; 0: not known."""
        self.look_at = self.steps + (min(max(LOOK, int(seconds / (LOOKS * step))), NONE_HELD) if step else LOOK)

    def choose(self, depth: int, rates: Mapping[int, float], most_held: int) -> None:
        """So many drafts, for a while, as these are the rates of all."""
        self.rates = rates
        self.none_at = self.none_at if depth else self.steps
        self.doubted = (self.doubted or self.chosen == 0) and depth > 0
        self._hold = min(2 * self._hold, most_held) if depth == self.chosen else HELD
        self.chosen, self.held = depth, self._hold

    def end(self, proof: int) -> None:
        """The trial is over. proof: steps of what was chosen that are measured again, before both are compared."""
        self._hold = HELD
        self.proves, self.trial = self.trial[0], (self.trial[0], 0)
        self.held = proof

    def go_on(self) -> tuple[int, int]:
        """What a step of the trial under way drafts, and flags of the words."""
        depth, left = self.trial
        self.trial = (depth, left - 1)
        trying = TRYING | self.kind
        if not self.kind & ALTERNATES or self.chosen is None:
            return depth, trying | (self.steps - self.tried_at[depth] < COLD) * COLD_STEP
        cold = (TURN - left % TURN <= COLD) * COLD_STEP
        return (depth, trying | cold) if left // TURN % 2 else (self.chosen, cold)

    def begin(self, depth: int, steps: int, usual: Usual | None, kind: int) -> None:
        """A trial. usual: what such steps took; None: not known yet. kind: flags, by which it alternates with what was
        chosen, or texts are not what they were."""
        if kind & PROMISING and usual is not None:
            usual.renew()
        elif usual is not None:  # none is what is taken unless another is certain to be better
            usual.again(kind & ALTERNATES > 0 and depth > 0)
        self.tried[depth] = self.tried.get(depth, 0) + 1
        self.tried_at[depth] = self.steps
        self.none_at = self.none_at if depth else self.steps
        self.doubted, self.kind = self.doubted and depth > 0, kind & (ALTERNATES | PROMISING)
        self.trial, self.since = (depth, steps - 1), 0
