"""Where a forward pass may be left and entered again by whoever captures it (engine/graphs.py): around attention, whose
arguments change with every step, and around experts whose rows travel in numbers that only the host knows.

Legend: T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from dbo.steps import Steps
from layers.step import StepInput

Attend = Callable[..., Tensor]
Prepare = Callable[[StepInput], Attend]


class Cuts(Protocol):
    """Handed to a model's `steps`, which asks it in place of doing these two things itself."""

    def attention(self, prepare: Prepare, step: StepInput, num_queries: int) -> Attend:
        """prepare(step), or something that is called in the same way. The first num_queries arguments of a call have a row
        per token, as its result has; once per forward pass."""
        ...

    def experts(self, steps: Callable[[Tensor, int], Steps[Tensor]], x_TD: Tensor, lane: int) -> Steps[Tensor]:
        """steps(x, lane), or something with the same value, [T, D]."""
        ...


class Uncut:
    """The forward pass as it is written."""

    def attention(self, prepare: Prepare, step: StepInput, num_queries: int) -> Attend:
        return prepare(step)

    def experts(self, steps: Callable[[Tensor, int], Steps[Tensor]], x_TD: Tensor, lane: int) -> Steps[Tensor]:
        return steps(x_TD, lane)


UNCUT = Uncut()
