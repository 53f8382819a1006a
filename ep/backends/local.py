"""Expert parallelism of one rank: nothing travels.

Legend: T tokens, D hidden size.
"""

from __future__ import annotations

from torch import Tensor

from ep.protocol import Arrived, Ready, Routing
from moe_kernels import Layout, TokenBatch, copy_rows


class LocalAllToAll:
    """The experts get the tokens as they are, and return their weighted sums."""

    layout = Layout.RAGGED

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Ready[Arrived]:
        return Ready(Arrived(TokenBatch(x_TD, routing.slot_TK, routing.weight_TK, 0, x_TD.dtype), None))

    def combine(self, y: Tensor, ticket: object, out_TD: Tensor) -> Ready[Tensor]:
        return Ready(copy_rows(out_TD, y))

    def close(self) -> None:
        """Nothing is held."""
