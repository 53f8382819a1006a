"""What trials of the gate (engine/speculation/gate.py) have cost, and what drafts cost that are made of prompts."""

from __future__ import annotations

REQUESTS = 64  # of those that drafts were made of last, what prompts lose by it counts
SHARE = 0.01  # of the time, that trials of what is known already may cost ...
SHARE_OF_NONE = 0.005  # ... and while none at all is best


def share_of(best: int) -> float:
    """Where so many drafts are best."""
    return SHARE if best else SHARE_OF_NONE


class Costs:
    """Seconds: served, of all steps; spent, what trials cost. Of prompts that drafts were made of."""

    def __init__(self) -> None:
        self.served = self.spent = self._trial = 0.0
        self._prompts, self._rows = 0.0, -1  # the first one compiles

    def may_cost(self, seconds: float, ahead: float, share: float = SHARE) -> bool:
        """ahead: seconds, before they are paid for."""
        return self.spent + max(0.0, self._trial) + seconds <= share * self.served + ahead

    def add_step(self, seconds: float, trying: bool, needed: float) -> None:
        """needed: that the best would have taken. A trial may have been better: then it has cost nothing."""
        self.served += seconds
        if trying:
            self._trial += seconds - needed
        elif self._trial:
            self.spent += max(0.0, self._trial)
            self._trial = 0.0

    def add_prompts(self, rows: int, seconds: float, trying: bool) -> None:
        """Passes over prompts that so many sequences begin with, made only for a trial or not."""
        if trying:
            self.spent += seconds
        if self._rows < 0:
            self._rows = 0
            return
        if self._rows >= REQUESTS:
            self._rows, self._prompts = self._rows // 2, self._prompts / 2
        self._rows, self._prompts = self._rows + rows, self._prompts + seconds

    @property
    def of_request(self) -> float:
        """Seconds that its prompt takes longer by drafts."""
        return self._prompts / self._rows if self._rows > 0 else 0.0
