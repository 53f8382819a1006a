"""Expert parallelism of one rank: nothing travels.

Legend: T tokens, D hidden size, K experts per token, S slots, R = T * K rows.
"""

from __future__ import annotations

from torch import Tensor

from ep.protocol import Arrived, Ready, Routing
from moe_kernels import Bags, Layout, permute, unpermute


class LocalAllToAll:
    """Rows are sorted by slot on the way out and summed on the way back."""

    layout = Layout.RAGGED

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Ready[Arrived]:
        return Ready(Arrived(*permute(x_TD, routing.slot_TK, routing.weight_TK, self._num_slots)))

    def combine(self, y: Tensor, ticket: object, out_TD: Tensor) -> Ready[Tensor]:
        assert isinstance(ticket, Bags)
        return Ready(unpermute(y, ticket, out_TD))

    def close(self) -> None:
        """Nothing is held."""
