"""The bound of a request's reasoning: behind so many tokens of it, the tokens that end it must come.

What must come is a pure function of the output, of which only the last tokens and their number are kept: so it is the
same with drafts (each row of a run has those before it), after a preemption, and at another rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from front.params import ReasoningBudget

IN_FRONT = 4  # tokens that may stand before the one that begins reasoning: spaces


class Thinking:
    """Of one request. Belongs to the thread that runs the steps, except while none of its steps is under way."""

    __slots__ = ("_begun", "_budget", "_last", "_num", "_size", "over")

    def __init__(self, budget: ReasoningBudget, output: Sequence[int]) -> None:
        self._budget = budget
        self._size = max(map(len, (budget.begin, *budget.ends)))
        self._last: tuple[int, ...] = ()  # tokens, as many as decide what comes next
        self._num = 0  # tokens so far, or those since reasoning has begun
        self._begun = not budget.begin
        self.over = False  # any token may come from now on
        self.accept(output)

    def accept(self, tokens: Sequence[int]) -> None:
        """These come next."""
        for token in tokens:
            if self.over:
                return
            self._last = (*self._last, token)[-self._size :]
            self._num += 1
            if self._begun:
                self.over = any(self._ends_with(end) for end in self._budget.ends)
            elif self._ends_with(self._budget.begin):
                self._begun, self._num, self._last = True, 0, ()
            else:
                self.over = self._num >= len(self._budget.begin) + IN_FRONT

    def forced(self, drafts: Sequence[int]) -> int:
        """The one token that may come behind these drafts, if they come; -1: any."""
        if drafts:
            copy = Thinking(self._budget, ())
            copy._last, copy._num, copy._begun, copy.over = self._last, self._num, self._begun, self.over
            copy.accept(drafts)
            return copy.forced(())
        if self.over or not self._begun or self._num < self._budget.tokens:
            return -1
        end = self._budget.ends[0]
        return end[next(count for count in range(len(end) - 1, -1, -1) if self._ends_with(end[:count]))]

    def _ends_with(self, tokens: tuple[int, ...]) -> bool:
        return self._last[len(self._last) - len(tokens) :] == tokens
