"""Graph breaks: calls of a forward pass that a graph cannot hold (engine/capture.py).

Two kinds of call cannot be captured: operations whose arguments on the host change with every step (attention over the
lengths of its sequences), and exchanges of rows whose number only the host knows. A sublayer makes such a call through
the GraphBreaks that it is handed, any number of times per pass; eager execution just does it.

Legend: T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from dbo.steps import Steps
from layers.step import StepInput

Operation = Callable[..., Tensor]
Prepare = Callable[[StepInput], Operation]


class GraphBreaks(Protocol):
    """Handed to a model's `steps`."""

    def operation(self, prepare: Prepare, step: StepInput, num_rows: int) -> Operation:
        """prepare(step), or something that is called in the same way: what it does is prepared anew for every step. The
        first num_rows arguments of a call have a row per token, as its result has. It may be called in any number of
        layers."""
        ...

    def exchange(self, steps: Callable[[Tensor, int], Steps[Tensor]], x_TD: Tensor, lane: int) -> Steps[Tensor]:
        """steps(x, lane), or something with the same value, [T, D]."""
        ...


class Eager:
    """No graph: every call is simply made."""

    def operation(self, prepare: Prepare, step: StepInput, num_rows: int) -> Operation:
        return prepare(step)

    def exchange(self, steps: Callable[[Tensor, int], Steps[Tensor]], x_TD: Tensor, lane: int) -> Steps[Tensor]:
        return steps(x_TD, lane)


EAGER = Eager()
