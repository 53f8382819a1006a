"""Expert parallelism of one rank: nothing travels.

Legend: T tokens, D hidden size.
"""

from __future__ import annotations

from torch import Tensor

from ep.protocol import Arrived, Ready, Routing
from ep.rows import Rows
from moe_kernels import Layout, TokenBatch, copy_rows


class LocalAllToAll:
    """The experts get the tokens as they are, and return their weighted sums.

    rows: the form in which they travelled while there were other ranks, whose rounding stays when those are gone; None:
    there is none.
    """

    layout = Layout.RAGGED

    def __init__(self, num_slots: int, rows: Rows | None = None) -> None:
        self._num_slots, self._rows = num_slots, rows

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Ready[Arrived]:
        if self._rows is not None:
            x_TD = self._rows.tokens(self._rows.pack(x_TD))
        return Ready(Arrived(TokenBatch(x_TD, routing.slot_TK, routing.weight_TK, 0, x_TD.dtype), None))

    def combine(self, y: Tensor, ticket: object, out_TD: Tensor) -> Ready[Tensor]:
        return Ready(copy_rows(out_TD, y))

    def close(self) -> None:
        """Nothing is held."""
