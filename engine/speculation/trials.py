"""Trials of the gate (engine/speculation/gate.py): steps with other numbers of drafts than the one that was chosen."""

from __future__ import annotations

from engine.speculation.times import SETTLED, Usual

AGAIN = 64  # steps of a size, after which a step with prompts begins a trial; twice as many: any step, where none comes
HELD, LONG_HELD = 8, 64  # steps of a size for which what was chosen stays: twice as many each time that it is again
PROOF = 16  # of those behind a trial: with as many before it they tell the pace at which it was measured
COLD = 4  # steps of a trial that are not measured: behind prompts and other numbers much comes from memory anew
FIRST = COLD + SETTLED + 3  # steps of one: those, one that begins it, one that may compile, and one that ends it
TRIAL = 32  # steps of one of what was measured before: about as long as a short answer, as to change costs graphs
TURN = 16  # steps of one alternate with what was chosen where the model does not draft
NEAR = 1.5  # times as many tokens per second may be made with another number than with one that may be as good ...
AHEAD = 16  # ... whose trials may have cost as much as so many steps before they are paid for
TRIALS = 3  # of what turns out not to be measured; of none at all one more every AGAIN steps


class Trials:
    """Of steps of about so many sequences. tried: trials of so many drafts, and tried_at: in which step the last one
    began; trial: the one under way, and its steps that are left; proves: what the last one was of, until it is
    compared; since: steps since it began; chosen: None: nothing yet; held: steps for which it stays; doubted: none at
    all was chosen before, and not measured since; prompted: in which step prompts came last."""

    def __init__(self) -> None:
        self.tried: dict[int, int] = {}
        self.tried_at: dict[int, int] = {}
        self.trial = (0, 0)
        self.chosen: int | None = None
        self.proves: int | None = None
        self.steps = self.held = self.since = self.prompted = 0
        self._hold = HELD
        self.doubted = self._alternates = False

    def tick(self) -> None:
        self.steps += 1
        self.since += 1
        self.held -= 1

    @property
    def proving(self) -> bool:
        """What was chosen is measured again, behind a trial."""
        return self.proves is not None and self.chosen is not None and self.held > 0

    def choose(self, depth: int) -> None:
        """So many drafts, for a while."""
        self.doubted = (self.doubted or self.chosen == 0) and depth > 0
        self._hold = min(2 * self._hold, LONG_HELD) if depth == self.chosen else HELD
        self.chosen, self.held = depth, self._hold

    def end(self, proof: int) -> None:
        """The trial is over. proof: steps of what was chosen that are measured again, before both are compared."""
        self._hold = HELD
        self.proves, self.trial = self.trial[0], (self.trial[0], 0)
        self.held = proof

    def go_on(self) -> tuple[int, bool, bool]:
        """What a step of the trial under way drafts; whether it is of the trial, and is not measured."""
        depth, left = self.trial
        self.trial = (depth, left - 1)
        if not self._alternates or self.chosen is None:
            return depth, True, self.steps - self.tried_at[depth] < COLD
        tries = left // TURN % 2 > 0
        return depth if tries else self.chosen, tries, TURN - left % TURN <= COLD

    def begin(self, depth: int, steps: int, usual: Usual | None, paired: bool) -> None:
        """A trial. usual: what such steps took; None: not known yet. paired: it alternates with what was chosen."""
        if usual is not None:
            usual.again(paired and depth > 0)  # none is what is taken unless another is certain to be better
        self.tried[depth] = self.tried.get(depth, 0) + 1
        self.tried_at[depth] = self.steps
        self.doubted, self._alternates = self.doubted and depth > 0, paired
        self.trial, self.since = (depth, steps - 1), 0
